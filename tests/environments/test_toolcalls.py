"""Tool calls are read in the forms that open models write, and what is no call says why."""

import pytest

from asyncgrpo.environments.tools import ToolCall, Turn, read_turn

CALL = ToolCall("search", {"query": "cats"})


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("just text", Turn("just text", ())),
        ('<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>', Turn("", (CALL,))),
        (
            'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now"}\n</tool_call>',
            Turn("Let me see.", (CALL, ToolCall("now", {}))),
        ),
        ('<tool_call>{"name": "search", "arguments": {"query": "cats"}}', Turn("", (CALL,))),
        ('{"name": "search", "parameters": {"query": "cats"}}', Turn("", (CALL,))),
        ('{"name": "search", "arguments": "{\\"query\\": \\"cats\\"}"}', Turn("", (CALL,))),
        ('{"title": "a \\"name\\" in JSON"}', Turn('{"title": "a \\"name\\" in JSON"}', ())),
    ],
)
def test_calls_are_read(text, turn):
    assert read_turn(text) == turn


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("{name: search}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", 'a JSON object with "name"'),
        ('{"name": 3}', 'a JSON object with "name"'),
        ('{"name": "search", "arguments": [1]}', "are a JSON object"),
        ('{"name": "search", "arguments": "cats"}', "are a JSON object"),
    ],
)
def test_what_is_no_call_says_why(block, problem):
    (call,) = read_turn(f"<tool_call>{block}</tool_call>").calls
    assert call.name == "" and problem in call.problem
