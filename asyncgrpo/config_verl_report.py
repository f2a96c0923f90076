"""What `asyncgrpo config from-verl` prints: a command or a file in our keys, and as comments what is not in it."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.config_help import value_in_words
from asyncgrpo.config_unknown import assignments, command, default_in_words
from asyncgrpo.config_verl import TranslatedKey, merged, pattern_of, translate, unwritten
from asyncgrpo.config_verl_source import read_words
from asyncgrpo.errors import ConfigError


class Translation(NamedTuple):
    """A verl configuration in our keys."""

    ours: dict[str, Any]
    left: list[TranslatedKey]
    """Keys of verl's without a counterpart, or with one that only a person can choose."""
    unread: list[str]
    """Sentences about keys that were not understood."""
    unwritten: dict[str, Any]
    """What verl does where nothing is written and our default is another."""


def read(words: Sequence[str], stdin: str = "") -> Translation:
    """The translation of files and `key=value`; see `config_verl_source.read_words`. Raises ConfigError."""
    given, unread = read_words(words, stdin)
    if not given:
        raise ConfigError(f"{' '.join(words)}: there is no key of verl's in it")
    rows = translate(given)
    unread += [f"{key}: this is no key of verl's that is known here" for key in given if pattern_of(key) is None]
    ours = merged(rows)
    defaults = {key: value for key, value in unwritten(given).items() if value_in_words(value) != default_in_words(key)}
    return Translation(ours, [row for row in rows if not row.ours], unread, defaults)


def report(found: Translation, problem: str, *, as_yaml: bool) -> str:
    """A command, or a file, with the rest as comments after it.

    Args:
        problem: why the command alone does not run yet; empty where it does.
    """
    parts = [_to_yaml(found.ours) if as_yaml else command(found.ours)]
    by_hand = [row for row in found.left if row.by_hand]
    absent = [row for row in found.left if not row.by_hand]
    parts += _comment("No counterpart:", _reasons(absent))
    parts += _comment("To be done by hand:", _reasons(by_hand))
    parts += _comment("Not understood:", found.unread)
    parts += _comment(
        "Where nothing is written verl does the following, and asyncgrpo what is in brackets:",
        [f"{text} ({_default(text.partition('=')[0])})" for text in assignments(found.unwritten)],
    )
    parts += _comment("It does not run yet:", [problem] if problem else [])
    return "\n\n".join(parts)


def _default(key: str) -> str:
    return default_in_words(key) or "the default of algorithm.loss"


def _reasons(rows: Iterable[TranslatedKey]) -> list[str]:
    """`key=value: why`; the keys of one entry of the map on one line."""
    found = []
    for pattern, alike in groupby(rows, key=lambda row: row.pattern):
        same = list(alike)
        what = f"{same[0].key}={value_in_words(same[0].value)}" if len(same) == 1 else f"{pattern} ({len(same)} keys)"
        found.append(f"{what}: {same[0].words}")
    return found


def _comment(head: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["\n".join([f"# {head}", *(f"#   {part}" for line in lines for part in line.splitlines())])]


def _to_yaml(ours: dict[str, Any]) -> str:
    nested: dict[str, Any] = {}
    for key, value in ours.items():
        *above, last = key.split(".")
        section = nested
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return msgspec.yaml.encode(nested).decode().rstrip()


def to_json(found: Translation, problem: str) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "ours": found.ours,
        "command": command(found.ours),
        "without_counterpart": [{"key": row.key, "value": row.value, "why": row.words} for row in found.left],
        "not_understood": found.unread,
        "verl_defaults": found.unwritten,
        "problem": problem or None,
    }
