"""Evaluations beside training: held-out prompts, leases that hold no slot, and results that name the versions sampled.

Generation does not stop for an evaluation, so the weights may change in the middle; the result names the oldest and the
newest version that sampled. This file knows no sockets and no clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from asyncgrpo.buffer.suites import Scored, Suite, suite_of
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling
from asyncgrpo.wire.rollouts import Deliver, EvalResult

MAX_ATTEMPTS = 3
FREE_LOSSES = 2
"""Generators that may end while they work on a held-out prompt before each further end costs it an attempt. Without a
bound, a prompt that ends every generator would do so for ever."""


@dataclass
class _Evaluation:
    """One evaluation in flight."""

    step: int
    started_s: float
    missing: int
    suites: dict[str, Suite]
    groups: list[Deliver] = field(default_factory=list)


class Evaluations:
    """Evaluations of one fixed list of prompts, any number of them in flight at once."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        lease_timeout_s: float,
        *,
        lineage: int = 1,
        completions: int = 1,
        success: float = 1.0,
        keep: Callable[[int, list[Deliver]], None] = lambda step, groups: None,
    ) -> None:
        """
        Args:
            prompts: of all suites; their ids name them (`suite_of`).
            lineage: of this start; it is in every lease id, so that a late group of an earlier start fits no lease.
            completions: to each prompt.
            success: reward from which a completion is right.
            keep: called with the step and the groups of each evaluation that ended.
        """
        self._suites = list(dict.fromkeys(suite_of(prompt.prompt_id) for prompt in prompts))
        self._completions, self._success, self._keep = completions, success, keep
        self._prompts, self._sampling, self._seed = prompts, sampling, seed
        self._lease_timeout_s = lease_timeout_s
        self._lineage = lineage
        self._running: dict[int, _Evaluation] = {}  # by step
        self._queue: deque[Lease] = deque()
        self._losses: Counter[str] = Counter()  # generators that ended, by group id
        self._leased: dict[str, tuple[Lease, str, float]] = {}  # with holder and time, by lease id
        self._scored: set[str] = set()  # leases for which only scores are missing

    @property
    def in_flight(self) -> bool:
        """Whether an evaluation was requested and is not finished."""
        return bool(self._running)

    def request(self, step: int, now_s: float) -> None:
        """Queue every prompt for the evaluation of `step`; a step is evaluated once."""
        if not self._prompts or step in self._running:
            return
        self._running[step] = _Evaluation(
            step, now_s, len(self._prompts), {name: Suite(self._success) for name in self._suites}
        )
        self._queue.extend(self._lease(step, index, 0) for index in range(len(self._prompts)))

    def lease(self, holder: str, now_s: float, serves: PolicyVersion | None = None) -> Lease | None:
        """A lease of the next queued prompt; None if there is none, or if `serves` is older than what it is to evaluate."""
        if not self._queue or (serves is not None and serves.number < _step_of(self._queue[0])):
            return None
        lease = self._queue.popleft()
        self._leased[lease.lease_id] = (lease, holder, now_s)
        return lease

    def lease_of(self, lease_id: str) -> Lease | None:
        """The lease of this name, if it is in flight."""
        held = self._leased.get(lease_id)
        return held[0] if held is not None else None

    def held_by(self, holder: str) -> int:
        """Leases that `holder` works on."""
        return sum(h == holder for _, h, _ in self._leased.values())

    def sampled_by(self, holder: str) -> int:
        """Those of them that take a place: completions are still sampled."""
        return sum(h == holder and lease_id not in self._scored for lease_id, (_, h, _) in self._leased.items())

    def awaits_scores(self, holder: str, lease_id: str) -> None:
        """Note that only scores are missing for a lease of `holder`."""
        if lease_id in self._leased and self._leased[lease_id][1] == holder:
            self._scored.add(lease_id)

    def release(self, holder: str, now_s: float) -> list[EvalResult]:
        """Free the leases of a generator that is gone. Returns the evaluations that this finished.

        A prompt is queued again, before all others; after `FREE_LOSSES` such ends each one costs it an attempt.
        """
        results = []
        for lease_id, lease in [(i, lease) for i, (lease, h, _) in self._leased.items() if h == holder]:
            self._losses[lease.group_id] += 1
            if self._losses[lease.group_id] > FREE_LOSSES:
                results.append(self.fail(lease_id, "generator_lost", now_s))
            else:
                self.give_back(lease_id)
        return [result for result in results if result is not None]

    def fail(self, lease_id: str, reason: str, now_s: float) -> EvalResult | None:
        """Queue the prompt again, before all others, or count it as failed. Returns the evaluation if that finished it."""
        held = self._end(lease_id)
        if held is None:
            return None
        lease = held[0]
        if lease.attempt + 1 < MAX_ATTEMPTS:
            self._queue.appendleft(self._lease(_step_of(lease), lease.prompt_index, lease.attempt + 1))
            return None
        self._losses.pop(lease.group_id, None)
        evaluation = self._running[_step_of(lease)]
        evaluation.suites[suite_of(lease.prompt.prompt_id)].fail(reason)
        return self._count_down(evaluation, now_s)

    def _end(self, lease_id: str) -> tuple[Lease, str, float] | None:
        self._scored.discard(lease_id)
        return self._leased.pop(lease_id, None)

    def give_back(self, lease_id: str) -> None:
        """Queue the prompt of this lease again, at no cost: the prompt was not the cause that it ended."""
        held = self._end(lease_id)
        if held is not None:
            self._queue.appendleft(held[0])

    def expire(
        self, now_s: float, is_excused: Callable[[str], bool] = lambda holder: False
    ) -> tuple[list[tuple[Lease, str]], list[EvalResult]]:
        """Fail the leases whose deadline is over. Returns them with their holders, and the evaluations this finished.

        Args:
            is_excused: whether a holder is late for a reason that is not its prompts'; those are given back.
        """
        limit = now_s - self._lease_timeout_s
        late = [(lease, holder) for lease, holder, since in self._leased.values() if since < limit]
        results = []
        for lease, holder in late:
            if is_excused(holder):
                self.give_back(lease.lease_id)
            else:
                results.append(self.fail(lease.lease_id, "lease_timeout", now_s))
        return late, [result for result in results if result is not None]

    def accept(self, message: Deliver, now_s: float) -> EvalResult | None:
        """Count a delivered group. Returns the evaluation if that finished it."""
        held = self._end(message.lease_id)
        if held is None:
            return None
        self._losses.pop(message.group_id, None)
        evaluation = self._running[_step_of(held[0])]
        evaluation.groups.append(message)
        completions = [Scored(rollout.score, rollout.text, rollout.num_tokens) for rollout in message.rollouts]
        prompt = held[0].prompt
        evaluation.suites[suite_of(prompt.prompt_id)].add(prompt.source, completions, message.versions)
        return self._count_down(evaluation, now_s)

    def _count_down(self, evaluation: _Evaluation, now_s: float) -> EvalResult | None:
        evaluation.missing -= 1
        if evaluation.missing:
            return None
        del self._running[evaluation.step]
        self._keep(evaluation.step, evaluation.groups)
        rewards = [value for suite in evaluation.suites.values() for value in suite.rewards]
        lengths = [length for suite in evaluation.suites.values() for length in suite.lengths]
        suites = {name: suite.result() for name, suite in evaluation.suites.items()}
        return EvalResult(
            step=evaluation.step,
            oldest=min((suite.oldest for suite in suites.values() if suite.oldest is not None), default=None),
            newest=max((suite.newest for suite in suites.values() if suite.newest is not None), default=None),
            completions=len(lengths),
            reward_mean=fmean(rewards) if rewards else None,
            failures=dict(sum((Counter(suite.failures) for suite in suites.values()), Counter())),
            completion_length_mean=fmean(lengths) if lengths else None,
            seconds=now_s - evaluation.started_s,
            suites=suites,
        )

    def _lease(self, step: int, index: int, attempt: int) -> Lease:
        group_id = f"eval.{self._lineage}.{step}.{index}"
        return Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            prompt_index=index,
            purpose="eval",
            prompt=self._prompts[index],
            num_completions=self._completions,
            sampling=self._sampling,
            seed=self._seed + index * self._completions,
        )


def _step_of(lease: Lease) -> int:
    return int(lease.group_id.split(".")[2])
