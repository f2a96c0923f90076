"""What a replay may change: how the learner trains on the stream, and nothing that the stream was made with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncgrpo.config import Config
from asyncgrpo.config_help import knobs
from asyncgrpo.config_loading import with_overrides
from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.settings import check_algorithm

_FIXED = {
    "algorithm.group_size": "so many answers to each prompt are in the journal",
    "algorithm.min_answers": "so many answers to each prompt are in the journal",
    "algorithm.filter_zero_signal": "it decided which groups were trained",
    "model": "the answers were sampled by this model",
    "data": "the prompts came from there",
    "reward": "the answers were scored by it",
    "sampling": "the answers were sampled under it",
    "buffer": "it decided which groups were trained in which step",
    "run": "the steps, their order and their seeds are those of the journal",
    "generators": "a replay has no generators",
    "weights": "a replay publishes no weights",
    "cluster": "a replay is one learner on this machine",
}
"""Keys and sections that stay as they were, and why."""


def replay_config(recorded: Config, overrides: Sequence[str], *, algorithm: str | None = None) -> Config:
    """The configuration of a replay.

    Args:
        recorded: of the run.
        overrides: `key=value`, as on the command line.
        algorithm: name of a preset that comes before them.
    Raises:
        ConfigError: it is not valid, or a key is set that would have changed what was generated.
    """
    if algorithm is not None:  # a preset sets this key too, and what it decides was decided when the groups were made
        overrides = [f"algorithm.filter_zero_signal={recorded.algorithm.filter_zero_signal}", *overrides]
    config = with_overrides(recorded, overrides, algorithm=algorithm)
    before, after = _by_key(recorded), _by_key(config)
    for key in (key for key in after if after[key] != before[key]):
        fixed = next((name for name in _FIXED if f"{key}.".startswith(f"{name}.")), None)
        if fixed is not None:
            raise ConfigError(f"a replay cannot change {key}: {_FIXED[fixed]}")
    if config.algorithm.advantage == "remax" != recorded.algorithm.advantage:
        raise ConfigError(
            "a replay cannot change algorithm.advantage to remax: it needs a greedy answer to each prompt, and the "
            "journal has none"
        )
    check_algorithm(config)
    return config


def _by_key(config: Config) -> dict[str, Any]:
    """Every knob's value."""
    found = {}
    plain = msgspec.to_builtins(config)
    for key in knobs():
        value = plain
        for name in key.split("."):
            value = value[name]
        found[key] = value
    return found
