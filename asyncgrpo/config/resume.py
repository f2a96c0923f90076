"""Decides what a resume does with each setting that changed since the previous start.

    refused   the checkpoint, the prompt order or the objective depend on the old value
    applied   the new value counts from the next step on

These functions compare two configurations and read no file. `cluster/folder.py` keeps the settings of each start.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from asyncgrpo.config.explain import knobs, value_in_words
from asyncgrpo.config.load import look_up
from asyncgrpo.config.schema import Config

REFUSED: dict[str, str] = {
    "model.path": "the checkpoint holds the weights of that model",
    "model.lora.rank": "the checkpoint holds adapters of that rank",
    "model.lora.alpha": "the adapters in the checkpoint were trained at that scale",
    "model.lora.targets": "the checkpoint holds adapters of those layers",
    "data.train": "the checkpoint counts its prompts by their place in that file",
    "data.weights": "the checkpoint counts prompts in the order of those shares",
    "data.columns": "the checkpoint counts prompts that were read so",
    "data.max_prompt_tokens": "it decides which prompts there are, and the checkpoint counts them",
    "data.shuffle": "the checkpoint counts prompts in that order",
    "data.system_prompt": "it is part of every prompt that the checkpoint counts",
    "data.chat_template_kwargs": "it decides how every prompt reads that the checkpoint counts",
    "run.seed": "the checkpoint counts prompts in the order of that seed",
    "algorithm.advantage": "one run has one algorithm",
    "algorithm.loss": "one run has one algorithm",
}
"""Reasons for the keys that a resume cannot change. It may change every other key."""

NOT_COMPARED = frozenset({"run.out"})
"""The folder identifies the run, whatever its path was before."""

_MISSING = object()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that a setting names."""

    path: str
    """Absolute path, or a hub id."""
    digest: str = ""
    """Digest of its contents; empty if unknown."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a start."""

    values: dict[str, Any]
    """Plain values by key. Keys that an older release did not have are missing."""
    sources: dict[str, Source]
    """Files and folders that keys name."""


@dataclass(frozen=True)
class Change:
    """One setting that changed."""

    key: str
    before: str
    now: str
    effect: Literal["refused", "applied"]
    why: str = ""
    """Reason of a refusal."""

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def values_of(config: Config) -> dict[str, Any]:
    """Return the plain value of every key."""
    return values_in(_plain(config))


def values_in(written: Any) -> dict[str, Any]:
    """Return the settings in nested plain values of any release. Removed keys are ignored."""
    return {key: found for key in knobs() if (found := look_up(written, key, _MISSING)) is not _MISSING}


def changes(before: Settings, now: Settings) -> list[Change]:
    """Return all changes, in the order of the keys.

    Files are compared by contents if both digests are known: a file that moved is accepted, one with other contents is not.
    """
    words = {key: _changed(key, before, now) for key in knobs() if key not in NOT_COMPARED}
    return [Change(key, *found, *_effect(key, before, now)) for key, found in words.items() if found is not None]


def _changed(key: str, before: Settings, now: Settings) -> tuple[str, str] | None:
    """Return the value of the key before and now, in words; None if it did not change."""
    then, here = before.sources.get(key), now.sources.get(key)
    if then is None or here is None:
        then_value = before.values.get(key, _plain(knobs()[key].default))
        if then_value == now.values[key]:
            return None
        return value_in_words(then_value), value_in_words(now.values[key])
    if then.path != here.path:
        return then.path, here.path
    if _is_same(then, here) is False:
        return f"{then.path} (digest {then.digest})", f"with other contents (digest {here.digest})"
    return None


def _effect(key: str, before: Settings, now: Settings) -> tuple[Literal["refused", "applied"], str]:
    then, here = before.sources.get(key), now.sources.get(key)
    has_moved = then is not None and here is not None and _is_same(then, here) is True
    return ("refused", REFUSED[key]) if key in REFUSED and not has_moved else ("applied", "")


def _is_same(one: Source, other: Source) -> bool | None:
    """True if both have the same contents; None if unknown."""
    return one.digest == other.digest if one.digest and other.digest else None


def _plain(value: Any) -> Any:
    """Return the value as read back from a file: a tuple becomes a list."""
    return msgspec.json.decode(msgspec.json.encode(value))
