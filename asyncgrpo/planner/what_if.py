"""`--what-if KEY=VALUE`: the same task with longer completions, more GPUs, a quicker learner and so on."""

import math
from collections.abc import Callable, Sequence

import msgspec

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.profile import Profile


def what_if(profile: Profile, gpus: int | None, changes: Sequence[str]) -> tuple[Profile, int | None]:
    """The profile and the GPUs, as `KEY=VALUE` or `KEY=2x` changes them. Raises ConfigError."""
    for change in changes:
        key, _, text = change.partition("=")
        if key not in NOW:
            raise ConfigError(f"--what-if {change}: expected KEY=VALUE or KEY=2x, with KEY one of {', '.join(NOW)}")
        now = gpus or profile.gpus if key == "gpus" else NOW[key](profile)
        value = _value(change, text, now)
        if key == "gpus":
            gpus = round(value)
        else:
            profile = _changed(profile, change, key, value, value / now if now else math.nan)
    return profile, gpus


NOW: dict[str, Callable[[Profile], float]] = {
    "gpus": lambda profile: profile.gpus,
    "length": lambda profile: profile.lengths.mean,
    "prompts_per_step": lambda profile: profile.prompts_per_step,
    "group_size": lambda profile: profile.group_size,
    "groups_in_flight": lambda profile: profile.groups_in_flight,
    "decode": lambda profile: profile.decode.rate(profile.groups_in_flight),
    "learner": lambda profile: 1 / profile.learner.rank_s_per_token if profile.learner.rank_s_per_token else 0.0,
    "publish": lambda profile: profile.publish_s,
    "reward": lambda profile: profile.reward_s,
    "filtered": lambda profile: profile.filtered,
}
"""What a key is in a profile: GPUs; mean tokens; counts; tokens a second of an engine and of a learner rank; seconds; a share."""


def _value(change: str, text: str, now: float) -> float:
    try:
        value = float(text[:-1]) * now if text.endswith("x") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--what-if {change}: {text!r} makes no number above 0; write such as 16 or 2x")
    return value


def _changed(profile: Profile, change: str, key: str, value: float, factor: float) -> Profile:
    replace, decode, learner = msgspec.structs.replace, profile.decode, profile.learner
    match key:
        case "length":
            return replace(profile, lengths=profile.lengths.times(factor))
        case "decode":
            faster = replace(
                decode, base_s=decode.base_s / factor, per_completion_s=decode.per_completion_s / factor, measured=()
            )
            return replace(profile, decode=faster)
        case "learner":
            return replace(profile, learner=replace(learner, rank_s_per_token=1 / value, measured=()))
        case "publish":
            return replace(profile, publish_s=value, pause_s=profile.pause_s * factor)
        case "reward":
            return replace(profile, reward_s=value)
        case "filtered":
            if value >= 1:
                raise ConfigError(f"--what-if {change}: a share below 1 is needed")
            return replace(profile, filtered=value)
    return replace(profile, **{key: max(2 if key == "group_size" else 1, round(value))})
