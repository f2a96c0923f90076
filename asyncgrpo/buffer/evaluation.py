"""Evaluations beside training: held-out prompts, leases that hold no slot, and results that name the versions sampled.

Generation continues during an evaluation, so the weights may change in the middle. The result names the oldest and the
newest version that sampled. `Evaluations` and `Suite` use no sockets and no clock.

A completion is right or wrong. pass@k is the probability that one of k is right: a mean over all subsets of k of the n
completions, so it is unbiased for any k up to n. maj@n is 1 if the majority of the n final answers is right.
"""

import itertools
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from msgspec.structs import asdict

from asyncgrpo import metrics
from asyncgrpo.recording.samples import SampleWriter, held_out_samples
from asyncgrpo.rewards.rules import vote_of
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Rollout, Sampling
from asyncgrpo.wire.rollouts import Deliver, EvalResult, RolloutHeader, SuiteResult

log = logging.getLogger(__name__)

# -- pass@k, maj@n, means and their intervals --------------------------------------------------------------------------

Z95 = 1.959964
"""Standard deviations of a two-sided 95 % interval of the normal distribution."""


class Estimate(NamedTuple):
    """A value with its 95 % interval; None if a single prompt gives no interval."""

    value: float
    low: float | None
    high: float | None


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to `n`."""
    return [2**power for power in range(n.bit_length())]


def pass_at(k: int, is_right: Sequence[bool]) -> float:
    """Return the share of subsets of k completions with at least one right: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), in integers until the last division.
    """
    n, wrong = len(is_right), len(is_right) - sum(is_right)
    return 1 - math.comb(wrong, k) / math.comb(n, k)


def majority(votes: Sequence[str], is_right: Sequence[bool]) -> float:
    """Return 1 if the vote of most completions is right, else 0.

    Tied votes count with equal shares. A vote that is right in only some completions (their reward depends on more than the
    final answer) counts with that share.
    """
    counts, right = Counter(votes), Counter(vote for vote, good in zip(votes, is_right, strict=True) if good)
    most = max(counts.values())
    return fmean(right[vote] / most for vote, count in counts.items() if count == most)


def share_of(values: Sequence[float]) -> Estimate:
    """Return the mean of values between 0 and 1, one per prompt, with Wilson's interval over the number of prompts.

    Completions of one prompt are correlated, so trials are prompts. Unlike a bootstrap, the interval does not collapse if all
    prompts agree. For values between 0 and 1 it is slightly too wide, never too narrow.
    """
    n, mean = len(values), sum(values) / len(values)
    middle = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z95**2 / (4 * n**2))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_of(by_prompt: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over all completions, with the interval of the central limit theorem over the means of prompts."""
    mean = fmean(itertools.chain.from_iterable(by_prompt))
    if len(by_prompt) == 1:
        return Estimate(mean, None, None)
    half = Z95 * stdev(map(fmean, by_prompt)) / math.sqrt(len(by_prompt))
    return Estimate(mean, mean - half, mean + half)


# -- results of a suite ------------------------------------------------------------------------------------------------

FEWEST_VOTES = 3
"""Smallest n of maj@n. Two different votes have no majority, so maj@2 equals pass@1."""


def suite_of(prompt_id: str) -> str:
    """Return the suite of a held-out prompt: `gsm8k` of `gsm8k/17`."""
    return prompt_id.rpartition("/")[0]


@dataclass(frozen=True)
class Scored:
    """One scored completion of a held-out prompt."""

    rollout: Rollout | RolloutHeader
    num_tokens: int
    source: str
    """`data_source` of the prompt."""

    @cached_property
    def vote(self) -> str:
        """Its final answer, from the text that the reward read."""
        return vote_of(self.rollout.sampled_text or self.rollout.text, self.source)


class Suite:
    """Results of one suite so far. Unscored completions are left out of every mean."""

    def __init__(self, success: float) -> None:
        """
        Args:
            success: smallest reward of a correct completion.
        """
        self._success = success
        self._prompts = 0
        self._rewards: list[list[float]] = []
        self._numbers: defaultdict[str, list[float]] = defaultdict(list)  # by name, one value per prompt
        self._parts: defaultdict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._failures: Counter[str] = Counter()
        self._versions: set[PolicyVersion] = set()

    def fail(self, reason: str) -> None:
        """Count a prompt that could not be sampled."""
        self._prompts += 1
        self._failures[reason] += 1

    def add(self, completions: Sequence[Scored], versions: Collection[PolicyVersion] = ()) -> None:
        """Add the completions of one prompt."""
        self._prompts += 1
        self._versions.update(versions)
        self._lengths += [one.num_tokens for one in completions]
        for score in (one.rollout.score for one in completions):
            if score.value is None:
                self._failures[score.failure or "unknown"] += 1
            for name, part in score.parts.items():
                self._parts[name].append(part)
        scored = [(value, one) for one in completions if (value := one.rollout.score.value) is not None]
        if scored:
            self._rewards.append([value for value, _ in scored])
            is_right = [value >= self._success for value, _ in scored]
            for k in powers_up_to(len(scored)):
                self._numbers[f"pass@{k}"].append(pass_at(k, is_right))
            if len(completions) >= FEWEST_VOTES:
                votes = [one.vote for _, one in scored]
                self._numbers[f"maj@{len(completions)}"].append(majority(votes, is_right))

    @property
    def rewards(self) -> list[float]:
        """Rewards of all scored completions."""
        return [value for values in self._rewards for value in values]

    def result(self) -> SuiteResult:
        """Return the results so far."""
        numbers = {"reward": mean_of(self._rewards)} if self._rewards else {}
        order = sorted(self._numbers, key=lambda name: (name[:4] != "pass", int(name.partition("@")[2])))
        numbers |= {name: share_of(self._numbers[name]) for name in order}
        parts = sorted(self._parts, key=lambda name: (-len(self._parts[name]), name))[: metrics.MAX_REWARD_PARTS]
        return SuiteResult(
            prompts=self._prompts,
            completions=len(self._lengths),
            oldest=min(self._versions, default=None),
            newest=max(self._versions, default=None),
            failures=dict(self._failures),
            completion_length_mean=fmean(self._lengths) if self._lengths else None,
            numbers={name: (number.value, number.low, number.high) for name, number in numbers.items()},
            parts={name: fmean(self._parts[name]) for name in sorted(parts)},
        )


# -- evaluations -------------------------------------------------------------------------------------------------------

MAX_ATTEMPTS = 4
"""Leases of one prompt before it counts as failed. A lost generator costs an attempt: its prompt may be the cause."""


@dataclass
class _Evaluation:
    """One running evaluation."""

    step: int
    started_s: float
    missing: int
    suites: dict[str, Suite]
    whole: Suite
    """All suites together."""
    groups: list[Deliver] = field(default_factory=list)


@dataclass(eq=False)
class Evaluations:
    """Evaluations of one fixed list of prompts. Several may run at once."""

    prompts: Sequence[Prompt]
    """Of all suites, named by their ids (`suite_of`)."""
    sampling: Sampling
    seed: int
    lease_timeout_s: float
    _: KW_ONLY
    lineage: int = 1
    """Of this start. It is part of every lease id, so that a late group of an earlier start is refused."""
    completions: int = 1
    """Per prompt."""
    success: float = 1.0
    """Smallest reward of a correct completion."""
    keep: Callable[[int, list[Deliver]], None] = lambda step, groups: None
    """Called with the step and the groups of each finished evaluation."""

    def __post_init__(self) -> None:
        self._suites = list(dict.fromkeys(suite_of(prompt.prompt_id) for prompt in self.prompts))
        self._running: dict[int, _Evaluation] = {}  # by step
        self._requested = -1  # the newest step
        self._queue: deque[Lease] = deque()
        self._leased: dict[str, tuple[Lease, str, float]] = {}  # by lease id: lease, holder, time
        self._held: defaultdict[str, list[str]] = defaultdict(list)  # lease ids by holder
        self._scored: set[str] = set()  # leases for which only scores are missing
        self.finished: tuple[EvalResult, ...] = ()
        """Those since the last `take_finished`, by step."""

    def take_finished(self) -> tuple[EvalResult, ...]:
        """Return the evaluations that were finished since the last call."""
        finished, self.finished = self.finished, ()
        return finished

    @property
    def in_flight(self) -> bool:
        """True if an evaluation was requested and is not finished."""
        return bool(self._running)

    def request(self, step: int | None, now_s: float) -> None:
        """Queue every prompt for the evaluation of `step`, if there is one. It is evaluated once, and not after a later one."""
        if not self.prompts or step is None or step <= self._requested:
            return
        self._requested = step
        suites = {name: Suite(self.success) for name in self._suites}
        self._running[step] = _Evaluation(step, now_s, len(self.prompts), suites, Suite(self.success))
        self._queue.extend(self._lease(step, index, 0) for index in range(len(self.prompts)))

    def may_lease(self, serves: PolicyVersion | None = None) -> bool:
        """Return False if the queue is empty or `serves` is older than the step to evaluate."""
        return bool(self._queue) and (serves is None or serves.number >= _step_of(self._queue[0]))

    def lease(self, holder: str, now_s: float, serves: PolicyVersion | None = None) -> Lease | None:
        """Lease the next queued prompt, if `may_lease`."""
        if not self.may_lease(serves):
            return None
        lease = self._queue.popleft()
        self._leased[lease.lease_id] = (lease, holder, now_s)
        self._held[holder].append(lease.lease_id)
        return lease

    def lease_of(self, lease_id: str) -> Lease | None:
        """Return the lease with this id if it is in flight."""
        held = self._leased.get(lease_id)
        return held[0] if held is not None else None

    def held_by(self, holder: str) -> int:
        """Return the number of leases that `holder` works on."""
        return len(self._held[holder])

    def sampled_by(self, holder: str) -> int:
        """Return the number of leases of `holder` whose completions are still being sampled."""
        return sum(lease_id not in self._scored for lease_id in self._held[holder])

    def awaits_scores(self, holder: str, lease_id: str) -> None:
        """Note that only scores are missing for a lease of `holder`."""
        if lease_id in self._leased and self._leased[lease_id][1] == holder:
            self._scored.add(lease_id)

    def release(self, holder: str, now_s: float) -> None:
        """Fail the leases of a lost generator."""
        for lease_id in tuple(self._held[holder]):
            self.fail(lease_id, "generator_lost", now_s)

    def free_unknown(self, holder: str, known: Collection[str], before_s: float) -> list[str]:
        """Requeue the leases that were granted before `before_s`, but that their generator does not know. Returns their ids."""
        lost = [i for i in self._held[holder] if i not in known and self._leased[i][2] < before_s]
        for lease_id in lost:
            self.give_back(lease_id)
        return lost

    def fail(self, lease_id: str, reason: str, now_s: float) -> None:
        """Requeue the prompt at the head, or count it as failed."""
        lease = self._end(lease_id)
        if lease is None:
            return
        if lease.attempt + 1 < MAX_ATTEMPTS:
            self._queue.appendleft(self._lease(_step_of(lease), lease.prompt_index, lease.attempt + 1))
            return
        evaluation = self._running[_step_of(lease)]
        for suite in (evaluation.suites[suite_of(lease.prompt.prompt_id)], evaluation.whole):
            suite.fail(reason)
        self._count_down(evaluation, now_s)

    def _end(self, lease_id: str) -> Lease | None:
        if lease_id not in self._leased:
            return None
        self._scored.discard(lease_id)
        lease, holder, _ = self._leased.pop(lease_id)
        self._held[holder].remove(lease_id)
        return lease

    def give_back(self, lease_id: str) -> None:
        """Requeue the prompt of this lease at no cost: it did not cause the lease to end."""
        lease = self._end(lease_id)
        if lease is not None:
            self._queue.appendleft(lease)

    def expire(self, now_s: float, is_excused: Callable[[str], bool] = lambda holder: False) -> list[tuple[Lease, str]]:
        """Fail the expired leases. Return them with their holders.

        Args:
            is_excused: True for a holder whose prompts are not why it is late. Its leases are given back.
        """
        limit = now_s - self.lease_timeout_s
        late = [(lease, holder) for lease, holder, since in self._leased.values() if since < limit]
        for lease, holder in late:
            if is_excused(holder):
                self.give_back(lease.lease_id)
            else:
                self.fail(lease.lease_id, "lease_timeout", now_s)
        return late

    def accept(self, message: Deliver, now_s: float) -> None:
        """Add a delivered group."""
        lease = self._end(message.lease_id)
        if lease is None:
            return
        evaluation, prompt = self._running[_step_of(lease)], lease.prompt
        evaluation.groups.append(message)
        completions = [Scored(rollout, rollout.num_tokens, prompt.source) for rollout in message.rollouts]
        for suite in (evaluation.suites[suite_of(prompt.prompt_id)], evaluation.whole):
            suite.add(completions, message.versions)
        self._count_down(evaluation, now_s)

    def _count_down(self, evaluation: _Evaluation, now_s: float) -> None:
        evaluation.missing -= 1
        if evaluation.missing:
            return
        del self._running[evaluation.step]
        self.keep(evaluation.step, evaluation.groups)
        result = EvalResult(
            **asdict(evaluation.whole.result()),
            step=evaluation.step,
            seconds=now_s - evaluation.started_s,
            suites={name: suite.result() for name, suite in evaluation.suites.items()},
        )
        self.finished = tuple(sorted((*self.finished, result), key=attrgetter("step")))

    def _lease(self, step: int, index: int, attempt: int) -> Lease:
        group_id = f"eval.{self.lineage}.{step}.{index}"
        return Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            prompt_index=index,
            purpose="eval",
            prompt=self.prompts[index],
            num_completions=self.completions,
            sampling=self.sampling,
            seed=self.seed + index * self.completions,
        )


def _step_of(lease: Lease) -> int:
    return int(lease.group_id.split(".")[2])


# -- samples -----------------------------------------------------------------------------------------------------------


class EvalSamples:
    """Writes the completions of every evaluation as Parquet, so that two steps of a run can be compared.

    `evals/000/step_000040.parquet` has the columns of `recording.samples.Sample`. If the disk refuses a file, the failure
    is logged and the file is missing. A thread writes, because a large file takes seconds in which the buffer must reply.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        """
        Args:
            keep: number of newest files to keep; None: all.
        """
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eval-samples")

    def keep(self, step: int, groups: list[Deliver]) -> None:
        """Queue the groups of a finished evaluation for writing."""
        self._thread.submit(self._write, step, groups)

    def close(self) -> None:
        """Wait until all files are written."""
        self._thread.shutdown()

    def _write(self, step: int, groups: list[Deliver]) -> None:
        try:
            groups.sort(key=lambda group: group.prompt_index)
            rows = [sample for group in groups for sample in held_out_samples(group, step)]
            SampleWriter(self._folder, self._keep).write(step, rows)
        except Exception as error:
            log.warning("cannot write the samples of the evaluation of step %d: %s", step, error)
