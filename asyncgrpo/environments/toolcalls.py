"""Reads the tool calls in a turn of the model, in the forms that open models are trained to write.

Qwen and Hermes models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them between text. Llama
3.1 and others: the whole turn is one such object, with `arguments` or `parameters`.
"""

import json
import re
from typing import Any, NamedTuple

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """A call that the model asks for."""

    name: str
    """Empty if what it wrote is no call."""
    arguments: dict[str, Any]
    problem: str = ""
    """Why it is no call, for the model to read."""


class Turn(NamedTuple):
    """A turn of the model."""

    text: str
    """What stands beside the calls."""
    calls: tuple[ToolCall, ...]


def read_turn(text: str) -> Turn:
    """Split a turn into its text and its tool calls. A block that is no call is a call with a `problem`."""
    if blocks := _BLOCK.findall(text):
        return Turn(_BLOCK.sub("", text).strip(), tuple(map(_call, blocks)))
    stripped = text.strip()
    if stripped.startswith("{") and stripped.endswith("}") and '"name"' in stripped:
        call = _call(stripped)
        if not call.problem:
            return Turn("", (call,))
    return Turn(text, ())


def _call(block: str) -> ToolCall:
    try:
        found = json.loads(block)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"this tool call is no JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, 'a tool call is a JSON object with "name" and "arguments"')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall("", {}, 'the "arguments" of a tool call are a JSON object')
    return ToolCall(found["name"], arguments)
