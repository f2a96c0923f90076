"""Rewards: how completions are scored, by a rule for their `data_source` or by a function of the user.

`build_reward` makes them. Code that could hang, crash or import large libraries runs in worker processes that can be
killed (`pool.py`). A call that fails comes back as a named failure, never as a silent 0.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncgrpo.rewards.base import Reward
from asyncgrpo.rewards.pool import START_TIMEOUT_S
from asyncgrpo.rewards.rules import RuleReward
from asyncgrpo.rewards.user import UserReward, check_user_function, load_user_function

if TYPE_CHECKING:  # workers import this package too, and have no use for the configuration
    from asyncgrpo.config.schema import RewardConfig

__all__ = ["Reward", "RuleReward", "UserReward", "build_reward", "check_user_function", "load_user_function"]


def build_reward(
    config: "RewardConfig",
    *,
    extra_rules: dict[str, Callable[[str, Any], float]] | None = None,
    import_timeout_s: float = START_TIMEOUT_S,
) -> Reward:
    """Build the reward that `config` asks for. Blocks while a user's function is checked, as long as its imports take.

    Args:
        config: with `function`, that function scores completions; without, the rule for their `data_source` does.
        extra_rules: rules by exact `data_source`, beside the built-in ones: `rule(completion_text, ground_truth)` gives
            the score. They run in this process, so they must be quick and unable to hang. Unused with `function`.
        import_timeout_s: how long the user's file may take to import; `reward.timeout_s` if that is longer.
    Raises:
        RewardError: the user's function cannot be loaded; the message says why in one sentence.
    """
    if config.function is None:
        return RuleReward(timeout_s=config.timeout_s, workers=config.workers, extra_rules=extra_rules)
    check_user_function(config.function, timeout_s=max(import_timeout_s, config.timeout_s))
    return UserReward(config.function, timeout_s=config.timeout_s, workers=config.workers)
