"""verl's configuration in our keys. The map is data, `verl_keys.yaml`; here it is looked up and applied.

A key of verl's is renamed, translated (by a table, under a condition, or by a rule that reads several of its keys), left
to do by hand, or has no counterpart, with the reason. Hydra's `+key` and `++key` are the same key.
"""

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.config_verl_rules import RULES

_READS_NULL = {"corrections"}
"""Rules to which null says something."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of one key of verl's; the head of each section of `verl_keys.yaml` says what the fields mean."""

    ours: str = ""
    values: dict[str, Any] | None = None
    special: dict[str, Any] = {}
    without: dict[str, str] = {}
    when: dict[str, str] = {}
    rule: str = ""
    note: str = ""
    by_hand: str = ""
    absent: str = ""


class _ByHand(msgspec.Struct, forbid_unknown_fields=True):
    do: str
    keys: list[str]


class _Absent(msgspec.Struct, forbid_unknown_fields=True):
    why: str
    keys: list[str]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    renamed: dict[str, str]
    translated: dict[str, Entry]
    by_hand: list[_ByHand]
    absent: list[_Absent]
    defaults: dict[str, Any]
    without_a_key: dict[str, Any]


class TranslatedKey(NamedTuple):
    """One key of verl's, translated."""

    key: str
    """verl's, without Hydra's plus."""
    value: Any
    name: str
    """Our key that the map names; empty where there is none."""
    ours: dict[str, Any]
    """Our keys and their values; empty where this value has no counterpart."""
    words: str
    """Why there is none or what to do by hand; beside a counterpart, what else to know."""
    pattern: str
    """Entry of the map that it came from: the key, or the start of it and `*`."""
    by_hand: bool = False


@cache
def _file() -> _File:
    text = (Path(__file__).parent / "verl_keys.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_File)


@cache
def verl_keys() -> dict[str, Entry]:
    """The map, in the order of its file; a key that ends in `*` stands for all that begin so."""
    file = _file()
    entries = {key: Entry(ours=ours) for key, ours in file.renamed.items()} | file.translated
    for left in file.by_hand:
        entries |= {key: Entry(by_hand=left.do) for key in left.keys}
    for absent in file.absent:
        entries |= {key: Entry(absent=absent.why) for key in absent.keys}
    return entries


def bare(key: str) -> str:
    """`key` without the plus with which Hydra adds a key."""
    return key.lstrip("+")


def pattern_of(key: str) -> str | None:
    """The entry of the map that `key` falls under; none where it is no key of verl's."""
    key, known = bare(key), verl_keys()
    if key in known and not key.endswith("*"):
        return key
    return next((entry for entry in known if entry.endswith("*") and key.startswith(entry[:-1])), None)


def ending_in(tail: str) -> str | None:
    """verl's key for its end, such as `rollout.n`, if all keys that end so mean the same here."""
    found = [key for key in verl_keys() if key.endswith(f".{bare(tail)}")]
    meanings = {str(verl_keys()[key]) for key in found}
    return found[0] if len(meanings) == 1 else None


def misspelt(key: str) -> str | None:
    """verl's key that `key` is with a slip in its last part."""
    section, _, last = bare(key).rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in verl_keys() if name.rpartition(".")[0] == section}
    return next((beside[name] for name in difflib.get_close_matches(last, beside, n=1, cutoff=0.9)), None)


def translate(given: dict[str, Any]) -> list[TranslatedKey]:
    """Each key of `given` that the map has, with what says the same here; other keys are left out.

    Args:
        given: verl's keys, dotted, and their values as YAML reads them.
    """
    given = {bare(key): value for key, value in given.items()}
    return [_row(key, value, given) for key, value in given.items() if pattern_of(key) is not None]


def merged(rows: Iterable[TranslatedKey]) -> dict[str, Any]:
    """Our keys and their values, of all rows together."""
    return {key: value for row in rows for key, value in row.ours.items()}


def unwritten(given: dict[str, Any]) -> dict[str, Any]:
    """Our keys with what verl does where `given` says nothing, as far as it is something else than our default."""
    given = {bare(key): value for key, value in given.items()}
    written = merged(translate(given))
    does = merged(translate(_file().defaults | given)) | _file().without_a_key
    return {key: value for key, value in does.items() if key not in written}


def _row(key: str, value: Any, given: dict[str, Any]) -> TranslatedKey:
    pattern = pattern_of(key)
    assert pattern is not None
    entry = verl_keys()[pattern]
    ours, words = _applied(entry, key, pattern, value, given)
    return TranslatedKey(key, value, entry.ours, ours, words, pattern, by_hand=bool(entry.by_hand))


def _applied(entry: Entry, key: str, pattern: str, value: Any, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Our keys, and words."""
    said = as_text(value)
    if entry.absent and pattern != key and (meant := misspelt(key)):
        return {}, f"did you mean verl's `{meant}`?"
    if entry.by_hand or entry.absent:
        return {}, entry.by_hand or entry.absent
    for other, needed in entry.when.items():
        if as_text(given.get(other)) != needed:
            return {}, f"{other} is not {needed}, so it does nothing"
    if said in entry.without:
        return {}, entry.without[said]
    if value is None and entry.rule not in _READS_NULL and said not in (entry.values or {}) | entry.special:
        return {}, "null leaves the default"
    if entry.rule:
        found = RULES[entry.rule](value, given, entry.ours)
        return ({}, found) if isinstance(found, str) else (found, entry.note)
    if entry.values is not None:
        if said not in entry.values:
            return {}, entry.note or f"{said} is not here"
        ours = entry.values[said]
        return {entry.ours: ours}, "" if as_text(ours) == said else entry.note
    if said in entry.special:
        return {entry.ours: entry.special[said]}, entry.note
    if pattern.endswith("*"):
        return {entry.ours[:-1] + key.removeprefix(pattern[:-1]): value}, entry.note
    return {entry.ours: value}, entry.note


def as_text(value: Any) -> str:
    """A value as YAML writes it, for looking up: `true`, `null`, `-1`, `vllm`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
