"""Shell scripts, read and not run: their words, with variables, defaults such as `${N:-8}` and `$((1024 * 2))` evaluated."""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

VARIABLE = re.compile(r"(?:export |local |readonly )?([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""The name and the value of an assignment."""
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


class Line(NamedTuple):
    """One command, or one line of a list over several lines."""

    words: list[str]
    """As the command gets them; as they are written where `in_branch`. Unknown variables stay as they are."""
    in_branch: bool
    """In an `if`, a `case` or a loop, so that it is not known whether it runs."""


def read_lines(text: str, environment: Mapping[str, str]) -> Iterator[Line]:
    """The lines of a script, in their order. A variable that the script sets holds from there on."""
    variables = dict(environment)
    depth = 0
    for line in re.sub(r"\\\n", " ", text).splitlines():
        opened, closed = len(_OPENS.findall(line)), len(_CLOSES.findall(line))
        in_branch = bool(depth or opened)
        depth = max(0, depth + opened - closed)
        if in_branch or closed:
            yield Line(line.split(), in_branch=True)
            continue
        entries = _LIST.fullmatch(line)
        words = _words(_expand(entries[1] if entries else line, variables))
        variables |= {set_[1]: set_[2] for word in words if (set_ := VARIABLE.fullmatch(word))}
        yield Line(words, in_branch=False)


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
