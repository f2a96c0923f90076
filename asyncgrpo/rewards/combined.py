"""Several rewards as one: the weighted sum of their scores, the first that applies, or a sum behind a gate.

Each of them is a named part of the score. A reward that does not apply to a completion adds nothing, as in TRL. One that
fails fails the whole: a score without it would be another reward.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncgrpo.rewards.base import MAX_DETAIL, MAX_PARTS, ConfiguredReward, Sampled, failed, score_of_value
from asyncgrpo.types import Prompt, Score

Combine = Literal["sum", "first", "gate"]


@dataclass(frozen=True)
class Weighted:
    """One reward of several."""

    name: str
    weight: float
    reward: ConfiguredReward


class CombinedReward:
    """Several rewards as one.

    `sum`: the weighted sum of all, which are called at the same time. `first`: the first that applies, times its weight; those
    behind it are called for the other completions only. `gate`: the sum, but a completion whose first reward is not above
    a threshold gets that one alone, and the others are not called for it.
    """

    def __init__(self, rewards: Sequence[Weighted], combine: Combine = "sum", *, gate_above: float = 0.0) -> None:
        self._rewards, self._how, self._gate_above = rewards, combine, gate_above
        self.takes_groups = any(one.reward.takes_groups for one in rewards)
        about = [f"{one.weight:g} x {one.reward.about}" for one in rewards]
        if combine == "first":
            self.about = ", else ".join(about)
        elif combine == "gate":
            self.about = f"{about[0]}, and where that reward is above {gate_above:g} + {' + '.join(about[1:])}"
        else:
            self.about = " + ".join(about)

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError if one of them has no rule for one of these sources."""
        for one in self._rewards:
            one.reward.check_sources(sources)

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        given: list[dict[str, Score]] = [{} for _ in completions]  # by name of the reward, in their order
        left = list(range(len(completions)))
        for some in self._rounds():
            scores = await asyncio.gather(
                *(one.reward.score(prompt, [completions[index] for index in left]) for one in some)
            )
            for one, of_one in zip(some, scores, strict=True):
                for index, score in zip(left, of_one, strict=True):
                    given[index][one.name] = score
            left = [index for index in left if self._goes_on(given[index])]
            if not left:
                break
        return [self._combine(of_one) for of_one in given]

    def withdraw(self) -> None:
        """See `rewards.base.ConfiguredReward`."""
        for one in self._rewards:
            one.reward.withdraw()

    async def close(self) -> None:
        """End every worker process."""
        for one in self._rewards:
            await one.reward.close()

    def _rounds(self) -> Iterator[Sequence[Weighted]]:
        """The rewards that are called at the same time, one round after the other."""
        if self._how == "sum":
            yield self._rewards
        elif self._how == "gate":
            yield self._rewards[:1]
            yield self._rewards[1:]
        else:
            yield from ([one] for one in self._rewards)

    def _goes_on(self, given: dict[str, Score]) -> bool:
        """Whether rewards of the next round are called for a completion, by the scores of those before."""
        last = next(reversed(given.values()))
        if self._how == "first":
            return last.failure == "not_applicable"
        return last.value is not None and last.value > self._gate_above

    def _combine(self, given: dict[str, Score]) -> Score:
        """The score of one completion, from those of the rewards that were called."""
        times = {name: max(getattr(score, name) for score in given.values()) for name in ("seconds", "waited")}
        for name, score in given.items():
            if score.failure is not None and score.failure != "not_applicable":
                return msgspec.structs.replace(failed(score.failure, f"{name}: {score.detail}"), **times)
        total, parts, details = 0.0, dict[str, float](), list[str]()
        weights = {one.name: one.weight for one in self._rewards}
        for name, score in given.items():
            if score.value is not None:
                total += weights[name] * score.value
                parts |= {name: score.value} | {f"{name}/{part}": n for part, n in score.parts.items()}
                details += [f"{name}: {score.detail}"] if score.detail else []
        if not parts:
            return msgspec.structs.replace(next(iter(given.values())), **times)
        combined = score_of_value(total)  # a sum has the bounds of a score
        if combined.failure is not None:
            return msgspec.structs.replace(combined, **times)
        kept = dict(list(parts.items())[:MAX_PARTS])
        if left_out := [name for name in parts if name not in kept]:
            details.append(f"parts left out, more than {MAX_PARTS}: {', '.join(left_out)}")
        return Score(value=total, parts=kept, detail="; ".join(details)[:MAX_DETAIL], **times)
