"""The message about keys that do not exist: all at once, verl's keys with their translation, others with a guess."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from asyncgrpo.config.explain import knobs, suggest, value_in_words, verls_name
from asyncgrpo.config.keymap import TranslatedKey, as_text, merged
from asyncgrpo.config.verl import VERL
from asyncgrpo.errors import ConfigError

_LIST_ALL = "`asyncgrpo config explain` lists all keys"


class Unknown(NamedTuple):
    """A key that does not exist."""

    origin: str
    """File or `command line`."""
    key: str
    value: Any


def refusal(
    unknown: Sequence[Unknown], options: Mapping[str, str] = MappingProxyType({}), right: Sequence[str] = ()
) -> ConfigError:
    """The error for `unknown`: a sentence for one key, or for several a table and what to write instead.

    Args:
        options, right: the flags with their values and the right `key=value` of the command line, which are repeated
            beside the translated keys.
    """
    named = {one.key: verls_name(one.key) for one in unknown}
    rows = VERL.translate({full: one.value for one in unknown if (full := named[one.key]) is not None})
    guessed = [one for one in unknown if named[one.key] is None]
    if len(unknown) == 1:
        return ConfigError(_sentence(unknown[0], rows))
    origins = " and ".join(dict.fromkeys(one.origin for one in unknown))
    parts = [f"{origins}: {len(unknown)} configuration keys do not exist"]
    if rows:
        parts += [verl_table(rows)]
        parts += [_instead(unknown, command(merged(rows), options, right))] if merged(rows) else []
    parts += ["\n".join(f"{_written(one)}: {_guess(one)}" for one in guessed)] if guessed else []
    return ConfigError("\n\n".join(parts))


def _sentence(one: Unknown, rows: Sequence[TranslatedKey]) -> str:
    hint = _translated(rows[0]) if rows else _guess(one)
    return f"{one.origin}: there is no configuration key `{one.key}` (value {value_in_words(one.value)}): {hint}"


def _guess(one: Unknown) -> str:
    return suggest(one.key, knobs()) or _LIST_ALL


def _translated(row: TranslatedKey) -> str:
    if row.ours:
        note = f" ({row.words})" if row.words else ""
        return f"that is verl's name for {' '.join(assignments(row.ours))}{note}"
    if row.by_hand:
        return f"that is verl's: {row.words}"
    if row.name:
        return f"that is verl's name for {row.name}: {row.words}"
    return f"that is verl's, and has no counterpart here: {row.words}"


def _written(one: Unknown) -> str:
    return f"{one.key}={value_in_words(one.value)}"


def _instead(unknown: Sequence[Unknown], typed: str) -> str:
    files = [one.origin for one in unknown if one.origin.endswith((".yaml", ".yml"))]
    if files:
        return f"Write the file anew: asyncgrpo config from-verl {shlex.quote(files[0])} --yaml > mine.yaml"
    return f"Type instead:\n\n{typed}"


def command(ours: dict[str, Any], options: Mapping[str, str] = MappingProxyType({}), right: Sequence[str] = ()) -> str:
    """The `asyncgrpo train` command with these keys, over several lines, for a shell."""
    flags = [f"{flag} {shlex.quote(value)}" for flag, value in options.items()]
    return " \\\n    ".join(["asyncgrpo train", *flags, *map(shlex.quote, [*assignments(ours), *right])])


def assignments(ours: dict[str, Any]) -> list[str]:
    """`key=value` for each key, as the command line takes it."""
    return [f"{key}={value_in_words(value)}" for key, value in ours.items()]


def verl_table(rows: Sequence[TranslatedKey]) -> str:
    """A table of three columns: verl's keys, ours, and our defaults."""
    return table(["verl", "here", "default here"], [_cells(list(alike)) for _, alike in groupby(rows, key=_group)])


def _group(row: TranslatedKey) -> str:
    """What groups rows of the table: keys without a counterpart that one entry of the map covers share a row."""
    return row.key if row.ours or not row.pattern.endswith("*") else row.pattern


def _cells(rows: list[TranslatedKey]) -> list[str]:
    row = rows[0]
    theirs = f"{row.key}={_short(row.value)}" if len(rows) == 1 else f"{row.pattern} ({len(rows)} keys)"
    if row.ours:
        note = f"\n({row.words})" if row.words else ""
        return [theirs, "\n".join(assignments(row.ours)) + note, "\n".join(map(default_in_words, row.ours))]
    return [theirs, f"{'by hand' if row.by_hand else row.name or 'no counterpart'}: {row.words}", ""]


def _short(value: Any) -> str:
    text = as_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def default_in_words(key: str) -> str:
    """The default of one of our keys; empty for a key below a mapping (`generators.extra.x`)."""
    knob = knobs().get(key)
    if knob is None:
        return ""
    return "required" if knob.required else value_in_words(knob.default)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table whose columns fit the terminal; long words are folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in head:
        grid.add_column(name, overflow="fold")
    grid.add_row(*("-" * len(name) for name in head))
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    console = Console(width=shutil.get_terminal_size((100, 24)).columns, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
