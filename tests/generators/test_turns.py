"""Completions of several turns are exactly the tokens that were sampled and said, each under the version that sampled it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.data.tokenizer import continuation, decoder, load_tokenizer
from asyncgrpo.engines.torch.engine import TorchEngine
from asyncgrpo.environments.base import EnvironmentFailed, Reply
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.generators.rollout import GroupInFlight, Played
from asyncgrpo.generators.turns import TurnSampler
from asyncgrpo.rewards.base import LARGEST
from asyncgrpo.types import Completion, PolicyVersion, Prompt, Sampling, Score, VersionSpan
from asyncgrpo.wire.codec import pack_group, unpack_group
from tests.engines.shared import shared
from tests.generators.test_rollout import LengthReward, make_lease
from tests.learner.helpers import plain_logprobs

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
END = 0
"""The token that ends a turn of the scripted engine; others are characters."""


class Scripted:
    """An engine that says given texts, one for each turn, and keeps what it was asked."""

    def __init__(self, *texts: str, cut: bool = False) -> None:
        self.texts, self.cut = list(texts), cut
        self.version = V1
        self.asked: list[tuple[str, tuple[int, ...], int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuses_turn: int | None = None
        self.records_routes, self.unrecorded_turn, self.sent_routes = False, -1, 0
        self.aborted: set[str] = set()

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        num_completions: int,
        sampling: Sampling,
        seed: int,
        routes_from: int = 0,
    ) -> AsyncIterator[Completion]:
        assert num_completions == 1
        turn = int(request_id.rpartition(".")[2])
        self.asked.append((request_id, prompt, sampling.max_tokens, seed))
        if turn == self.refuses_turn:
            raise RequestError("no room")
        await self.gate.wait()
        ids = [*map(ord, self.texts[turn]), END][: sampling.max_tokens]
        reason = "abort" if request_id in self.aborted else "stop" if ids[-1] == END and not self.cut else "length"
        routes = None
        if self.records_routes and turn != self.unrecorded_turn:
            routes = np.arange(routes_from, len(prompt) + len(ids) - 1, dtype=np.int16)[:, None, None]
            self.sent_routes += len(routes)
        yield Completion(
            0,
            np.array(ids, np.int32),
            np.full(len(ids), -1.0, np.float32),
            (VersionSpan(self.version, 0, len(ids)),),
            reason,
            routes=routes,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.gate.set()


class Echo:
    """Repeats each turn; is done after `turns` of them; each earns a half."""

    def __init__(self, turns: int = 2, *, fails_at: int | None = None, hangs_at: int | None = None) -> None:
        self.turns, self.fails_at, self.hangs_at = turns, fails_at, hangs_at
        self.scores, self.about = True, "echo"
        self.opening: tuple[dict[str, str], ...] = ()
        self.tasks, self.closed = [], 0

    def episode(self, task):
        self.tasks.append(task)
        return EchoEpisode(self)

    async def close(self) -> None:
        pass


class EchoEpisode:
    def __init__(self, of: Echo) -> None:
        self.of, self.heard = of, []

    async def reset(self) -> Reply:
        return await self._reply(0, Reply(messages=self.of.opening))

    async def step(self, text: str) -> Reply:
        self.heard.append(text)
        done = len(self.heard) == self.of.turns
        said = ({"role": "user", "content": f"[{text}]"},)
        return await self._reply(len(self.heard), Reply(messages=said, reward=0.5, done=done))

    async def _reply(self, call: int, reply: Reply) -> Reply:
        if call == self.of.fails_at:
            raise EnvironmentFailed("it broke")
        if call == self.of.hangs_at:
            await asyncio.Event().wait()
        return reply

    async def close(self) -> None:
        self.of.closed += 1


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != END)


def say(messages, last) -> tuple[int, ...]:
    assert last in (END, None)
    return tuple(ord(c) for m in messages for c in m["content"])


def sampler(engine, environment, **options) -> TurnSampler:
    defaults = {"decode": decode, "continue_": say, "max_turns": 8, "scores": True}
    return TurnSampler(engine=engine, environment=environment, **defaults | options)


PROMPT = Prompt(prompt_id="train/0", token_ids=(1, 2, 3), answer="x")


async def play(engine, environment, *, max_tokens: int = 100, count: int = 1, **options) -> list[Completion]:
    turns = sampler(engine, environment, **options).of(PROMPT)
    found = [one async for one in turns.generate("r", PROMPT.token_ids, count, Sampling(max_tokens=max_tokens), 40)]
    assert environment.closed == len(environment.tasks) == count
    return sorted(found, key=lambda one: one.index)


def all_of(completion: Completion) -> str:
    return "".join("$" if token == END else chr(token) for token in completion.all_token_ids)


async def test_each_turn_reads_exactly_what_was_sampled_and_said():
    engine, environment = Scripted("ab", "c", "d"), Echo(turns=3)
    (one,) = await play(engine, environment)
    assert all_of(one) == "ab$[ab]c$[c]d$" and decode(one.token_ids) == "abcd"
    assert [decode(turn) for turn in one.turns] == ["ab", "c", "d"]
    assert [decode(prompt[3:]) for _, prompt, _, _ in engine.asked] == ["", "ab[ab]", "ab[ab]c[c]"]
    assert [prompt[:3] for _, prompt, _, _ in engine.asked] == [(1, 2, 3)] * 3
    assert isinstance(one, Played) and one.score == Score(value=1.5) and one.finish_reason == "stop"
    assert len({seed for *_, seed in engine.asked}) == 3, "no two turns have the same random numbers"


async def test_a_turn_without_a_reply_ends_as_any_other():
    def close_turn(messages, last) -> tuple[int, ...]:
        return (*say(messages, last), ord("|"))

    class Silent(EchoEpisode):
        async def step(self, text: str) -> Reply:
            return Reply(done=(await super().step(text)).done)

    environment = Echo(turns=3)
    environment.episode = lambda task: (environment.tasks.append(task), Silent(environment))[1]
    (one,) = await play(Scripted("ab", "c", "d"), environment, continue_=close_turn)
    assert all_of(one) == "ab$|c$|d$" and [decode(turn) for turn in one.turns] == ["ab", "c", "d"]


async def test_sampled_and_said_tokens_together_fill_the_room_of_a_completion():
    engine = Scripted("ab", "cdefgh")
    (one,) = await play(engine, Echo(turns=9), max_tokens=10)
    assert [room for _, _, room, _ in engine.asked] == [10, 3]
    assert all_of(one) == "ab$[ab]cde" and one.finish_reason == "length"
    assert isinstance(one, Played) and one.score.value == 0.5, "what it earned before it was cut"
    (one,) = await play(Scripted("ab"), Echo(turns=9), max_tokens=7)
    assert all_of(one) == "ab$" and one.finish_reason == "length", "no turn would have room after the reply"
    (one,) = await play(Scripted("a", "b", "c"), Echo(turns=9), max_turns=2)
    assert all_of(one) == "a$[a]b$" and one.finish_reason == "length", "turns have a limit"


@pytest.mark.parametrize(("call", "sampled"), [(0, ""), (1, "a$"), (2, "a$[a]b$")])
async def test_an_environment_that_fails_is_a_failure_by_name_of_its_completion(call, sampled):
    (one,) = await play(Scripted("a", "b", "c"), Echo(turns=3, fails_at=call))
    assert isinstance(one, Played) and one.score == Score(failure="environment", detail="it broke")
    assert all_of(one) == sampled and one.finish_reason == "abort"


async def test_rewards_that_add_up_beyond_the_bound_are_a_failure_by_name():
    class Rich(EchoEpisode):
        async def step(self, text: str) -> Reply:
            return replace(await super().step(text), reward=LARGEST)

    environment = Echo(turns=2)
    environment.episode = lambda task: (environment.tasks.append(task), Rich(environment))[1]
    (one,) = await play(Scripted("a", "b"), environment)
    assert isinstance(one, Played) and one.score is not None and one.score.failure == "environment"
    assert one.score.detail == "its rewards add up to 2e+06, which is beyond 1e+06"


async def test_a_first_observation_without_room_is_a_failure_by_name():
    environment = Echo()
    environment.opening = ({"role": "user", "content": "0123456789"},)
    (one,) = await play(Scripted("a"), environment, max_tokens=10)
    assert isinstance(one, Played) and one.score is not None and one.score.failure == "environment"
    assert "no room for a turn in sampling.max_tokens" in one.score.detail and all_of(one) == ""


async def test_all_completions_of_a_prompt_meet_the_same_task():
    environment = Echo()
    first, second = await play(Scripted("a", "b"), environment, count=2)
    assert (first.index, second.index) == (0, 1)
    assert environment.tasks[0] == environment.tasks[1] and environment.tasks[0]["answer"] == "x"


@pytest.mark.parametrize("where", ["engine", "environment"])
async def test_an_aborted_request_gives_what_it_has(where):
    engine, environment = Scripted("a", "b"), Echo(hangs_at=1 if where == "environment" else None)
    if where == "engine":
        engine.gate.clear()
    turns = sampler(engine, environment).of(PROMPT)
    found = asyncio.ensure_future(
        anext(turns.generate("r", PROMPT.token_ids, 1, Sampling(max_tokens=100), 0))  # type: ignore[arg-type]
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert not found.done()
    await turns.abort("r")
    one = await asyncio.wait_for(found, 5.0)
    assert one.finish_reason == "abort" and all_of(one) == "a$"
    assert environment.closed == 1


async def test_a_refused_first_turn_refuses_the_request_and_a_later_one_ends_its_completion():
    engine = Scripted("a", "b")
    engine.refuses_turn = 0
    with pytest.raises(RequestError):
        await play(engine, Echo())
    engine.refuses_turn = 1
    (one,) = await play(engine, Echo())
    assert all_of(one) == "a$[a]" and one.finish_reason == "abort"


async def test_an_engine_that_fails_ends_every_episode():
    class Failing(Scripted):
        async def generate(self, *arguments, **named):
            raise EngineError("gone")
            yield

    environment = Echo()
    with pytest.raises(EngineError, match="gone"):
        await play(Failing(), environment, count=3)
    assert environment.closed == 3


@pytest.mark.parametrize("unrecorded_turn", [-1, 1])
async def test_each_turn_sends_the_experts_of_the_tokens_that_are_new(unrecorded_turn):
    engine = Scripted("ab", "c", "d")
    engine.records_routes, engine.unrecorded_turn = True, unrecorded_turn
    (one,) = await play(engine, Echo(3))
    assert one.routes.flatten().tolist() == list(range(3 + len(one.all_token_ids) - 1))
    assert engine.sent_routes == len(one.routes)


@pytest.mark.parametrize("scores", [True, False])
async def test_a_group_is_scored_by_its_environment_or_by_the_reward(scores):
    lease = make_lease()
    turns = sampler(Scripted("a", "c"), Echo(), scores=scores).of(lease.prompt)
    group = await GroupInFlight(lease, turns, LengthReward(), decode).generate("g")
    assert [one.score.value for one in group.rollouts] == [1.0 if scores else float(len("a\nc"))] * 3
    assert group.num_tokens == 3 * 4


@pytest.mark.parametrize(("turns", "texts"), [(2, ("a[a]c", "a\nc")), (1, ("a", ""))])
async def test_a_completion_of_an_evaluation_has_its_text_with_replies_and_without(turns, texts):
    lease = make_lease(purpose="eval")
    by = sampler(Scripted("a", "c"), Echo(turns), scores=False).of(lease.prompt)
    group = unpack_group(*pack_group(await GroupInFlight(lease, by, LengthReward(), decode).generate("g")))
    assert [(one.text, one.sampled_text) for one in group.rollouts] == [texts] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("turns") / "model"
    make_demo_model(path, seed=3)
    return str(path)


def test_what_follows_a_turn_is_what_the_chat_template_puts_there(model):
    tokenizer = load_tokenizer(model)
    continue_, eos = partial(continuation, tokenizer), tokenizer.eos_token_id
    chat = [
        {"role": "user", "content": "6*7"},
        {"role": "assistant", "content": "6*7="},
        {"role": "user", "content": "42"},
    ]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    start = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    sampled = [*tokenizer.encode("6*7="), eos]
    ids = [*tokenizer.encode(start), *sampled, *continue_(chat[2:], eos)]
    assert tokenizer.decode(ids) == whole
    # A turn that was ended by another token is closed by the template's own.
    assert tokenizer.decode(continue_(chat[2:], ord("x"))) == "<eos><user>42<assistant>"
    tokenizer.chat_template = None
    assert tokenizer.decode(continuation(tokenizer, chat[2:], eos)) == "42"


async def test_log_probs_and_versions_of_turns_are_those_of_the_model_that_sampled_them(model):
    """With the torch engine, and a change of weights between two turns: each token has the log-prob that a plain forward
    pass of its own weights gives it after all that stands before it."""
    engine = TorchEngine(model, dtype=torch.float32, device=torch.device("cpu"), max_context=256, max_completions=8)
    await engine.start(V1)
    tokenizer = load_tokenizer(model)
    old, new = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    environment = Echo(turns=3)

    class Swapping(EchoEpisode):
        async def step(self, text: str) -> Reply:
            reply = await super().step(text)
            if len(self.heard) == 1:
                await engine.load_weights(shared(new.state_dict()), V2)
            return reply

    environment.episode = lambda task: (environment.tasks.append(task), Swapping(environment))[1]
    decode = decoder(tokenizer, keep_special=False)
    turns = sampler(engine, environment, decode=decode, continue_=partial(continuation, tokenizer)).of(PROMPT)
    stops = (tokenizer.eos_token_id, *range(48, 53))
    sampling = Sampling(max_tokens=120, stop_token_ids=stops)
    try:
        (one,) = [c async for c in turns.generate("r", PROMPT.token_ids, 1, sampling, 5)]
    finally:
        await engine.close()
    assert len(one.turns) == 3 and [span.version for span in one.spans] == [V1, V2]
    change = one.spans[0].end
    assert change == len(one.turns[0]), "the weights changed between the first turn and the second"
    assert one.spans[1] == VersionSpan(V2, change, len(one.token_ids))
    for network, part in ((old, slice(0, change)), (new, slice(change, None))):
        expected = plain_logprobs(network, PROMPT.token_ids, one)
        np.testing.assert_allclose(one.logprobs[part], expected[part], atol=2e-6)
