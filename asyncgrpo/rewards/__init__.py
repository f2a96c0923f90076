"""Rewards: how completions are scored, by built-in rules, by functions of the user, or by a weighted sum of them.

`build_reward` makes them. Code that could hang, crash or import large libraries runs in worker processes that can be
killed (`pool.py`). A call that fails comes back as a named failure, never as a silent 0.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import ConfiguredReward, Reward, Sampled, score_one
from asyncgrpo.rewards.code import CodeSettings
from asyncgrpo.rewards.combined import CombinedReward, Weighted
from asyncgrpo.rewards.model import ModelReward
from asyncgrpo.rewards.pool import START_TIMEOUT_S
from asyncgrpo.rewards.rules import RuleReward
from asyncgrpo.rewards.user import UserReward, check_user_function, load_user_function, split_spec
from asyncgrpo.rewards.worker import WorkerReady

if TYPE_CHECKING:  # workers import this package too, and have no use for the configuration
    from asyncgrpo.config.schema import RewardConfig

__all__ = [
    "CombinedReward",
    "ConfiguredReward",
    "Reward",
    "RuleReward",
    "Sampled",
    "UserReward",
    "build_reward",
    "check_user_function",
    "load_user_function",
    "score_one",
]


def build_reward(
    config: "RewardConfig",
    *,
    extra_rules: dict[str, Callable[[str, Any], Any]] | None = None,
    import_timeout_s: float = START_TIMEOUT_S,
) -> ConfiguredReward:
    """Build the reward that `config` asks for. Blocks while a user's functions are checked, as long as their imports take.

    Args:
        config: with `function`, what it names scores completions; without, the rule for their `data_source` does.
        extra_rules: rules by exact `data_source`, beside the built-in ones: `rule(completion_text, ground_truth)` gives
            the score. They run in this process, so they must be quick and unable to hang.
        import_timeout_s: how long a user's file may take to import; `reward.timeout_s` if that is longer.
    Raises:
        RewardError: a function cannot be loaded or there is no such reward; the message says why in one sentence.
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
        raise RewardError(
            f"reward.combine={config.combine} needs two rewards or more; reward.function names {len(specs)}"
        )
    taken = set[str]()
    rewards = list[ConfiguredReward]()
    for spec in specs:
        if spec.isidentifier():
            rewards.append(_built_in(spec, config, extra_rules))
        else:
            ready = check_user_function(spec, kwargs=config.kwargs, timeout_s=max(import_timeout_s, config.timeout_s))
            taken.update(ready.kwargs)
            rewards.append(_of_user(spec, config, ready))
    if unknown := [name for name in config.kwargs if name not in taken]:
        raise RewardError(f"reward.kwargs: no function of reward.function takes {', '.join(unknown)}")
    if weights == (1.0,):
        return rewards[0]
    named = [Weighted(*one) for one in zip(_names(specs), weights, rewards, strict=True)]
    return CombinedReward(named, config.combine, gate_above=config.gate_above)


def _built_in(
    name: str, config: "RewardConfig", extra_rules: dict[str, Callable[[str, Any], Any]] | None
) -> ConfiguredReward:
    if name == "judge":
        from asyncgrpo.rewards.judge import JudgeReward  # only here, because it imports aiohttp

        return JudgeReward(config.judge)
    if name == "model" and config.model.url is not None:
        from asyncgrpo.rewards.served_model import ServedModelReward  # as above

        return ServedModelReward(config.model)
    if name == "model":
        return ModelReward(config.model)
    return RuleReward(
        name=name,
        timeout_s=config.timeout_s,
        workers=config.workers,
        format_score=config.format_score,
        qa_score=config.qa_score,
        code=CodeSettings(**msgspec.structs.asdict(config.code), start_within_s=config.timeout_s),
        extra_rules=extra_rules,
    )


def _of_user(spec: str, config: "RewardConfig", ready: WorkerReady) -> UserReward:
    return UserReward(
        spec,
        timeout_s=config.timeout_s,
        workers=config.workers,
        kwargs=config.kwargs,
        takes_groups=ready.takes_groups,
        about=ready.about,
    )


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
