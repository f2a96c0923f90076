"""Maps from the keys of another system to ours. A map is data, such as `verl_keys.yaml`; here it is looked up and applied.

A rule takes the value, all of their keys that were given, and the key of ours that the map names. It returns our keys
with their values, words saying why there are none, or both: keys, and what else to know of them.
"""

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec

Given = dict[str, Any]
Translated = dict[str, Any] | str | tuple[dict[str, Any], str]
Rule = Callable[[Any, Given, str], Translated]

# -- rules that several maps share -------------------------------------------------------------------------------------

_LOGGERS = ("wandb", "tensorboard", "trackio", "mlflow")


def files(value: Any, _: Given, ours: str) -> Translated:
    """A file, or a list of several."""
    named = [os.path.expanduser(str(file)) for file in (value if isinstance(value, list) else [value])]
    if not named:
        return f"{ours} takes a file, or several"
    return {ours: named[0] if len(named) == 1 else named}


def lora_targets(value: Any, _: Given, ours: str) -> Translated:
    """The names of layers, or `all-linear`."""
    if value == "all-linear":
        return {ours: []}
    return {ours: value if isinstance(value, list) else [value]}


def loggers(value: Any, _: Given, ours: str) -> Translated:
    """A logger or a list of them, without those that are always on, such as the console."""
    named = value if isinstance(value, list) else [value]
    return {ours: [name for name in named if name in _LOGGERS]}


def is_count(value: Any) -> TypeGuard[int]:
    """True if `value` is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- the map -----------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of one key of theirs; the head of each section of `verl_keys.yaml` says what the fields mean."""

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
    """One key of another system, translated."""

    key: str
    """Theirs, without Hydra's plus."""
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
    """True if you do the work: nothing takes the value, or it is not known what the value of our key is."""


class KeyMap:
    """The keys of one system and what says the same here. A key that ends in `*` stands for all that begin so.

    Args:
        system: its name, for messages.
        file: the map, beside this file.
        rules: the functions that the map names.
        reads_null: those to which null says something.
    """

    def __init__(self, system: str, file: str, rules: Mapping[str, Rule], reads_null: Collection[str] = ()) -> None:
        self.system = system
        self.rules = rules
        self._path = Path(__file__).parent / file
        self._reads_null = reads_null

    @cached_property
    def _file(self) -> _File:
        return msgspec.yaml.decode(self._path.read_bytes(), type=_File)

    @cached_property
    def keys(self) -> dict[str, Entry]:
        """The map, in the order of its file."""
        entries = {key: Entry(ours=ours) for key, ours in self._file.renamed.items()} | self._file.translated
        for left in self._file.by_hand:
            entries |= {key: Entry(by_hand=left.do) for key in left.keys}
        for absent in self._file.absent:
            entries |= {key: Entry(absent=absent.why) for key in absent.keys}
        return entries

    def pattern_of(self, key: str) -> str | None:
        """The entry of the map that `key` falls under; none where it is no key of theirs."""
        key = bare(key)
        if key in self.keys and not key.endswith("*"):
            return key
        return next((entry for entry in self.keys if entry.endswith("*") and key.startswith(entry[:-1])), None)

    def ending_in(self, tail: str) -> str | None:
        """Their key for its end, such as `rollout.n`, if all keys that end so mean the same here."""
        found = [key for key in self.keys if key.endswith(f".{bare(tail)}")]
        meanings = {str(self.keys[key]) for key in found}
        return found[0] if len(meanings) == 1 else None

    def misspelt(self, key: str) -> str | None:
        """Their key that `key` is with a slip in its last part."""
        section, _, last = bare(key).rpartition(".")
        beside = {name.rpartition(".")[2]: name for name in self.keys if name.rpartition(".")[0] == section}
        return next((beside[name] for name in difflib.get_close_matches(last, beside, n=1, cutoff=0.9)), None)

    def translate(self, given: Given) -> list[TranslatedKey]:
        """Each key of `given` that the map has, with what says the same here; other keys are left out.

        Args:
            given: their keys, dotted, and their values as YAML reads them.
        """
        given = {bare(key): value for key, value in given.items()}
        return [self._row(key, value, given) for key, value in given.items() if self.pattern_of(key) is not None]

    def unwritten(self, given: Given, unknown: Collection[str] = ()) -> dict[str, Any]:
        """Our keys with what they do where `given` says nothing, as far as it is something else than our default.

        Args:
            unknown: their keys that are given with a value that is not known.
        """
        given = {bare(key): value for key, value in given.items()}
        written = merged(self.translate(given))
        defaults = {key: value for key, value in self._file.defaults.items() if key not in unknown}
        does = merged(self.translate(defaults | given)) | self._file.without_a_key
        return {key: value for key, value in does.items() if key not in written}

    def _row(self, key: str, value: Any, given: Given) -> TranslatedKey:
        pattern = self.pattern_of(key)
        assert pattern is not None
        entry = self.keys[pattern]
        ours, words = self._applied(entry, key, pattern, value, given)
        is_to_do = bool(entry.rule and not ours and words.startswith(entry.ours.partition(" ")[0]))
        return TranslatedKey(key, value, entry.ours, ours, words, pattern, by_hand=bool(entry.by_hand) or is_to_do)

    def _applied(self, entry: Entry, key: str, pattern: str, value: Any, given: Given) -> tuple[dict[str, Any], str]:
        """Our keys, and words."""
        said = as_text(value)
        if entry.absent and pattern != key and (meant := self.misspelt(key)):
            return {}, f"did you mean {self.system}'s `{meant}`?"
        if entry.by_hand or entry.absent:
            return {}, entry.by_hand or entry.absent
        for other, needed in entry.when.items():
            if as_text(given.get(other)) != needed:
                return {}, f"{other} is not {needed}, so it does nothing"
        if said in entry.without:
            return {}, entry.without[said]
        if value is None and entry.rule not in self._reads_null and said not in (entry.values or {}) | entry.special:
            return {}, "null leaves the default"
        if said in entry.special:
            return {entry.ours: entry.special[said]}, entry.note
        if entry.rule:
            found = self.rules[entry.rule](value, given, entry.ours)
            if isinstance(found, tuple):
                return found
            return ({}, found) if isinstance(found, str) else (found, entry.note)
        if entry.values is not None:
            if said not in entry.values:
                return {}, entry.note or f"{said} is not here"
            ours = entry.values[said]
            return {entry.ours: ours}, "" if as_text(ours) == said else entry.note
        if pattern.endswith("*"):
            return {entry.ours[:-1] + key.removeprefix(pattern[:-1]): value}, entry.note
        return {entry.ours: value}, entry.note


def bare(key: str) -> str:
    """`key` without the plus with which Hydra adds a key."""
    return key.lstrip("+")


def merged(rows: Iterable[TranslatedKey]) -> dict[str, Any]:
    """Our keys and their values, of all rows together."""
    return {key: value for row in rows for key, value in row.ours.items()}


def as_text(value: Any) -> str:
    """A value as YAML writes it, for looking up: `true`, `null`, `-1`, `vllm`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
