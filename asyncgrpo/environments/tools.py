"""Built-in environments, and functions as tools that the model calls in its turns.

A calculator and a game of guessing a number are classes like those that users write: `reset` with what it takes of the row, and
`step` with the text of a turn. `scores` is true where its rewards are the score.

A tool is a function with type hints and a docstring in Google's style, which the chat template shows to the model. The model
reads what it returns or raises, and may try again. A turn without a call is the answer. Calls are read in the forms that open
models are trained to write:

    Qwen, Hermes      `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them between text
    Llama 3.1         the whole turn is one such object, with `arguments` or `parameters`
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncgrpo.environments.base import call_function
from asyncgrpo.errors import RewardError
from asyncgrpo.guests import split_spec
from asyncgrpo.rewards.base import describe
from asyncgrpo.rewards.user import find_in, run_file

# -- built-in environments ---------------------------------------------------------------------------------------------

_LARGEST = 10**60
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, `+ - * / // %` and brackets; `error` and why, if it has none."""
    if len(expression) > 200:
        return "error: too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        return (
            "error: division by zero" if isinstance(error, ZeroDivisionError) else "error: not an arithmetic expression"
        )
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found: Any = value
        case ast.BinOp(left=left, op=op, right=right):
            found = _OPERATORS[type(op)](_value(left), _value(right)) if type(op) in _OPERATORS else None
        case ast.UnaryOp(op=op, operand=operand):
            found = _OPERATORS[type(op)](_value(operand)) if type(op) in _OPERATORS else None
        case _:
            found = None
    if found is None or not abs(found) < _LARGEST:
        raise ValueError("not arithmetic, or too large")
    return found


class Calculator:
    """Calculates a turn whose last line ends with `=`; any other turn is the answer. A reward scores the answer."""

    scores = False

    def step(self, text: str) -> tuple[str, None, bool]:
        line = text.rstrip().rpartition("\n")[2]
        if not line.endswith("="):
            return "", None, True
        return calculate(line[:-1]), None, False


class Guess:
    """A number from 0 to `largest` is to be found: each guess is answered with `<` or `>`, meaning that the number is
    smaller or larger. The reward is 1 for the number, less a tenth for each guess before; a turn that is not a number loses.

    The number is `ground_truth`; without one the row's seed decides. `extra_info.largest` is 9 by default.
    """

    scores = True

    def reset(self, answer: Any, info: dict[str, Any], seed: int) -> None:
        self._largest = int(info.get("largest", 9))
        self._number = random.Random(seed).randint(0, self._largest) if answer in (None, "") else int(answer)
        self._guesses = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = text.strip()
        if not (guess.isascii() and guess.isdigit() and len(guess) <= len(str(self._largest))):
            return "", 0.0, True
        if int(guess) == self._number:
            return "", max(1.0 - 0.1 * self._guesses, 0.1), True
        self._guesses += 1
        return ("<" if self._number < int(guess) else ">"), 0.0, False


BUILTIN: dict[str, type] = {"calculator": Calculator, "guess": Guess}


# -- tool calls in a turn ----------------------------------------------------------------------------------------------


_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""Takes time that is linear in the text, also of one that is all white space."""


class ToolCall(NamedTuple):
    """A call that the model asks for."""

    name: str
    """Empty if what it wrote is not a call."""
    arguments: dict[str, Any]
    problem: str = ""
    """Reason why it is not a call, for the model to read."""


class Turn(NamedTuple):
    """A turn of the model."""

    text: str
    """Text beside the calls."""
    calls: tuple[ToolCall, ...]


def read_turn(text: str) -> Turn:
    """Split a turn into its text and its tool calls. A block that is not a call is a call with a `problem`."""
    if blocks := _BLOCK.findall(text):
        return Turn(_BLOCK.sub("", text).strip(), tuple(_call(block.strip()) for block in blocks))
    stripped = text.strip()
    if stripped.startswith("{") and stripped.endswith("}") and '"name"' in stripped:
        call = _call(stripped)
        if not call.problem:
            return Turn("", (call,))
    return Turn(text, ())


def _call(block: str) -> ToolCall:
    try:
        found = json_of(block)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"this tool call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, 'a tool call is a JSON object with "name" and "arguments"')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json_of(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall("", {}, 'the "arguments" of a tool call are a JSON object')
    return ToolCall(found["name"], arguments)


def json_of(text: str) -> Any:
    """Decode JSON. Raises ValueError, also for half a surrogate pair, which could not be sent, or RecursionError."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


# -- tools -------------------------------------------------------------------------------------------------------------


SPEC = "tools:"
"""Prefix of the specification of an environment of tools; a JSON list of them follows."""


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and brackets, such as (3 + 4) * 12

    Returns:
        Its value.
    """
    return calculate(expression)


BUILTIN_TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator}


class ToolBox:
    """An episode in which the model may call tools."""

    scores = False

    def __init__(self, tools: dict[str, Callable[..., Any]]) -> None:
        self._tools = tools

    async def step(self, text: str) -> tuple[list[dict[str, str]], None, bool] | None:
        """The results of the calls in a turn, a message for each; None if there are none: the turn is the answer."""
        calls = read_turn(text).calls
        if not calls:
            return None
        return [{"role": "tool", "content": await self._result(call)} for call in calls], None, False

    async def _result(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        if call.name not in self._tools:
            return f"error: unknown tool {call.name[:80]!r}; there are {', '.join(self._tools)}"
        try:
            value = await call_function(self._tools[call.name], **call.arguments)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:
            return f"error: {describe(error, has_place=False)}"


def load_tools(specs: list[str]) -> dict[str, Callable[..., Any]]:
    """The functions that `calculator` or `FILE.py:FUNCTION` name, by their names. Raises RewardError, one sentence."""
    tools: dict[str, Callable[..., Any]] = {}
    for spec in specs:
        path, name = split_spec(spec, "")
        if spec not in BUILTIN_TOOLS and not name:
            raise RewardError(f"environment.tools: {spec} is not one of {', '.join(BUILTIN_TOOLS)}, FILE.py:FUNCTION")
        function = BUILTIN_TOOLS.get(spec) or find_in(run_file(path, "tools"), path, name, "function")
        if not hasattr(function, "__name__"):
            raise RewardError(f"{path}: {name} is a {type(function).__name__}, and a tool is a function")
        if function.__name__ in tools:
            raise RewardError(f"environment.tools names {function.__name__} twice")
        tools[function.__name__] = function
    return tools


def schemas_of(tools: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool for the chat template. Raises RewardError: hints or docstring are missing."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            found.append(get_json_schema(function))
        except Exception as error:  # of several types; each names what the function lacks
            raise RewardError(f"tool {name} needs type hints and a docstring of each argument: {error}") from error
    return found
