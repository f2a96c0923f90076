"""Translates a verl configuration for `asyncgrpo config from-verl`: a YAML file, a shell script or `key=value`.

A script is read, not run. Its variables, defaults such as `${N:-8}` and sums such as `$((1024 * 2))` are evaluated. Keys
in an `if`, a `case` or a loop are left out and named, because it is not known which branch runs.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.config.explain import value_in_words
from asyncgrpo.config.files import flat, load_values, parse
from asyncgrpo.config.unknown_keys import assignments, command, default_in_words
from asyncgrpo.config.verl import TranslatedKey, merged, pattern_of, translate, unwritten
from asyncgrpo.errors import ConfigError

# -- reading a YAML file, a shell script, `key=value` ------------------------------------------------------------------

_KEY = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"(?:export |local |readonly )?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LIST = re.compile(r"\s*\w+\+?=\((.*?)\)?\s*")
_OPENS, _CLOSES = re.compile(r"(?:^|;)\s*(?:if|case|for|while)\b"), re.compile(r"(?:^|;)\s*(?:fi|esac|done)\b")
_EXPANDED = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(((?:[^()$]|\([^()]*\))*)\)\)")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_words(words: Sequence[str], stdin: str = "") -> tuple[dict[str, Any], list[str]]:
    """verl's keys and values in `words`, and what could not be read. Later words win.

    Args:
        words: YAML files (`.yaml`, `.yml`), other files (shell scripts), `-` for a script in `stdin`, or `key=value`.
    Raises:
        ConfigError: a file cannot be read, or a word is none of these.
    """
    given: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            given |= flat(load_values(Path(word)))
        elif word == "-" or Path(word).is_file():
            found, unread = read_script(stdin if word == "-" else _text(Path(word)), os.environ)
            given |= found
            problems += unread
        elif key := _KEY.fullmatch(word):
            given[key[1]] = parse(key[2])
        else:
            raise ConfigError(f"`{word}` is neither a file nor of the form key=value")
    return given, problems


def read_script(text: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """verl's keys in a shell script, and a sentence for each key and each variable that was left out."""
    variables, assigned = dict(environment), set[str]()
    given: dict[str, Any] = {}
    problems: list[str] = []
    depth = 0
    for line in re.sub(r"\\\n", " ", text).splitlines():
        opened, closed = len(_OPENS.findall(line)), len(_CLOSES.findall(line))
        if depth or opened:
            left_out = dict.fromkeys(name for name in _names_in(line) if "." in name or name in assigned)
            problems += [f"{name}: in an `if`, a `case` or a loop of the script" for name in left_out]
        depth = max(0, depth + opened - closed)
        if depth or opened or closed:
            continue
        entries = _LIST.fullmatch(line)
        for word in _words(_expand(entries[1] if entries else line, variables)):
            if key := _KEY.fullmatch(word):
                if "$" in key[2]:
                    problems.append(f"{key[1]}: `{key[2]}` is not set in the script")
                else:  # the last entry of a list may end with the list's bracket
                    given[key[1]] = parse(key[2] if "(" in key[2] else key[2].rstrip(")"))
            elif variable := _VARIABLE.fullmatch(word):
                variables[variable[1]] = variable[2]
                assigned.add(variable[1])
    return given, problems


def _names_in(line: str) -> list[str]:
    """The keys and variables that are set in a line."""
    found = [_KEY.fullmatch(word) or _VARIABLE.fullmatch(word) for word in line.split()]
    return [name[1] for name in found if name]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an open quote: text over several lines
        return []


def _expand(line: str, variables: Mapping[str, str]) -> str:
    """`line` with variables and sums evaluated, from the inside. Unknown variables stay as they are."""
    before = None
    while before != line:
        before = line
        line = _EXPANDED.sub(lambda m: variables.get(m[1] or m[3]) or m[2] or m[0], line)
        line = _SUM.sub(lambda m: _sum(m[1], variables) or m[0], line)
    return line


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of a sum; None where it has more than whole numbers, known variables and + - * / %."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in variables:
                return int(variables[name])
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from error


# -- the report --------------------------------------------------------------------------------------------------------


class Translation(NamedTuple):
    """A verl configuration in our keys."""

    ours: dict[str, Any]
    left: list[TranslatedKey]
    """verl's keys without a counterpart, or with one that a person has to choose."""
    unread: list[str]
    """Sentences about keys that were not understood."""
    unwritten: dict[str, Any]
    """verl's defaults for keys that are not given, in our keys, where our default differs."""


def read(words: Sequence[str], stdin: str = "") -> Translation:
    """The translation of files and `key=value`, which are those of `read_words`. Raises ConfigError."""
    given, unread = read_words(words, stdin)
    if not given:
        raise ConfigError(f"{' '.join(words)}: it has no key of verl's")
    rows = translate(given)
    unread += [f"{key}: this is no key of verl's that asyncgrpo knows" for key in given if pattern_of(key) is None]
    ours = merged(rows)
    defaults = {key: value for key, value in unwritten(given).items() if value_in_words(value) != default_in_words(key)}
    return Translation(ours, [row for row in rows if not row.ours], unread, defaults)


def report(found: Translation, problem: str, *, as_yaml: bool) -> str:
    """The translation as a command or a YAML file, followed by comments on everything else.

    Args:
        problem: why the command does not run yet; empty where it does.
    """
    parts = [_to_yaml(found.ours) if as_yaml else command(found.ours)]
    by_hand = [row for row in found.left if row.by_hand]
    absent = [row for row in found.left if not row.by_hand]
    parts += _comment("No counterpart:", _reasons(absent))
    parts += _comment("To be done by hand:", _reasons(by_hand))
    parts += _comment("Not understood:", found.unread)
    parts += _comment(
        "verl's defaults for keys that are not given; asyncgrpo's are in brackets:",
        [f"{text} ({_default(text.partition('=')[0])})" for text in assignments(found.unwritten)],
    )
    parts += _comment("It does not run yet:", [problem] if problem else [])
    return "\n\n".join(parts)


def _default(key: str) -> str:
    return default_in_words(key) or "the default of algorithm.loss"


def _reasons(rows: Iterable[TranslatedKey]) -> list[str]:
    """Lines `key=value: why`. Keys that one entry of the map covers share a line."""
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
    """The translation as JSON, for scripts."""
    return {
        "ours": found.ours,
        "command": command(found.ours),
        "without_counterpart": [{"key": row.key, "value": row.value, "why": row.words} for row in found.left],
        "not_understood": found.unread,
        "verl_defaults": found.unwritten,
        "problem": problem or None,
    }
