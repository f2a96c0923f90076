"""The processes of a simulated run: each is the product's class, with stand-ins for what is not the rollout plane.

Stand-ins are the weight plane, the training step, checkpoints, rewards and the supervisor's restarts.
"""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.errors import WeightsError
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.learner.checkpoints import RunState
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Group, PolicyVersion, Prompt, Score
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer as Frame
from asyncgrpo.wire.rollouts import REWARDS_PAUSED, Deliver, LeaseFailed, Serving
from tests.engines.faulty import Fate, FaultyEngine
from tests.rewards.stubs import OneByOne
from tests.simulation.virtual import NO_WEIGHTS, Frames, GeneratorLine, Receiver

if TYPE_CHECKING:
    from tests.simulation.world import World

VOCABULARY = 8


class Reward(OneByOne):
    """Takes a while, and fails as the seed says; a poisoned prompt fails for ever."""

    def __init__(self, world: "World", generator: str) -> None:
        self._world, self._generator = world, generator

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        world = self._world
        await asyncio.sleep(world.rng.uniform(0.01, 0.5))
        if prompt.info.get("poison"):
            raise RuntimeError("this prompt breaks every reward")
        if world.rewards_are_down(self._generator):
            world.note("fault", "reward_outage", self._generator)
            return Score(failure="exception", detail="judge.py:1: ConnectionError: nobody answers")
        if world.now < world.faults.until_s and world.rng.random() < world.faults.share.get("bad_reward", 0.0):
            return Score(failure="timeout")
        return Score(value=float(len(text) % 3))


class SimulatedGenerator(GeneratorService):
    def __init__(self, owner: "GeneratorHost", **settings: Any) -> None:
        super().__init__(**settings)
        self.owner = owner

    def _connect(self) -> GeneratorLine:  # type: ignore[override]
        return self.owner.line

    def _receiver(self) -> Receiver:  # type: ignore[override]
        return self.owner.receiver


class GeneratorHost:
    """One incarnation of one generator, from its start to its end."""

    def __init__(self, world: "World", index: int, incarnation: int, seconds_per_token: float) -> None:
        self.world = world
        self.name = f"generator-{index}"
        self.index = index
        self.incarnation = str(incarnation)
        self.peer = f"{self.name}-{incarnation}"
        self.is_alive = True
        self.may_fail = False
        """A fault was done to it that ends it by itself."""
        self.is_orphan = False
        """The supervisor has given it up, and it lives."""
        self.line = GeneratorLine(self._send)
        self.receiver = Receiver(lambda: world.publisher.join_later(self))
        self.engine = FaultyEngine(
            vocab_size=VOCABULARY,
            max_context=64,
            seconds_per_token=seconds_per_token,
            injected_fault=self._injected_fault,
        )
        self._fates: dict[PendingCompletion, Fate | None] = {}
        self._sent: dict[str, float] = {}  # when each group was last sent, by lease
        self.unreplied: set[str] = set()
        self.service = SimulatedGenerator(
            self,
            generator_id=self.name,
            incarnation=str(incarnation),
            engine=self.engine,
            reward=Breaker(Reward(world, self.name), at_once=10**6),
            decode=lambda ids: "x" * sum(ids),
            window=world.window,
            keep_kv=True,
            load_timeout_s=10.0,
            stuck_after_s=120.0,
            buffer_endpoint="buffer",
            weights_endpoint="",
            host="",
            keys=None,
        )
        self.task = world.loop.create_task(self.service.run(), name=self.peer)
        self.task.add_done_callback(self._ended)

    def kill(self) -> None:
        """kill -9: not another word, whatever its tasks would still like to do."""
        self.is_alive = False
        self.line.close()
        self.task.cancel()

    def _injected_fault(self, completion: PendingCompletion, length: int) -> Fate | None:
        """What befalls a completion before this token. Its seed decides, so that the same try meets the same fate."""
        world = self.world
        if completion.request.prompt in world.killers and self.is_alive:
            world.note("fault", "killer_prompt", self.peer)
            world.killed_s = world.now
            self.kill()
            world.generator_ended(self)
        if not world.of_completions or length != 1:
            return None
        if completion not in self._fates:
            self._fates[completion] = fate = world.fate_of(completion)
            if fate is not None:
                world.note("fault", f"answer_{fate}s", self.peer)
        return self._fates[completion]

    def arrive(self, frames: Frames) -> None:
        if self.is_alive:
            self.line.arrive(frames)

    def _ended(self, task: asyncio.Task) -> None:
        if task.cancelled() or not self.is_alive:
            if not task.cancelled():
                task.exception()
            return
        self.is_alive = False
        failure = task.exception()
        if failure is not None and not self.may_fail:
            causes = getattr(failure, "exceptions", [failure])
            self.world.violated(f"P12 liveness: {self.peer} ended by itself: {causes[0]!r}")
        if not self.is_orphan:
            self.world.generator_ended(self)

    def granted(self, lease_id: str) -> None:
        """A lease that was answered and comes again is generated, and delivered, again."""
        if lease_id not in self.unreplied:
            self._sent.pop(lease_id, None)

    def _send(self, message: Message, payload: Frame) -> None:
        if isinstance(message, Deliver):
            now, before = self.world.now, self._sent.get(message.lease_id)
            self._sent[message.lease_id] = now
            if before is not None and now - before < self.world.resend_after_s:
                self.world.violated(f"P11 resends: {message.lease_id} again after {now - before:.1f} s")
            self.unreplied.add(message.lease_id)
        elif isinstance(message, LeaseFailed) and message.reason == REWARDS_PAUSED:
            self.world.checker.given_back(message.lease_id)
        elif isinstance(message, Serving):
            lost = self.unreplied - set(self.service._unacknowledged)
            if lost:
                self.world.violated(f"P1 none lost: {self.peer} forgot {sorted(lost)} without a completion")
        self.world.to_buffer(self.peer, self.name, message, payload)


class Publisher:
    """Stands for `weights.Publisher`: every generator swaps when it likes, to what is the newest then."""

    is_idle = True
    """Nobody waits for it at the end of a run."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._members: dict[str, GeneratorHost] = {}
        self._busy: set[str] = set()
        self._newest: PolicyVersion | None = None
        self.cut_until: dict[str, float] = {}

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """Compare nothing: there is no model to score."""

    def join_later(self, host: GeneratorHost) -> None:
        """Its `Join` arrives after a moment, or when the line is whole again."""
        loop = self._world.loop
        wait = max(0.0, self.cut_until.get(host.name, 0.0) - loop.time()) + self._rng.uniform(0.05, 1.0)
        loop.call_later(wait, self._join, host)

    def _join(self, host: GeneratorHost) -> None:
        if host.is_alive and host.world.publisher is self:
            self._members[host.peer] = host
            self._begin(host)

    def dismiss(self, leaving: tuple[str, ...]) -> None:
        for peer in leaving:
            self._members.pop(peer, None)

    def wait_for(self, count: Callable[[], int], timeout_s: float, report: Callable[[str, float], None]) -> None:
        loop = self._world.loop
        loop.run_until(loop.time() + 30.0, lambda: len(self._members) >= count())
        report("generators", 0.0)
        if not self._members:
            raise WeightsError("no generator asked for weights")

    def offer(self, version: PolicyVersion, fill: Callable[..., object]) -> bool:
        """Now and then both arenas are being read."""
        if self._rng.random() < 0.1:
            return False
        self._newest = version
        self._world.note("published", "learner", str(version))
        for host in list(self._members.values()):
            self._begin(host)
        return True

    def reports(self) -> list[SimpleNamespace]:
        return []

    def close(self) -> None:
        """Nothing to close."""

    def _begin(self, host: GeneratorHost) -> None:
        """Have it swap after a while, which is long now and then."""
        if self._newest is None or host.peer in self._busy or host.engine.version == self._newest:
            return
        self._busy.add(host.peer)
        seconds = self._rng.uniform(0.05, 1.0) * self._rng.choice((1.0, 1.0, 1.0, 12.0))
        self._world.loop.call_later(seconds, self._swap, host, self._newest)

    def _swap(self, host: GeneratorHost, version: PolicyVersion) -> None:
        world = self._world
        if not host.is_alive or host.peer not in self._members or world.publisher is not self:
            self._busy.discard(host.peer)
            return
        if self.cut_until.get(host.name, 0.0) > world.now or not hasattr(host.service, "_client"):
            self._busy.discard(host.peer)
            del self._members[host.peer]
            self.join_later(host)
            return

        async def swap() -> None:
            try:
                await host.service._swap(NO_WEIGHTS, version)
            except Exception as error:
                host.receiver.failure = error
            self._busy.discard(host.peer)
            self._begin(host)

        world.loop.create_task(swap())


class Trainer:
    """Stands for `learner.Learner`: a step takes its time."""

    steps = 0
    """Updates made: no step ends in the middle."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.snapshot = SimpleNamespace(close=lambda: None)
        self.check = SimpleNamespace(score=list)

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        self._world.checker.trained(groups, version)
        self._world.note("step", "learner", str(version), [g.group_id for g in groups])
        self._world.spend(self._rng.choice((0.1, 0.1, 2.0)) * self._rng.uniform(0.5, 2.0))
        return SimpleNamespace(seconds={}, shares_within=self._shares(groups, version))

    def _shares(self, groups: list[Group], version: PolicyVersion) -> dict[int, float]:
        """What the step says of its importance ratios, as the seed says: good, bad, or bad for what is old."""
        lags = sorted({version.number - group.versions[0].number for group in groups})
        rng = random.Random(f"shares {self._world.seed} {version}")
        good_up_to = rng.choice((-1, 0, 1, 100, 100, 100))
        shares = {lag: 0.95 if lag <= good_up_to else 0.2 for lag in lags}
        self._world.checker.reported(shares)
        return shares

    def export(self, folder: str, tokenizer: str) -> None:
        """Nothing to write."""


class AtOnce(Executor):
    def submit(self, fn: Callable, /, *arguments: Any, **named: Any) -> Future:
        done: Future = Future()
        done.set_result(fn(*arguments, **named))
        return done


class MemoryCheckpoints:
    """Stands for `learner.Checkpoints`: takes a while, and is there whole or not at all."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng

    def begin(self, state: RunState, fill: Callable[[Path], Callable[[], None]]) -> Callable[[], Path]:
        self._world.spend(self._rng.uniform(0.1, 3.0))
        return partial(self._finish, state)

    def _finish(self, state: RunState) -> Path:
        self._world.checkpoint = msgspec.json.encode(state)
        self._world.checker.checkpointed(state)
        self._world.note("checkpoint", "learner", state.step, state.prompts["frontier"])
        return Path("memory")

    def latest(self) -> None:
        return None
