"""Functions as tools: the model calls them in its turns, and reads what they return. An environment like those of users.

A tool is a function with type hints and a docstring in Google's style, from which the chat template tells the model what it
does and takes. What it raises is told to the model, which may try again. A turn without a call is the answer.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncgrpo.environments.builtin import calculate
from asyncgrpo.environments.toolcalls import ToolCall, read_turn
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import describe
from asyncgrpo.rewards.user import run_file

SPEC = "tools:"
"""How the specification of an environment of tools begins; a JSON list of them follows."""


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and brackets, such as (3 + 4) * 12

    Returns:
        Its value.
    """
    return calculate(expression)


BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


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
            return f"error: there is no tool {call.name[:80]!r}; there are {', '.join(self._tools)}"
        try:
            value = self._tools[call.name](**call.arguments)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            return f"error: {describe(error)}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def load_tools(specs: list[str]) -> dict[str, Callable[..., Any]]:
    """The functions that `calculator` or `FILE.py:FUNCTION` name, by their names. Raises RewardError, one sentence."""
    tools: dict[str, Callable[..., Any]] = {}
    for spec in specs:
        function = BUILTIN[spec] if spec in BUILTIN else _of_file(spec)
        if function.__name__ in tools:
            raise RewardError(f"environment.tools names {function.__name__} twice")
        tools[function.__name__] = function
    return tools


def _of_file(spec: str) -> Callable[..., Any]:
    head, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise RewardError(f"environment.tools: {spec} is no tool; there are {', '.join(BUILTIN)}, and FILE.py:FUNCTION")
    path = Path(head).expanduser().absolute()
    function = getattr(run_file(path, "tools"), name, None)
    if not inspect.isfunction(function):
        raise RewardError(f"{path} has no function {name}")
    return function


def schemas_of(tools: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """What the chat template tells of each tool, as JSON schemas. Raises RewardError: hints or docstring do not say it."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            found.append(get_json_schema(function))
        except Exception as error:  # of several types; each names what the function lacks
            raise RewardError(
                f"the tool {name} needs type hints and a docstring that describes each argument: {error}"
            ) from error
    return found
