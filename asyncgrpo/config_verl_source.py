"""Reading verl's keys from where people keep them: a YAML file, a shell script, `key=value`.

A script is read, not run. Its variables, defaults such as `${N:-8}` and sums such as `$((1024 * 2))` are worked out; what
stands in an `if`, a `case` or a loop is left out, because which branch holds is not known, and said so.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncgrpo.config_files import load_values
from asyncgrpo.errors import ConfigError

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
    """verl's keys and values of `words`, later ones winning, and what could not be read.

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


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by dotted key, interpolations worked out where they lead somewhere; null for `???`."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name in node:
            try:
                value = node[name]
            except OmegaConfBaseException:  # it leads nowhere, or is `???`
                value = None if OmegaConf.is_missing(node, name) else _plain(node)[name]
            if isinstance(value, DictConfig) and value:
                walk(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = _plain(value)

    walk(OmegaConf.create(dict(values)), "")
    return found


def parse(text: str) -> Any:
    """The value of `key=TEXT`, as YAML reads it; the text itself where it is no YAML."""
    try:
        return yaml_value(text)
    except (YAMLError, OmegaConfBaseException):
        return text


def yaml_value(text: str) -> Any:
    """`text` as YAML reads it, interpolations not resolved. Raises YAMLError or OmegaConfBaseException."""
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    assert isinstance(value, dict)
    return value["value"]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def read_script(text: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """verl's keys in a shell script, and a sentence for each key, and each variable in use, that was left out."""
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
                else:  # the last entry of a list may have its bracket at its end
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
    """`line` with variables and sums worked out, from the inside; those that are not known stay."""
    before = None
    while before != line:
        before = line
        line = _EXPANDED.sub(lambda m: variables.get(m[1] or m[3]) or m[2] or m[0], line)
        line = _SUM.sub(lambda m: _sum(m[1], variables) or m[0], line)
    return line


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    """A whole number worked out; none where it is not made of numbers, variables and + - * / %."""

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
