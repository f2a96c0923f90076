"""Builds the reward that a configuration names: a built-in one, a function of the user, or several as one.

Code that could hang, crash or import large libraries runs in worker processes that can be killed (`pool.py`). A call that fails
comes back as a named failure, never as a silent 0.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncgrpo.config.schema import RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.guests import START_TIMEOUT_S, split_spec
from asyncgrpo.rewards.base import MAX_DETAIL, MAX_PARTS, Reward, Sampled, failed, score_of_value
from asyncgrpo.rewards.model import JudgeReward, ModelReward, ServedModelReward
from asyncgrpo.rewards.pool import PoolReward
from asyncgrpo.rewards.rules import RuleReward
from asyncgrpo.rewards.user import LOAD, check_user_function
from asyncgrpo.types import Prompt, Score


def build_reward(
    config: RewardConfig, *, import_timeout_s: float = START_TIMEOUT_S, trial: Prompt | None = None
) -> Reward:
    """Build the reward that `config` names. Blocks while a user's functions are checked, as long as their imports take.

    Args:
        config: with `function`, what it names scores completions; without, the rule for their `data_source` does.
        import_timeout_s: deadline of importing a user's file; `reward.timeout_s` if that is longer.
        trial: prompt to try a user's functions with.
    Raises:
        RewardError: a function cannot be loaded or the reward is unknown; one sentence.
    """
    specs = config.functions
    if not specs:
        raise RewardError("reward.function is an empty list; name a function or a built-in reward, or leave it out")
    weights = config.weights or (1.0,) * len(specs)
    if len(weights) != len(specs):
        raise RewardError(
            f"reward.weights has {len(weights)} and reward.function {len(specs)} entries; give a weight for each reward"
        )
    if config.combine != "sum" and len(specs) < 2:
        raise RewardError(f"reward.combine={config.combine} needs two rewards or more; there are {len(specs)}")
    taken = set[str]()
    rewards = list[Reward]()
    for spec in specs:
        if spec == "judge":
            rewards.append(JudgeReward(config.judge))
        elif spec == "model":
            of_model = ModelReward if config.model.url is None else ServedModelReward
            rewards.append(of_model(config.model))
        elif spec.isidentifier():
            rewards.append(RuleReward(config, spec))
        else:
            ready = check_user_function(spec, config, import_timeout_s=import_timeout_s, trial=trial)
            taken.update(ready.kwargs)
            reward = PoolReward(
                LOAD,
                {"spec": spec, "kwargs": config.kwargs},
                what=spec,
                workers=config.num_workers,
                timeout_s=config.timeout_s,
                takes_groups=ready.takes_groups,
                about=ready.about,
            )
            rewards.append(reward)
    if unknown := [name for name in config.kwargs if name not in taken]:
        raise RewardError(f"reward.kwargs: no function of reward.function takes {', '.join(unknown)}")
    if weights == (1.0,):
        return rewards[0]
    named = [Weighted(*one) for one in zip(_names(specs), weights, rewards, strict=True)]
    return CombinedReward(named, config.combine)


def _names(specs: tuple[str, ...]) -> list[str]:
    """The name of each: of a function its own, with that of its file where another has the same name."""
    names = [spec if spec.isidentifier() else split_spec(spec)[1] for spec in specs]
    count = Counter(names)
    names = [
        f"{split_spec(spec)[0].stem}.{name}" if count[name] > 1 and not spec.isidentifier() else name
        for spec, name in zip(specs, names, strict=True)
    ]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise RewardError(f"reward.function names {', '.join(twice)} twice; names of rewards must differ")
    return names


# -- several as one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weighted:
    """One reward of several."""

    name: str
    weight: float
    reward: Reward


class CombinedReward(Reward):
    """Several rewards as one: the weighted sum of their scores, the first that applies, or a sum behind a gate.

    `sum`: the weighted sum of all, which are called at the same time. `first`: the first that applies, times its weight; those
    behind it are called for the other completions only. `gate`: the sum, but a completion whose first reward is not above
    0 gets that one alone, and the others are not called for it.

    Each of them is a named part of the score. A reward that does not apply to a completion adds nothing, as in TRL. One that
    fails fails the whole: a score without it would be another reward.
    """

    def __init__(self, rewards: Sequence[Weighted], combine: Literal["sum", "first", "gate"] = "sum") -> None:
        self._rewards, self._how, self.owns = rewards, combine, [one.reward for one in rewards]
        self._rounds: dict[str, Sequence[Sequence[Weighted]]] = {
            "sum": [rewards],
            "first": [[one] for one in rewards],
            "gate": [rewards[:1], rewards[1:]],
        }
        """The rewards that are called at the same time, one round after the other, by the kind of combination."""
        self.takes_groups = any(one.reward.takes_groups for one in rewards)
        self.about = f"{combine} of {', '.join(f'{one.weight:g} x {one.reward.about}' for one in rewards)}"

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError if one of them has no rule for one of these sources."""
        for one in self._rewards:
            one.reward.check_sources(sources)

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        given: list[dict[str, Score]] = [{} for _ in completions]  # by name of the reward, in their order
        left = list(range(len(completions)))
        for some in self._rounds[self._how]:
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

    def _goes_on(self, given: dict[str, Score]) -> bool:
        """Return True if rewards of the next round are called for a completion, by the scores of those before."""
        last = next(reversed(given.values()))
        if self._how == "first":
            return last.failure == "not_applicable"
        return last.value is not None and last.value > 0

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
