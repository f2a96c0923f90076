"""What an evaluation finds of one suite, group by group: rewards and their parts, pass@k, maj@k, failures, versions."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from asyncgrpo import metrics
from asyncgrpo.algorithms.estimates import Estimate, majority_at, mean_of, pass_at, powers_up_to, share_of
from asyncgrpo.rewards.rules import vote_of
from asyncgrpo.types import PolicyVersion, Score
from asyncgrpo.wire.rollouts import SuiteResult

FEWEST_VOTES = 4
"""The smallest k of maj@k: of two different votes none has more, so maj@2 is pass@1."""


def suite_of(prompt_id: str) -> str:
    """The suite of a held-out prompt: `gsm8k` of `gsm8k/17`."""
    return prompt_id.rpartition("/")[0]


class Scored(NamedTuple):
    """One scored completion to a held-out prompt."""

    score: Score
    text: str
    num_tokens: int


class Suite:
    """The prompts of one suite that are sampled so far. Completions without a score take no part in any mean."""

    def __init__(self, success: float) -> None:
        """
        Args:
            success: reward from which a completion is right.
        """
        self._success = success
        self._prompts = 0
        self._rewards: list[list[float]] = []
        self._numbers: defaultdict[str, list[float]] = defaultdict(list)  # by name, one of each prompt that has it
        self._parts: defaultdict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._failures: Counter[str] = Counter()
        self._versions: set[PolicyVersion] = set()

    def fail(self, reason: str) -> None:
        """A prompt could not be sampled."""
        self._prompts += 1
        self._failures[reason] += 1

    def add(self, source: str, completions: Sequence[Scored], versions: Collection[PolicyVersion] = ()) -> None:
        """The completions to one prompt, of this `data_source`."""
        self._prompts += 1
        self._versions.update(versions)
        self._lengths += [one.num_tokens for one in completions]
        for one in completions:
            if one.score.value is None:
                self._failures[one.score.failure or "unknown"] += 1
            for name, value in one.score.parts.items():
                self._parts[name].append(value)
        scored = [(one.score.value, one.text) for one in completions if one.score.value is not None]
        if scored:
            self._rewards.append([value for value, _ in scored])
            self._count(source, [text for _, text in scored], [value >= self._success for value, _ in scored])

    def _count(self, source: str, texts: Sequence[str], is_right: Sequence[bool]) -> None:
        ks = powers_up_to(len(texts))
        for k in ks:
            self._numbers[f"pass@{k}"].append(pass_at(k, is_right))
        if many := [k for k in ks if k >= FEWEST_VOTES]:
            for k, share in majority_at(many, [vote_of(text, source) for text in texts], is_right).items():
                self._numbers[f"maj@{k}"].append(share)

    @property
    def rewards(self) -> list[float]:
        """Every reward; a completion without a score has none."""
        return [value for values in self._rewards for value in values]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every completion."""
        return self._lengths

    def result(self) -> SuiteResult:
        """The numbers, as they are by now."""
        numbers = {"reward": _reward(self._rewards)} if self._rewards else {}
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


def _reward(by_prompt: list[list[float]]) -> Estimate:
    """The mean over completions. Its interval is that of the means of prompts."""
    estimate = mean_of([fmean(values) for values in by_prompt])
    mean = fmean(value for values in by_prompt for value in values)
    if estimate.low is None or estimate.high is None:
        return Estimate(mean, None, None)
    half = (estimate.high - estimate.low) / 2
    return Estimate(mean, mean - half, mean + half)
