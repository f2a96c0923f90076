"""Shell scripts, read and not run: their words, with quotes, variables, defaults such as `${N:-8}`, sums such as `$((2 * N))`
and tests such as `[ "$A" = b ]` evaluated.

What a command would print is not known, and neither is what a loop does. Functions count as if they were called.
"""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from asyncgrpo.errors import ConfigError


class Line(NamedTuple):
    """One command, or one list of words in brackets."""

    words: list[str]
    """As the command gets them, without assignments. What is not known stays as it is written: `$NAME`, `$(date)`."""
    assigned: list[str]
    """The variables that it sets."""
    in_branch: bool
    """In a loop, or in an `if` or a `case` that nothing known decides, so that it is not known whether it runs."""


def read_lines(text: str, environment: Mapping[str, str]) -> Iterator[Line]:
    """The commands of a script that run or may run, in their order. A variable that the script sets holds from there on.

    Raises:
        ConfigError: brackets or quotes are nested too deeply.
    """
    try:
        yield from _Script(environment).lines(text)
    except RecursionError as error:
        raise ConfigError("the script's brackets are nested too deeply to be read") from error


# -- words as they are written -----------------------------------------------------------------------------------------

_CLOSES = {"$(": ")", "${": "}", "(": ")", '"': '"', "`": "`"}
_NESTED = {")": "'\"`$\\(", "}": "'\"`$\\", '"': "`$\\", "`": "\\"}
"""What begins something of its own inside of what the character closes."""
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])")
_REDIRECTION = re.compile(r"\d*(?:[<>]&\d+|&?>>?|<<<|<)")
_OPERATOR = re.compile(r"\n|;;|;|&&|\|\||\||&|\(|\)")
_HERE = re.compile(r"\d*<<-?\s*(['\"]?)(\w+)\1")
_LIST = re.compile(r"\w+\+?=")
_ENDS_WORD = frozenset(" \t\r\n;|&()<>")


def _after(text: str, start: int) -> int:
    """The place behind the quoted text, the expansion or the character at `start`. An open quote is a character."""
    if text[start] == "\\":
        return start + 2
    if text[start] == "'":
        return text.find("'", start + 1) + 1 or start + 1
    if name := _NAME.match(text, start):
        return name.end()
    opens = text[start : start + 2] if text[start] == "$" else text[start]
    closes, place = _CLOSES.get(opens), start + len(opens)
    while closes and place < len(text):
        if text[place] == closes:
            return place + 1
        place = _after(text, place) if text[place] in _NESTED[closes] else place + 1
    return start + 1


def _tokens(text: str) -> Iterator[str]:
    """Operators, and words with their quotes. `NAME=(` is one token; redirections and comments are left out."""
    place, here, redirected = 0, list[str](), False
    while place < len(text):
        if text[place] in " \t\r":
            place += 1
        elif text.startswith("\\\n", place):
            place += 2
        elif text[place] == "#":
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
        elif document := _HERE.match(text, place):
            here.append(document[2])
            place = document.end()
        elif text[place : place + 2] in ("<(", ">("):
            place, redirected = _after(text, place + 1), False
        elif found := _REDIRECTION.match(text, place):
            place, redirected = found.end(), not found[0][-1].isdigit()
        elif found := _OPERATOR.match(text, place):
            place, redirected = found.end(), False
            while found[0] == "\n" and here:
                ending = re.compile(rf"^\s*{here.pop(0)}$", re.MULTILINE).search(text, place)
                place = ending.end() if ending else len(text)
            yield found[0]
        else:
            end = place
            while end < len(text) and text[end] not in _ENDS_WORD:
                end = _after(text, end)
            if text[end : end + 1] == "(" and _LIST.fullmatch(text, place, end):
                end += 1
            if not redirected:
                yield text[place:end]
            place, redirected = max(end, place + 1), False


# -- what they become --------------------------------------------------------------------------------------------------

_PARAMETER = re.compile(r"(\w+)(?::?([-=+?])(.*))?", re.DOTALL)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _fields(raw: str, variables: Mapping[str, str]) -> list[str]:
    """The words that a written word becomes: none or several where a variable without quotes holds so many."""
    found, word, place = list[str](), list[str](), 0
    while place < len(raw):
        end = _after(raw, place)
        if raw[place] in "$`":
            first, *more = _split(_value(raw[place:end], variables)) or [""]
            word += [first] if first else []
            for field in more:
                found, word = [*found, "".join(word)], [field]
        else:
            word.append(_without_quotes(raw[place:end], variables))
        place = end
    return [*found, "".join(word)] if word else found


def _text(raw: str, variables: Mapping[str, str]) -> str:
    """A written word as the value of a variable, where nothing is split."""
    found, place = list[str](), 0
    while place < len(raw):
        end = _after(raw, place)
        found.append((_value if raw[place] in "$`" else _without_quotes)(raw[place:end], variables))
        place = end
    return "".join(found)


def _without_quotes(piece: str, variables: Mapping[str, str]) -> str:
    if piece[0] == "\\":
        return "" if piece[1:] == "\n" else piece[1:]
    if piece[0] == "'" and len(piece) > 1:
        return piece[1:-1]
    if piece[0] != '"' or len(piece) == 1:
        return piece
    inner, found, place = piece[1:-1], list[str](), 0
    while place < len(inner):
        end = _after(inner, place) if inner[place] in "$`\\" else place + 1
        part = inner[place:end]
        if part[0] == "\\":
            found.append("" if part == "\\\n" else part[1:] if part[1:] in '"\\$`' else part)
        else:
            found.append(_value(part, variables) if part[0] in "$`" else part)
        place = end
    return "".join(found)


def _split(value: str) -> list[str]:
    """The parts of a value between blanks, those in `$(...)` aside."""
    parts, place = [""], 0
    while place < len(value):
        end = _after(value, place) if value[place] in "$`" else place + 1
        parts = [*parts, ""] if value[place].isspace() else [*parts[:-1], parts[-1] + value[place:end]]
        place = end
    return [part for part in parts if part]


def _value(raw: str, variables: Mapping[str, str]) -> str:
    """The value of `$NAME`, `${NAME:-word}` or `$((sum))`; `raw` itself where it is not known."""
    if raw.startswith("$((") and raw.endswith("))"):
        return _sum(_text(raw[3:-2], variables), variables) or raw
    if raw in ("$(pwd)", "`pwd`"):
        return variables.get("PWD", raw)
    parameter = _PARAMETER.fullmatch(raw[2:-1] if raw.startswith("${") else raw[1:])
    if parameter is None:
        return raw
    name, operation, word = parameter[1], parameter[2], parameter[3] or ""
    value = variables.get(name)
    given = value is not None and (value != "" or ":" not in raw[: len(name) + 3])
    if operation == "+":
        return _text(word, variables) if given else ""
    if operation in ("-", "=") and not given:
        return _text(word, variables)
    return raw if value is None else value


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
        with warnings.catch_warnings(action="ignore"):  # of Python, about what is no Python
            return str(value(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


# -- which commands run ------------------------------------------------------------------------------------------------

Known = bool | None
"""Yes, no, or not known."""

_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def _not(known: Known) -> Known:
    return None if known is None else not known


def _both(one: Known, other: Known) -> Known:
    return False if one is False or other is False else None if one is None or other is None else True


def _test(words: list[str]) -> Known:
    """The truth of `[ ... ]`, given as its words between the brackets."""
    if any("$" in word or "`" in word for word in words):
        return None
    match words:
        case ["!", *rest]:
            return _not(_test(rest))
        case ["-z", word]:
            return not word
        case [word] | ["-n", word]:
            return bool(word)
        case [one, "=" | "==", other]:
            return fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatchcase(one, other)
        case [one, comparison, other] if comparison in _COMPARED and re.fullmatch(r"-?\d+ -?\d+", f"{one} {other}"):
            return _COMPARED[comparison](int(one), int(other))
    return None


class _Branch:
    """An `if`, a `case` or a loop that is open."""

    def __init__(self, subject: str | None = None) -> None:
        self.subject = subject
        """What a `case` compares."""
        self.runs: Known = True
        """Whether this part runs. A condition does, as far as it was reached."""
        self.taken: Known = False
        """Whether an earlier part ran."""

    def enter(self, condition: Known) -> None:
        """Its next part, which runs if `condition` holds and no earlier part ran."""
        self.runs = _both(_not(self.taken), condition)
        self.taken = _not(_both(_not(self.taken), _not(condition)))


_LONGEST = 1_000_000
"""Characters of a variable: one that is doubled again and again would fill the memory."""
_DECLARES = frozenset({"export", "local", "declare", "readonly", "typeset", "env"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)


class _Script:
    """A script that is being read."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.variables = dict(environment)
        self.unsure = set[str]()
        """The variables that a branch sets of which it is not known whether it runs."""
        self.open: list[_Branch] = []
        self.status: Known = True
        """Whether the last list of commands between `&&` and `||` succeeds."""
        self.in_condition = False

    def lines(self, text: str) -> Iterator[Line]:
        """See `read_lines`."""
        tokens, before, words = _tokens(text + "\n\n"), "\n", list[str]()
        for token in tokens:
            if token.endswith("=(") and _LIST.fullmatch(token[:-1]):
                words = self._without_reserved(words)
                entries = self._expanded([word for word in iter(lambda: next(tokens, ")"), ")") if word != "\n"])
                yield from self._line(entries, [], self._runs(before))
            elif not _OPERATOR.fullmatch(token):
                words.append(token)
                if token == "in" and "case" in words[:2]:
                    words = self._without_reserved(words)
                    self.open.append(_Branch("".join(self._for_tests(words[1:-1]))))
                    words = []
                    self._pattern(tokens)
            else:
                if words := self._without_reserved(words):
                    yield from self._command(words, before)
                if words or token not in ("(", ")", "\n"):
                    before = token
                words = []
                if token == ";;" and self.open:
                    self._pattern(tokens)

    def _pattern(self, tokens: Iterator[str]) -> None:
        """Reads the next pattern of a `case`, or its end."""
        patterns = list[str]()
        for token in tokens:
            if token == "esac":
                self.open.pop()
                return
            if token == ")":
                break
            patterns += [] if token in ("\n", "|", "(") else [_text(token, self.variables)]
        subject = self.open[-1].subject or ""
        unknown = any("$" in word or "`" in word for word in [subject, *patterns]) and patterns != ["*"]
        self.open[-1].enter(None if unknown else any(fnmatchcase(subject, pattern) for pattern in patterns))

    def _without_reserved(self, words: list[str]) -> list[str]:
        """A command without the words of the shell's grammar before it, which open and close branches."""
        while words:
            match words[0]:
                case "if" | "while" | "until":
                    self.open.append(_Branch())
                    self.in_condition, self.status = True, None
                case "for" | "select":
                    self.open.append(_Branch())
                    self.open[-1].enter(None)
                    return []
                case "elif" if self.open:
                    self.open[-1].runs = _not(self.open[-1].taken)
                    self.in_condition, self.status = True, None
                case "then" | "do" if self.open and self.in_condition:
                    self.open[-1].enter(self.status if words[0] == "then" else None)
                    self.in_condition = False
                case "else" if self.open:
                    self.open[-1].enter(True)
                case "fi" | "done" | "esac" if self.open:
                    self.open.pop()
                case "{" | "}" | "do" | "then" | "time" | "function":
                    pass
                case _:
                    return words
            words = words[1:]
        return words

    def _reached(self, before: str) -> Known:
        """Whether a command is reached behind the operator `before`, if its branch runs."""
        return {"&&": self.status, "||": _not(self.status)}.get(before, True)

    def _runs(self, before: str) -> Known:
        """Whether it runs, with all branches around it."""
        runs = self._reached(before)
        for branch in self.open:
            runs = _both(runs, branch.runs)
        return runs

    def _command(self, words: list[str], before: str) -> Iterator[Line]:
        reached, runs = self._reached(before), self._runs(before)
        assigned = list[str]()
        while words and ((declared := words[0] in _DECLARES) or _ASSIGNMENT.fullmatch(words[0])):
            if not declared:
                assigned.append(self._assign(words[0], runs))
            words = words[1:]
        is_test = words[:1] in (["["], ["[["], ["test"], ["!"])
        words = self._for_tests(words) if is_test else self._expanded(words)
        if not is_test:
            yield from self._line(words, assigned, runs)
        if reached is not False:
            self.status = self._succeeds(words) if reached else None

    def _succeeds(self, words: list[str]) -> Known:
        """Whether a command that runs succeeds: what is no test does, except where an `if` asks."""
        match words:
            case []:
                return True
            case ["!", *rest]:
                return _not(self._succeeds(rest))
            case ["[", *inner, "]"] | ["[[", *inner, "]]"] | ["[[", *inner] | ["test", *inner]:
                return _test(inner)
        return None if self.in_condition else True

    def _assign(self, word: str, runs: Known) -> str:
        """The name of the variable that `word` sets; it is set if that is known."""
        name, adds, raw = _ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
        if runs is None:
            self.unsure.add(name)
        if runs:
            self.unsure.discard(name)
            value = (self.variables.get(name, "") if adds else "") + _text(raw, self.variables)
            self.variables[name] = value if len(value) <= _LONGEST else raw
        return name

    def _expanded(self, words: list[str]) -> list[str]:
        return [field for word in words for field in _fields(word, self.variables)]

    def _for_tests(self, words: list[str]) -> list[str]:
        """Words expanded with what is sure: a test that is wrong about a variable would drop what runs."""
        known = {name: value for name, value in self.variables.items() if name not in self.unsure}
        return [field for word in words for field in _fields(word, known)]

    def _line(self, words: list[str], assigned: list[str], runs: Known) -> Iterator[Line]:
        if runs is not False:
            yield Line(words, assigned, in_branch=runs is None)
