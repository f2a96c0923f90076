"""A generator's process, on a virtual clock, with lines that end in the test."""

import asyncio
import math
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from asyncgrpo import liveness
from asyncgrpo.engines.base import EngineOccupancy
from asyncgrpo.errors import EngineError
from asyncgrpo.generators.rollout import Activities, Played
from asyncgrpo.generators.service import MAX_FAILED_LEASES, GeneratorService, TokenTime
from asyncgrpo.rewards.base import Reward
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import GeneratorSeconds, Lease, PolicyVersion, Prompt, RewardHealth, Sampling, Score
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer as Frame
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    AwaitsScores,
    Cancel,
    Deliver,
    Grant,
    LeaseFailed,
    Register,
    RewardFailed,
    Serving,
    Shutdown,
)
from tests.engines.faulty import FaultyEngine
from tests.generators.test_rollout import make_lease
from tests.rewards.stubs import OneByOne
from tests.simulation.virtual import NO_WEIGHTS, GeneratorLine, Receiver, VirtualLoop
from tests.test_metrics import value

LEASE = make_lease(2, prompt=Prompt(prompt_id="train/0", token_ids=(1,)), sampling=Sampling(max_tokens=4))


class FixedReward(OneByOne):
    async def score_one(self, prompt: Prompt, text: str) -> Score:
        return Score(value=1.0)


class Generator(GeneratorService):
    """The product's, whose lines end here."""

    def __init__(self, reward: Reward | None = None, buffer_endpoint: str = "buffer", **engine: Any) -> None:
        self.sent: list[Message] = []
        super().__init__(
            "g",
            "a",
            FaultyEngine(seconds_per_token=1.0, **engine),
            Breaker(reward or FixedReward(), at_once=1),
            lambda ids: "",
            window=2,
            keep_kv=True,
            load_timeout_s=1.0,
            stuck_after_s=10.0,
            keys=None,
            buffer_endpoint=buffer_endpoint,
            weights_endpoint="weights",
            host="",
        )

    def _connect(self) -> GeneratorLine:  # type: ignore[override]
        self.line = GeneratorLine(self._sends)
        return self.line

    def _sends(self, message: Message, payload: Frame) -> None:
        encode(message, payload)
        self.sent.append(message)

    def _receiver(self) -> Receiver:  # type: ignore[override]
        return Receiver(lambda: None)

    def hear(self, message: Message) -> None:
        self.line.arrive([bytes(frame) for frame in encode(message)])


class Rig:
    """A generator on a virtual clock, from its start to a shutdown."""

    def __init__(self, **settings: Any) -> None:
        self.loop, self.generator = VirtualLoop(), Generator(**settings)  # type: ignore[abstract]

    def __enter__(self) -> "Rig":
        self.task = self.loop.create_task(self.generator.run())
        self.until(0.5)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self.task.done():
            self.generator.hear(Shutdown())
            self.until(self.loop.time() + 30.0)
            assert self.task.done() and self.task.exception() is None

    def until(self, at_s: float) -> None:
        self.loop.run_until(at_s)

    def hear(self, message: Message) -> None:
        self.generator.hear(message)

    def of(self, kind: type) -> list[Any]:
        """What it has sent of this kind."""
        return [message for message in self.generator.sent if isinstance(message, kind)]


ACK = Ack(lease_id="1.0.0")


def test_a_generator_that_moves_drops_what_it_did_and_serves_the_new_buffer():
    """Buffer and learner were started again: the old lease is void, and the engine lives on."""
    with Rig() as rig:
        rig.hear(Grant(lease=LEASE))
        rig.until(1.5)
        hellos = len(rig.of(Register))
        rig.generator.move("another", "weights")
        rig.until(12.0)
        assert rig.generator.buffer_endpoint == "another" and not rig.task.done()
        assert len(rig.of(Register)) == hellos + 1
        assert rig.of(Deliver) == [], "its lease was of the buffer before"
        rig.hear(Grant(lease=LEASE))
        rig.until(20.0)
        assert len(rig.of(Deliver)) == 1
        rig.generator.move("another", "weights")  # told again: nothing changes
        rig.hear(ACK)


@pytest.mark.parametrize("while_it_starts", [False, True])
def test_an_engine_that_is_up_before_its_buffer_waits_for_its_address_and_joins_once(while_it_starts: bool):
    """A model is loaded on the event loop. A second start at once would end the connection that the learner has just met."""
    rig = Rig(buffer_endpoint="")
    start_engine = rig.generator.engine.start

    async def start(version: PolicyVersion) -> None:
        await start_engine(version)
        if while_it_starts:
            rig.generator.move("buffer", "weights")  # another thread does, while this one is busy

    rig.generator.engine.start = start  # type: ignore[method-assign]
    with rig:
        rig.until(5.0)
        assert bool(rig.generator.sent) is while_it_starts and not rig.task.done()
        rig.generator.move("buffer", "weights")
        rig.until(5.5)
        assert len(rig.of(Register)) == 1
        rig.hear(Grant(lease=LEASE))
        rig.until(12.0)
        assert len(rig.of(Deliver)) == 1
        rig.hear(ACK)


def test_a_group_that_is_too_large_for_a_message_costs_its_lease_and_not_the_engine(monkeypatch):
    with Rig() as rig:
        monkeypatch.setattr(Deliver, "max_payload_bytes", 8)
        rig.hear(Grant(lease=LEASE))
        rig.until(12.0)
        (failed,) = rig.of(LeaseFailed)
        assert (failed.reason, failed.tokens) == ("failed", 8) and "the limits are" in failed.detail
        assert rig.of(Serving)[-1].leases == ()


class SlowReward(FixedReward):
    def __init__(self, seconds: float = 20.0) -> None:
        self.seconds = seconds

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        await asyncio.sleep(self.seconds)
        return Score(value=1.0)


def test_time_is_told_by_what_was_done_so_that_a_slow_reward_does_not_look_like_a_busy_engine():
    before = {what: value("completion_seconds_total", activity=what) for what in ("generate", "reward")}
    with Rig(reward=SlowReward()) as rig:
        rig.until(10.0)
        rig.hear(Grant(lease=LEASE))  # two completions of four tokens, a second each; then 40 s of scoring, one by one
        rig.until(14.5)
        rig.loop.create_task(rig.generator._swap(NO_WEIGHTS, PolicyVersion(1, 1)))
        rig.until(100.0)
        assert rig.of(Deliver)
        told = rig.of(Serving)[-1].seconds
        assert (round(told.generate), round(told.reward), told.weights) == (4, 40, 0.0), told
        assert abs(told.generate + told.reward + told.weights + told.idle - 100) < 1.5
        at_once = {what: value("completion_seconds_total", activity=what) - was for what, was in before.items()}
        assert (round(at_once["generate"]), round(at_once["reward"])) == (8, 20 + 40), "each completion counts"
        assert value("generator_seconds_total", activity="reward") > 39
        rig.hear(ACK)


def test_a_change_of_weights_takes_time_of_its_own_and_a_wait_for_an_environment_is_of_scoring():
    clock = [0.0]
    activities = Activities(lambda: clock[0])
    activities.begin("generate", 3)
    clock[0] = 10.0
    with activities.during("weights"):
        clock[0] = 12.0
    activities.end("generate", 2)
    clock[0] = 15.0
    with activities.instead("reward", of="generate"):
        clock[0] = 20.0
    activities.end("generate", 1)
    clock[0] = 21.0
    spent = GeneratorSeconds(generate=13.0, weights=2.0, reward=5.0, idle=1.0, sampling=3 * 12 + 3, scoring=5.0)
    assert activities.seconds() == spent


def test_an_engine_that_hangs_ends_its_generator():
    with Rig(injected_fault=lambda completion, length: "hang") as rig:
        rig.generator.engine.probe = asyncio.Event().wait  # type: ignore[method-assign]
        rig.hear(Grant(lease=LEASE))
        rig.until(14.0)
        assert not rig.task.done()
        rig.until(40.0)
    with pytest.raises(ExceptionGroup) as raised:
        rig.task.result()
    assert raised.group_contains(EngineError, match="has not replied for 10 s")


def test_a_load_has_the_time_of_a_copy_beside_the_deadline(monkeypatch):
    def result(within_s: float) -> str:
        raise TimeoutError

    def started(work: Coroutine[Any, Any, str], loop: object) -> Any:
        work.close()
        return SimpleNamespace(result=result)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", started)
    monkeypatch.setattr(liveness, "READ_BYTES_PER_S", 2.0)
    with Rig() as rig:
        weights = SharedTensors([("embed", torch.zeros(5))], SimpleNamespace(flags=[0]), 0, 0)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"did not load .* within 11 s"):
            rig.generator._apply_weights(weights, PolicyVersion(1, 1))


def test_an_engine_that_loads_for_longer_than_it_may_be_silent_is_left_to_the_deadline_of_the_load():
    loaded = asyncio.Event()

    async def load(*weights: object, keep_kv: bool) -> None:
        await asyncio.sleep(40.0)
        loaded.set()

    with Rig() as rig:
        rig.generator.engine.load_weights = load  # type: ignore[method-assign]
        rig.generator.engine.probe = loaded.wait  # type: ignore[method-assign]
        rig.loop.create_task(rig.generator._swap(SimpleNamespace(), PolicyVersion(1, 1)))  # type: ignore[arg-type]
        rig.until(60.0)
        assert not rig.task.done() and rig.of(Serving)[-1].version == PolicyVersion(1, 1)


@pytest.mark.parametrize(("purpose", "tokens"), [("train", 4), ("eval", 0)])
def test_a_cancelled_lease_ends_at_once_and_says_what_was_sampled_for_it(purpose, tokens):
    with Rig() as rig:
        rig.hear(Grant(lease=msgspec.structs.replace(LEASE, purpose=purpose)))
        rig.until(2.8)  # two tokens of both completions
        rig.hear(Cancel(lease_ids=("1.0.0", "another"), reason="stale"))
        rig.until(3.0)
        assert [(f.lease_id, f.reason, f.tokens) for f in rig.of(LeaseFailed)] == [("1.0.0", "cancelled", tokens)]
        assert not rig.generator.engine._requests and rig.of(Deliver) == []


def hear_leases(rig: Rig, *leases: Lease) -> None:
    for lease in leases:
        rig.hear(Grant(lease=lease))
        rig.until(rig.loop.time() + 10.0)
        rig.hear(Ack(lease_id=lease.lease_id))


def numbered(number: int, **fields: Any) -> Lease:
    named = {"lease_id": f"1.{number}.0", "group_id": f"1.{number}", "prompt_index": number}
    return msgspec.structs.replace(LEASE, **named, **fields)


REFUSED = Prompt(prompt_id="train/9", token_ids=(10**6,))


def test_a_prompt_that_the_engine_refuses_is_given_back_and_the_generator_lives_while_others_are_answered():
    with Rig() as rig:
        for number in range(0, 2 * MAX_FAILED_LEASES, 2):
            hear_leases(rig, numbered(number, prompt=REFUSED), numbered(number + 1))
        failed = [(m.lease_id, m.reason) for m in rig.of(LeaseFailed)]
        assert failed == [(f"1.{n}.0", "failed") for n in range(0, 10, 2)]
        assert {m.lease_id for m in rig.of(Deliver)} == {f"1.{n}.0" for n in range(1, 10, 2)} and not rig.task.done()
        hear_leases(rig, *(numbered(10 + number, prompt=REFUSED) for number in range(MAX_FAILED_LEASES)))
        assert len(rig.of(LeaseFailed)) == len(failed) + MAX_FAILED_LEASES - 1 and rig.task.done()
    (cause,) = rig.task.exception().exceptions
    assert isinstance(cause, EngineError) and "requests of 5 consecutive leases" in str(cause)


def test_a_group_with_too_few_completions_at_its_cut_is_given_back_as_late():
    with Rig(injected_fault=lambda completion, length: "hang") as rig:
        hear_leases(rig, numbered(0, cut_after_s=5.0, min_completions=1))
        assert [message.reason for message in rig.of(LeaseFailed)] == ["lease_timeout"]
        assert rig.of(Deliver) == [] and not rig.generator.engine._requests


class Outage(OneByOne):
    """A reward that is down for half a minute."""

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        await asyncio.sleep(0.1)
        if asyncio.get_running_loop().time() < 30.0:
            return Score(failure="exception", detail="my_reward.py:12: OSError: the judge is down")
        return Score(value=1.0)


def test_a_group_that_is_due_in_an_outage_is_not_cut_down_to_what_failed():
    with Rig(reward=Outage()) as rig:
        rig.hear(Grant(lease=msgspec.structs.replace(LEASE, cut_after_s=8.0, min_completions=2)))
        rig.until(29.0)
        assert rig.of(Deliver) == [] and rig.of(Serving)[-1].rewards.probe_in_s is not None
        rig.until(50.0)
        (news, *_) = rig.of(RewardFailed)
        assert (news.failure, news.count) == ("exception my_reward.py:12: OSError", 1)
        assert all(rollout.score.value == 1.0 for rollout in rig.of(Deliver)[0].rollouts)
        rig.hear(ACK)


class Environment:
    """Plays the completions that an engine samples. Those of prompt 0 take the longest."""

    def __init__(self, engine: FaultyEngine, scores: list[list[Score | None]]) -> None:
        self.engine, self.scores = engine, scores

    def of(self, prompt: Prompt, activities: Activities) -> "Environment":
        return self

    async def generate(self, request_id: str, token_ids: tuple[int, ...], *request: Any) -> Any:
        (number,) = token_ids
        async for one in self.engine.generate(request_id, token_ids, *request):
            await asyncio.sleep(0.0 if number else 20.0)
            given = self.scores[number][one.index]
            yield one if given is None else Played(**vars(one) | {"score": given})

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def close(self) -> None:
        """Nothing runs."""


BOOM = Score(failure="environment", detail="my_game.py:3: ValueError: boom")


@pytest.mark.parametrize(
    ("last", "worked", "failed"),
    [([BOOM, BOOM], 0, 3), ([BOOM, Score(value=0.0)], 1, 2), ([BOOM, None], 1, 2)],
)
def test_failures_of_an_environment_are_told_and_count_once_older_groups_are_done(last, worked: int, failed: int):
    """They end a run whose environment never works, as those of a reward do, but not before its slow ones are done."""
    leases = [numbered(n, prompt=Prompt(prompt_id=f"train/{n}", token_ids=(n,))) for n in range(7)]
    with Rig() as rig:
        rig.generator.turns = Environment(rig.generator.engine, [last] + 6 * [[BOOM, BOOM]])
        for lease in leases[:5]:
            rig.hear(Grant(lease=lease))
        rig.until(15.0)
        assert len(rig.of(Deliver)) == 4 and rig.of(Serving)[-1].rewards == RewardHealth()
        news = rig.of(RewardFailed)[0]
        assert (news.failure, news.detail, news.count) == ("environment my_game.py:3: ValueError", BOOM.detail, 1)
        for lease in leases[1:5]:
            rig.hear(Ack(lease_id=lease.lease_id))
        rig.until(60.0)
        rig.hear(ACK)
        hear_leases(rig, *leases[5:])
        health = rig.of(Serving)[-1].rewards
        assert (health.worked, health.failed, health.probe_in_s) == (worked, failed, None)
        assert health.failing_s >= 9.0 and health.last == f"environment: {BOOM.detail}"


@pytest.mark.parametrize(("scoring_s", "is_told"), [(0.01, False), (2.0, True)])
def test_the_buffer_is_told_of_a_group_that_awaits_its_scores_for_long(scoring_s: float, is_told: bool):
    with Rig(reward=SlowReward(scoring_s)) as rig:
        rig.hear(Grant(lease=LEASE))
        while not rig.of(Deliver):
            told = [message.lease_id for message in rig.of(AwaitsScores)]
            rig.until(rig.loop.time() + 0.05)
        assert told == ([LEASE.lease_id] if is_told else [])
        rig.hear(ACK)


def test_the_time_of_a_token_is_that_of_the_steps_since_the_last_look_or_of_one_that_lasts_longer():
    """Steps before an idle time or a change of weights say nothing: a generator that counts them reports itself as slow."""

    def use(steps: int, step_s: float, present_s: float = 0.0, running: int = 8) -> EngineOccupancy:
        return EngineOccupancy(running, 0, 8, math.nan, steps, step_s, present_s)

    time = TokenTime()
    assert time.poll(use(3, 30.0)) is None, "the warm-up compiles kernels"
    assert time.poll(use(13, 31.0)) == pytest.approx(0.1)
    assert time.poll(use(15, 33.0, present_s=0.5)) == pytest.approx(1.0)
    assert time.poll(use(15, 33.0, present_s=0.5)) == pytest.approx(1.0), "no step since: as before"
    assert time.poll(use(15, 33.0, present_s=1.5)) == pytest.approx(1.5)
    assert time.poll(use(17, 41.0, running=0)) is None
    assert time.poll(use(17, 41.0, present_s=0.1)) is None, "no step since"
    assert time.poll(use(27, 42.0)) == pytest.approx(0.1)
    time.reset(use(28, 52.0))
    assert time.poll(use(28, 52.0, present_s=5.0)) is None, "no step since"
    assert time.poll(use(38, 53.0)) == pytest.approx(0.1)


def test_each_time_of_a_token_is_reported_once_however_often_a_generator_reports_its_weights():
    """The buffer takes two slow ones in a row for a generator that has become slow."""
    with Rig() as rig:
        rig.hear(Grant(lease=LEASE))
        rig.until(3.2)
        before = len(rig.generator.sent)
        for number in (1, 2):
            swap = rig.loop.create_task(rig.generator._swap(NO_WEIGHTS, PolicyVersion(1, number)))
            rig.until(3.2 + 0.1 * number)
            assert swap.done() and swap.exception() is None
        times = [(m.version, m.token_s) for m in rig.of(Serving)]
        assert times[-3][1] == pytest.approx(1.0) and len(rig.generator.sent) == before + 2
        assert times[-2:] == [(PolicyVersion(1, 1), None), (PolicyVersion(1, 2), None)]
        rig.until(7.0)
        rig.hear(ACK)


def test_heartbeats_name_a_lease_until_its_group_is_acknowledged():
    with Rig() as rig:
        rig.hear(Grant(lease=LEASE))
        for until_s, is_delivered in ((2.8, False), (10.0, True)):
            rig.until(until_s)
            assert rig.of(Serving)[-1].leases == (LEASE.lease_id,) and bool(rig.of(Deliver)) is is_delivered
        rig.hear(ACK)
        rig.until(12.0)
        assert rig.of(Serving)[-1].leases == ()
