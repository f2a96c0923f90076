"""An agent that speaks OpenAI's API is trained on exactly the tokens that it was answered with, or fails by name."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from asyncgrpo.config.schema import Config, DataConfig, EnvironmentConfig, ModelConfig
from asyncgrpo.environments.base import Access, EnvironmentFailed, Task
from asyncgrpo.environments.chat import LARGEST_BODY, Gateway, for_template, read_request
from asyncgrpo.generators.agents import AgentSampler
from asyncgrpo.generators.rollout import GroupInFlight, Played, with_common_prompt
from asyncgrpo.types import Completion, Group, Prompt, Sampling, Score
from asyncgrpo.wire.codec import check_group, check_lease, pack_group
from tests.generators.test_rollout import LengthReward, make_lease
from tests.generators.test_turns import END, Scripted, all_of, decode

Agent = Callable[[Task, Access], Awaitable[Score | None]]
ROW = [{"role": "user", "content": "hi"}]


def render(messages, tools=None) -> tuple[int, ...]:
    """The chat template of these tests: `~`, the tools, and the messages one behind the other."""
    told = "" if tools is None else json.dumps(tools)
    return tuple(map(ord, "~" + told + "".join(f"{one['role'][0]}:{one['content']} " for one in messages)))


def go_on(messages, last) -> tuple[int, ...]:
    return tuple(ord(c) for one in messages for c in ("" if last == END else "$") + f"|{one['content']}|")


PROMPT = Prompt(prompt_id="train/0", token_ids=render(ROW), text="hi", answer="x")


class Local:
    """An agent in this process."""

    def __init__(self, agent: Agent) -> None:
        self.run, self.closed = agent, False

    async def close(self) -> None:
        self.closed = True


def sampler(engine, agent: Agent, *, max_turns: int = 8, system_prompt: str | None = None) -> AgentSampler:
    data = DataConfig(train="rows.jsonl", max_prompt_tokens=300, system_prompt=system_prompt)
    config = Config(model=ModelConfig(path="tiny"), data=data, environment=EnvironmentConfig(max_turns=max_turns))
    parts = {"decode": decode, "continue_": go_on, "open_": render, "gateway": Gateway("tiny"), "config": config}
    return AgentSampler(engine=engine, agent=Local(agent), **parts)


async def play(engine, agent: Agent, *, max_tokens: int = 200, count: int = 1, **options: Any) -> list[Completion]:
    by = sampler(engine, agent, **options)
    turns = by.of(PROMPT)
    try:
        found = [one async for one in turns.generate("r", PROMPT.token_ids, count, Sampling(max_tokens=max_tokens), 40)]
    finally:
        await by.close()
    assert by.gateway._episodes == {}
    return sorted(found, key=lambda one: one.index)


def client(access: Access) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def two_calls(task: Task, access: Access) -> Score:
    messages: list[Any] = list(task["messages"])
    async with client(access) as model:
        for question in ("one?", "two?"):
            reply = await model.chat.completions.create(model=access.model, messages=messages)
            messages += [reply.choices[0].message, user(question)]
    return Score(value=0.5)


async def test_calls_of_an_agent_are_one_sequence_of_exactly_the_sampled_tokens():
    engine = Scripted("ab", "cd")
    (one,) = await play(engine, two_calls)
    assert isinstance(one, Played) and one.score == Score(value=0.5) and one.opening == PROMPT.token_ids
    assert all_of(one) == "ab$|one?|cd$" and decode(one.token_ids) == "abcd" and one.finish_reason == "stop"
    assert [prompt for _, prompt, _, _ in engine.asked] == [
        PROMPT.token_ids,
        PROMPT.token_ids + tuple(one.all_token_ids[:-3]),
    ]
    assert len({seed for *_, seed in engine.asked}) == 2


async def test_a_reply_has_the_fields_of_openai():
    found: dict[str, Any] = {}

    async def agent(task: Task, access: Access) -> None:
        async with client(access) as model:
            found["models"] = [one.id async for one in await model.models.list()]
            found["reply"] = await model.chat.completions.create(
                model="m", messages=ROW, n=1, logprobs=False, max_tokens=2, temperature=1.0, top_p=1.0
            )

    (one,) = await play(Scripted("abc"), agent)
    assert one.score is None and one.finish_reason == "length", "the reward scores it"
    reply = found["reply"]
    (choice,) = reply.choices
    assert found["models"] == ["tiny"] and reply.model == "tiny" and reply.object == "chat.completion"
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "ab", "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT.token_ids), 2)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_tools_are_in_the_prompt_and_their_calls_in_the_reply():
    found = []

    async def agent(task: Task, access: Access) -> Score:
        messages: list[Any] = [{"role": "system", "content": "be kind"}, *task["messages"]]
        async with client(access) as model:
            for _ in range(2):
                reply = (await model.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0]
                found.append(reply)
                messages.append(reply.message.model_dump())
                for call in reply.message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        return Score(value=1.0)

    call = 'so <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    engine = Scripted(call, "it is 3")
    (one,) = await play(engine, agent)
    first, second = found
    (made,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", "so")
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "it is 3", None)
    assert all_of(one) == f"{call}$|3|it is 3$"
    assert isinstance(one, Played) and one.opening == render([{"role": "system", "content": "be kind"}, *ROW], TOOLS)


async def test_a_call_with_half_a_surrogate_pair_is_plain_text():
    found = []

    async def agent(task: Task, access: Access) -> Score:
        async with client(access) as model:
            reply = await model.chat.completions.create(model="m", messages=ROW, tools=TOOLS)
            found.append(reply.choices[0].message)
        return Score(value=1.0)

    call = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'
    (one,) = await play(Scripted(call), agent)
    assert (found[0].content, found[0].tool_calls, one.score) == (call, None, Score(value=1.0))
    sent = {"id": "1", "function": {"name": "add", "arguments": r'{"a": "\ud83d"}'}}
    (shown,) = for_template([{"role": "assistant", "content": "", "tool_calls": [sent]}])
    assert shown["tool_calls"] == [sent], "a text that a template can write"


def test_the_tool_calls_of_a_row_may_have_objects_as_arguments():
    function = {"name": "add", "arguments": {"a": "\u00e9"}}
    messages = [*ROW, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    chat = read_request(json.dumps({"messages": messages}).encode())
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": "\u00e9"}'}
    assert for_template(chat.messages)[1]["tool_calls"][0]["function"] == function


def one_more(*messages: dict[str, Any]) -> Agent:
    """An agent that makes one call, and then one with these messages, whose refusal it does not mind."""

    async def agent(task: Task, access: Access) -> Score:
        async with client(access) as model:
            await model.chat.completions.create(model="m", messages=ROW)
            with pytest.raises(openai.ConflictError) as refused:
                await model.chat.completions.create(model="m", messages=list(messages))
            assert refused.value.response.headers["x-should-retry"] == "false"
        return Score(value=1.0)

    return agent


SAID = {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([user("hello"), SAID, user("?")], r"messages\[0\] is not what it was"),
        ([*ROW, user("?")], r"messages\[1\] is not what it was"),
        (ROW, "1 messages came after 2"),
        ([*ROW, SAID], "2 messages came after 2, and at least one must be new"),
    ],
)
async def test_a_call_that_does_not_extend_the_conversation_fails_the_completion_by_name(messages, why):
    engine = Scripted("ab", "cd")
    (one,) = await play(engine, one_more(*messages))
    assert isinstance(one, Played) and one.score is not None and one.score.failure == "environment"
    assert re.search(why, one.score.detail), one.score.detail
    assert "send all earlier messages and replies as they were" in one.score.detail
    assert all_of(one) == "ab$" and len(engine.asked) == 1, "the refused call samples nothing"


async def test_two_calls_at_once_fail_the_completion_by_name():
    engine = Scripted("ab", "cd")
    engine.gate.clear()

    async def agent(task: Task, access: Access) -> Score:
        async with client(access) as model:
            calls = [asyncio.ensure_future(model.chat.completions.create(model="m", messages=ROW)) for _ in range(2)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            engine.gate.set()  # one is refused by now, and the other is answered
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert sorted(type(one).__name__ for one in found) == ["ChatCompletion", "ConflictError"]
        return Score(value=1.0)

    (one,) = await play(engine, agent)
    assert isinstance(one, Played) and one.score is not None and "a call came before the one before" in one.score.detail


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"temperature": 0.7}, "temperature 0.7 is refused; leave it out: sampling.temperature is 1"),
        ({"n": 2}, "n is refused: the run decides"),
        ({"stop": ["x"]}, "stop is refused"),
        ({"stream": True}, "stream is refused"),
        ({"extra_body": {"top_k": 3}}, "unknown field `top_k`"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role"),
        ({"messages": [user("x" * 400)]}, "have more than 300 tokens; raise data.max_prompt_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is understood"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]}, r"messages\[0\] has 'audio'"),
    ],
)
async def test_what_would_be_left_out_is_refused_by_name_and_the_agent_may_go_on(asked, why):
    async def agent(task: Task, access: Access) -> Score:
        async with client(access) as model:
            with pytest.raises(openai.BadRequestError, match=why):
                await model.chat.completions.create(**{"model": "m", "messages": ROW} | asked)
            await model.chat.completions.create(model="m", messages=ROW)
        return Score(value=1.0)

    (one,) = await play(Scripted("ab"), agent)
    assert all_of(one) == "ab$" and isinstance(one, Played) and one.score == Score(value=1.0)


@pytest.mark.parametrize(
    ("limits", "why"), [({"max_tokens": 12}, "sampling.max_tokens"), ({"max_turns": 1}, "max_turns")]
)
@pytest.mark.parametrize("minds", [True, False])
async def test_a_call_that_has_no_room_is_refused_and_the_completion_is_one_that_was_cut(limits, why, minds):
    async def agent(task: Task, access: Access) -> Score:
        try:
            return await two_calls(task, access)
        except openai.BadRequestError as error:
            assert why in str(error) and error.code == "context_length_exceeded"
            if minds:
                raise EnvironmentFailed("no room") from error
            return Score(value=0.25)

    (one,) = await play(Scripted("abcdefg", "h"), agent, **limits)
    assert all_of(one) == "abcdefg$" and one.finish_reason == "length"
    assert isinstance(one, Played) and one.score == Score(value=0.0 if minds else 0.25)


async def raises(task: Task, access: Access) -> None:
    raise EnvironmentFailed("agent.py:3: KeyError: 'x'")


async def calls_nothing(task: Task, access: Access) -> Score:
    return Score(value=1.0)


async def returns_nonsense(task: Task, access: Access) -> Score:
    await client(access).chat.completions.create(model="m", messages=ROW)
    return Score(failure="bad_type", detail="a reward must be a number")


@pytest.mark.parametrize(
    ("agent", "detail"),
    [
        (raises, "agent.py:3: KeyError: 'x'"),
        (calls_nothing, "the agent returned without a call of the model"),
        (returns_nonsense, "bad_type: a reward must be a number"),
        (None, "the agent returned before its call of the model was answered"),
    ],
)
async def test_an_agent_that_goes_wrong_is_a_failure_by_name_of_its_completion(agent, detail):
    engine, calls = Scripted("ab"), []

    async def returns_early(task: Task, access: Access) -> Score:
        engine.gate.clear()
        calls.append(asyncio.ensure_future(client(access).chat.completions.create(model="m", messages=ROW)))
        while not engine.asked:
            await asyncio.sleep(0.01)
        return Score(value=1.0)

    (one,) = await play(engine, agent or returns_early)
    assert isinstance(one, Played) and one.score == Score(failure="environment", detail=detail)
    assert one.finish_reason == "abort"


async def test_an_aborted_request_gives_what_it_has_and_the_address_is_gone():
    engine, seen = Scripted("ab", "cd"), []

    async def agent(task: Task, access: Access) -> Score:
        seen.append(access)
        return await two_calls(task, access)

    by = sampler(engine, agent)
    engine.gate.clear()
    turns = by.of(PROMPT)
    found = asyncio.ensure_future(anext(turns.generate("r", PROMPT.token_ids, 1, Sampling(max_tokens=99), 0)))  # type: ignore[arg-type]
    while not engine.asked:
        await asyncio.sleep(0.01)
    await turns.abort("r")
    one = await asyncio.wait_for(found, 5.0)
    assert one.finish_reason == "abort" and all_of(one) == "ab$"
    with pytest.raises(openai.NotFoundError, match="the episode does not exist, or it is over"):
        await client(seen[0]).chat.completions.create(model="m", messages=ROW)
    await by.close()


async def test_bytes_that_are_no_request_are_refused_and_harm_nothing():
    good = json.dumps({"messages": ROW, "max_tokens": 3}).encode()
    bodies = [b"", b"[", b"null", b"\xff\xfe", b'{"messages": "x"}', b'{"messages": [3]}', b"[" * 50_000]
    bodies += [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": [], "content": {}}]}',
    ]
    bodies += [b'{"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}', good + b"}"]
    statuses: list[int] = []

    async def agent(task: Task, access: Access) -> Score:
        async with aiohttp.ClientSession() as http:
            url = f"{access.base_url}/chat/completions"
            for body in bodies:
                async with http.post(url, data=body) as reply:
                    statuses.append(reply.status)
                    if reply.status != 200:
                        assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}
            for method, path in (("GET", url), ("POST", f"{access.base_url}/embeddings"), ("PUT", access.base_url)):
                async with http.request(method, path) as reply:
                    assert reply.status == 404
            async with http.post(url, data=b" " * (LARGEST_BODY + 1)) as reply:
                assert reply.status == 413
        return Score(value=1.0)

    await play(Scripted("ab"), agent, max_tokens=1000)
    assert set(statuses) <= {200, 400, 409} and statuses.count(400) > 8


# -- the prompt of a group ---------------------------------------------------------------------------------------------


async def group_of(agent: Agent) -> tuple[Group, Any]:
    lease = make_lease()
    lease = msgspec.structs.replace(lease, prompt=PROMPT, sampling=Sampling(max_tokens=100))
    by = sampler(Scripted("ab", "cd"), agent)
    try:
        return await GroupInFlight(lease, by.of(PROMPT), LengthReward(), decode).generate("g"), lease
    finally:
        await by.close()


async def test_what_an_agent_sends_beyond_its_row_is_an_observation_at_the_start():
    count = iter(range(3))

    async def agent(task: Task, access: Access) -> Score:
        number = next(count)
        if number == 2:
            raise EnvironmentFailed("it never began")
        async with client(access) as model:
            messages = [{"role": "system", "content": f"you are {number}"}, *ROW]
            await model.chat.completions.create(model="m", messages=messages)
        return Score(value=float(number))

    group, lease = await group_of(agent)
    assert group.prompt.token_ids == (ord("~"),) and group.prompt.text == PROMPT.text
    read = [decode([*group.prompt.token_ids, *one.completion.all_token_ids]) for one in group.rollouts]
    assert sorted(read) == ["~", "~s:you are 0 u:hi ab", "~s:you are 1 u:hi ab"]
    message, payload = pack_group(group)
    check_group(message, payload)
    check_lease(message, lease, None)


async def test_an_agent_is_given_the_messages_of_the_row_and_if_it_sends_them_the_group_shares_its_prompt():
    tasks = []

    async def agent(task: Task, access: Access) -> Score:
        tasks.append(task)
        return await two_calls(task, access)

    group, lease = await group_of(agent)
    assert group.prompt == PROMPT and [all_of(one.completion) for one in group.rollouts] == ["ab$|one?|cd$"] * 3
    check_lease(pack_group(group)[0], lease, None)
    assert with_common_prompt(group) is group, "as a group without agents"
    (one,) = await play(Scripted("ab", "cd"), agent, system_prompt="be kind")
    assert tasks[-1]["messages"] == [{"role": "system", "content": "be kind"}, *ROW]
    assert isinstance(one, Played) and one.opening == render(tasks[-1]["messages"])
