"""A configuration of another system in our keys, printed as a command or a file with comments on what is left."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.config.explain import near, value_in_words
from asyncgrpo.config.keymap import KeyMap, TranslatedKey, merged
from asyncgrpo.config.unknown_keys import assignments, command, default_in_words

_LONG = 60
"""Characters of `key=value` that are not written twice."""


class Translation(NamedTuple):
    """A configuration of another system in our keys."""

    system: str
    """Its name."""
    ours: dict[str, Any]
    rows: list[TranslatedKey]
    """Its keys with a counterpart."""
    left: list[TranslatedKey]
    """Its keys without a counterpart, or with one that a person has to choose."""
    unread: list[str]
    """Sentences about keys that were not understood."""
    unwritten: dict[str, Any]
    """Its defaults for keys that are not given, in our keys, where our default differs."""


def translation(given: dict[str, Any], unread: list[str], keys: KeyMap) -> Translation:
    """What `given`, keys and values of the system of `keys`, is here.

    Args:
        unread: sentences about what was not understood while `given` was read; unknown keys are added.
    """
    rows = keys.translate(given)
    unknown = [f"{key}: {_unknown(key, keys)}" for key in given if keys.pattern_of(key) is None]
    defaults = {
        key: value
        for key, value in keys.unwritten(given, unknown={line.partition(":")[0] for line in unread}).items()
        if value_in_words(value) != default_in_words(key)
    }
    there, left = [row for row in rows if row.ours], [row for row in rows if not row.ours]
    return Translation(keys.system, merged(rows), there, left, [*unread, *unknown], defaults)


def _unknown(key: str, keys: KeyMap) -> str:
    hint = near(key, keys.keys)
    return f"this is no key of {keys.system}'s that asyncgrpo knows" + (f"; {hint}" if hint else "")


def report(found: Translation, problems: Sequence[str], *, as_yaml: bool) -> str:
    """The translation as a command or a YAML file, followed by comments that name every key that was given.

    Args:
        problems: why the command does not run yet; empty where it does.
    """
    parts = [_to_yaml(found.ours) if as_yaml else command(found.ours)]
    by_hand = [row for row in found.left if row.by_hand]
    absent = [row for row in found.left if not row.by_hand]
    parts += _comment("Translated:", _translated(found.rows))
    parts += _comment("No counterpart:", _reasons(absent))
    parts += _comment("To be done by hand:", _reasons(by_hand))
    parts += _comment("Not understood:", found.unread)
    parts += _comment(
        f"{found.system}'s defaults for keys that are not given; asyncgrpo's are in brackets:",
        [f"{text} ({_default(text.partition('=')[0])})" for text in assignments(found.unwritten)],
    )
    parts += _comment("It does not run yet:", problems)
    return "\n\n".join(parts)


def _default(key: str) -> str:
    return default_in_words(key) or "the default of algorithm.loss"


def _translated(rows: Sequence[TranslatedKey]) -> list[str]:
    """Lines `key=value: ours=value`, with what else to know, and with the later key where two disagree.

    A long value that several keys make together is written once.
    """
    decides = {key: row for row in rows for key in row.ours}
    found, before = list[str](), set[str]()
    for row in rows:
        ours = assignments(row.ours)
        short = [
            f"{key}=..." if text in before and len(text) > _LONG else text
            for key, text in zip(row.ours, ours, strict=True)
        ]
        before |= set(ours)
        others = [decides[key] for key, value in row.ours.items() if decides[key].ours[key] != value]
        later = f", but {_written(others[0])} comes later" if others else ""
        note = f" ({row.words})" if row.words else ""
        found.append(f"{_written(row)}: {' '.join(short)}{later}{note}")
    return found


def _reasons(rows: Iterable[TranslatedKey]) -> list[str]:
    """Lines `key=value: why`. Keys that one entry of the map covers share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        alike.setdefault((row.pattern, row.words), []).append(_written(row))
    return [f"{', '.join(keys)}: {words}" for (_, words), keys in alike.items()]


def _written(row: TranslatedKey) -> str:
    return f"{row.key}={value_in_words(row.value)}"


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


def to_json(found: Translation, problems: Sequence[str]) -> dict[str, Any]:
    """The translation as JSON, for scripts."""
    return {
        "ours": found.ours,
        "command": command(found.ours),
        "translated": [{"key": row.key, "value": row.value, "ours": row.ours, "note": row.words} for row in found.rows],
        "without_counterpart": [{"key": row.key, "value": row.value, "why": row.words} for row in found.left],
        "not_understood": found.unread,
        f"{found.system.lower()}_defaults": found.unwritten,
        "problems": list(problems),
    }
