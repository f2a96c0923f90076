"""The model is told of its tools, calls them in the forms that open models write, and reads results or what was wrong."""

import asyncio
import json
from pathlib import Path

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import EnvironmentConfig
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.data.tokenizer import load_tokenizer, render
from asyncgrpo.environments.base import Reply, task_of
from asyncgrpo.environments.build import build_environment, with_tools
from asyncgrpo.environments.tools import ToolCall, Turn, read_turn, schemas_of
from asyncgrpo.errors import RewardError
from tests.environments.my_tools import bare, later
from tests.rewards.conftest import prompt

TOOLS = Path(__file__).with_name("my_tools.py")
SPECS = ("calculator", f"{TOOLS}:lookup", f"{TOOLS}:later")


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_calls_are_answered_in_order_and_a_turn_without_one_is_the_answer():
    environment = build_environment(EnvironmentConfig(tools=SPECS))
    assert not environment.scores and environment.about == "environment tools calculator, lookup, later"
    episode = environment.episode(task_of(prompt(), 0))
    assert await episode.reset() == Reply()
    turn = (
        "First" + call("calculator", expression="6*7") + call("lookup", word="cat", times=2) + call("later", word="so")
    )
    reply = await episode.step(turn)
    assert [one["content"] for one in reply.messages] == ["42", '{"word": "catcat"}', "so!"]
    assert {one["role"] for one in reply.messages} == {"tool"} and not reply.done and reply.reward is None
    bad = call("lookup", word="nothing") + call("lookup") + call("fly") + "<tool_call>{</tool_call>"
    errors = [one["content"] for one in (await episode.step(bad)).messages]
    assert errors[0] == "error: KeyError: 'no such word'", "on every machine: no path, no line"
    assert errors[1].startswith("error: TypeError: ") and "missing 1 required" in errors[1]
    assert errors[2] == "error: unknown tool 'fly'; there are calculator, lookup, later"
    assert "this tool call is not JSON" in errors[3]
    (no_json,) = (await episode.step(call("lookup", word="pair"))).messages
    assert "TypeError: keys must be str" in no_json["content"]
    assert await episode.step("It is 42.") == Reply(done=True)
    await episode.close()
    await environment.close()


async def test_tools_that_are_not_async_run_at_the_same_time():
    """Each would otherwise wait for those of all other completions, until it is late."""
    environment = build_environment(EnvironmentConfig(tools=(f"{TOOLS}:wait",)))
    episodes = [environment.episode(task_of(prompt(), 0)) for _ in range(8)]
    await asyncio.gather(*(one.reset() for one in episodes))
    replies = await asyncio.gather(*(one.step(call("wait", function="all")) for one in episodes))
    assert [one["content"] for reply in replies for one in reply.messages] == ["all"] * 8
    await environment.close()


def settings(*more: str):
    return load_config(None, ["model.path=m", "data.train=t.jsonl", *more])


def test_the_chat_template_is_told_of_the_tools():
    config = with_tools(settings(f"environment.tools=[calculator,{TOOLS}:lookup]"))
    tools = config.data.chat_template_kwargs["tools"]
    assert [one["function"]["name"] for one in tools] == ["calculator", "lookup"]
    assert tools[1]["function"]["parameters"]["properties"]["times"] == {"type": "integer", "description": "how often"}
    assert with_tools(config) is config, "what is told already is not told again"
    assert with_tools(settings()) == settings()


def test_arguments_of_the_chat_template_reach_every_prompt(tmp_path):
    make_demo_model(tmp_path / "model", seed=0)
    plain = load_tokenizer(str(tmp_path / "model"))
    plain.chat_template = "{{ greeting }}" + plain.chat_template
    plain.save_pretrained(tmp_path / "model")
    told = load_tokenizer(str(tmp_path / "model"), {"greeting": "hello "})
    turns = [{"role": "user", "content": "7"}]
    assert render(told, turns).text == "hello <user>7<assistant>"
    assert render(load_tokenizer(str(tmp_path / "model")), turns).text == "<user>7<assistant>"


def test_a_tool_that_cannot_be_described_is_refused():
    with pytest.raises(RewardError, match="tool bare needs type hints and a docstring"):
        schemas_of({"later": later, "bare": bare})


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
        ("x" + " " * 1_000_000 + "x", "not JSON"),  # in linear time
        ('{"name": "search", "arguments": {"query": "\\ud83d"}}', "surrogates not allowed"),
        ("[1, 2]", 'a JSON object with "name"'),
        ('{"name": 3}', 'a JSON object with "name"'),
        ('{"name": "search", "arguments": "cats"}', "are a JSON object"),
        (json.dumps({"name": "search", "arguments": "[" * 100_000}), "are a JSON object"),
        (json.dumps({"name": "search", "arguments": json.dumps({"query": "\ud83d"})}), "are a JSON object"),
    ],
)
def test_what_is_no_call_says_why(block, problem):
    (call,) = read_turn(f"<tool_call>{block}</tool_call>").calls
    assert call.name == "" and problem in call.problem
