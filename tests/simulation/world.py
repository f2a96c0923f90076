"""One seeded run from its first start to its end: which processes live, what is done to them, and when.

`World(seed).run()` raises `Violation` if a promise was broken; the same seed gives the same run, event for event.
"""

import random
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.group_health import Quarantine
from asyncgrpo.buffer.recovery import bring_back, reopen
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config import schema
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.errors import AsyncGRPOError, StalledError
from asyncgrpo.journal.history import RunStarted, read_history
from asyncgrpo.journal.log import Journal
from asyncgrpo.learner.checkpoints import RunState
from asyncgrpo.learner.ranks import Inbox, Team
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.rewards.breaker import STREAK
from asyncgrpo.types import PolicyVersion, Prompt, Sampling
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer as Frame
from asyncgrpo.wire.codec import decode
from asyncgrpo.wire.rollouts import Ack, Grant, Nack, RequestEval
from asyncgrpo.wire.supervision import Drain, GeneratorLost, Steer
from tests.engines.faulty import Fate
from tests.simulation.checker import Checker, Violation
from tests.simulation.disk import Killed, SimulatedDisk
from tests.simulation.faults import (
    Command,
    Faults,
    Outage,
    draw,
    draw_of_commands,
    draw_of_completions,
    draw_of_rewards,
)
from tests.simulation.network import Network
from tests.simulation.nodes import VOCABULARY, AtOnce, GeneratorHost, MemoryCheckpoints, Publisher, Trainer
from tests.simulation.promises import Promises
from tests.simulation.surroundings import folder_in_memory, quiet, reading_checkpoints_of, scaled
from tests.simulation.virtual import Frames, LearnerLine, Silent, VirtualLoop

LAGS = 0, 1, 4
POLICIES = "wait", "drop", "train"
WITH_AUTO = "wait", "drop"
"""Policies under which the bound may be `auto`."""
DURABILITIES = "memory", "written", "fsync_interval", "fsync_interval", "fsync_each"
TICK_S = 1.0
FINISH_WITHIN_S = 2000.0
"""Virtual seconds that a run may need once the faults have stopped."""
NO_TROUBLE_AFTER_S = 200.0
"""Virtual seconds after the last fault from which on nothing may fail any more."""


class Crash(Exception):
    """The learner, the buffer or the driver was killed: the run ends and is resumed."""


class World:
    def __init__(
        self,
        seed: int,
        *,
        faults: Faults | None = None,
        of_completions: dict[str, float] | None = None,
        outages: tuple[Outage, ...] | None = None,
        max_lag: int | Literal["auto"] | None = None,
        policy: str | None = None,
    ) -> None:
        """
        Args:
            faults, of_completions, outages: instead of those that the seed draws.
            max_lag, policy: instead of those that the seed takes in turn.
        """
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.faults = draw(rng) if faults is None else faults
        self.events: deque[tuple] = deque(maxlen=400)
        self.fault_counts: Counter[str] = Counter()
        self.network = Network(self.loop, rng, self.faults, self.note)
        self.policy = POLICIES[seed // len(LAGS) % len(POLICIES)] if policy is None else policy
        turn = seed // (len(LAGS) * len(POLICIES))
        is_auto = turn % 2 == 1 and self.policy in WITH_AUTO
        self.max_lag = ("auto" if is_auto else LAGS[seed % len(LAGS)]) if max_lag is None else max_lag
        self.window = rng.randint(1, 4)
        self.resend_after_s = 6.0
        per_step, epochs = rng.choice((1, 1, 2, 3)), rng.randint(1, 2)
        count = per_step * rng.randint(4, 8) + rng.randint(0, 1)
        self.config = schema.Config(
            model=schema.ModelConfig(path="simulated"),
            data=schema.DataConfig(train="simulated", eval="simulated" if rng.random() < 0.5 else None),
            run=schema.RunConfig(
                seed=seed, epochs=epochs, checkpoint_every=rng.randint(1, 3), eval_every=rng.randint(1, 4)
            ),
            algorithm=schema.AlgorithmConfig(group_size=2, filter_zero_signal=rng.random() < 0.3),
            buffer=schema.BufferConfig(
                prompts_per_step=per_step,
                max_lag=self.max_lag,  # type: ignore[arg-type]
                auto_lag=_auto_lag(seed),
                policy=self.policy,  # type: ignore[arg-type]
                lease_timeout_s=rng.choice((8.0, 20.0, 40.0)),
                durability=rng.choice(DURABILITIES),
            ),
            generators=schema.GeneratorConfig(engine="fake", count=rng.randint(1, 3)),
        )
        self.of_completions = draw_of_completions(seed) if of_completions is None else of_completions
        self._outage_calls: Counter[tuple[float, str]] = Counter()
        self.outages = draw_of_rewards(seed, self.faults.until_s) if outages is None else outages
        self.commands = draw_of_commands(seed, self.faults.until_s)
        self._steer = Steer()
        self.config = self._with_failures()
        poisoned = rng.randrange(count) if rng.random() < 0.2 else None
        self._prompts = tuple(
            Prompt(prompt_id=f"train/{i}", token_ids=_token_ids(i), info={"poison": i == poisoned})
            for i in range(count)
        )
        self.num_prompts = count * epochs
        self._sampling = Sampling(max_tokens=rng.randint(2, 8), stop_token_ids=(0,))
        # By token ids, which is all that an engine sees. Not those of the held-out prompts.
        killers = self._prompts[-1:] if "killer_prompt" in self.of_completions and count > 2 else ()
        self.killers = {prompt.token_ids for prompt in killers}
        self.killed_s = 0.0
        """When a prompt last ended a generator, which it may do after the faults, though not for ever (P19)."""
        self.quarantine = Quarantine()
        """Outlives every end of the run, as its file does."""
        self.checker = Checker(
            config=self.config,
            brief_outages=lambda: sum(count < STREAK for count in self._outage_calls.values()),
            rewards_fail="bad_reward" in self.faults.kinds or "answer_aborts" in self.of_completions,
            killers=self.killers,
            quarantine=self.quarantine,
            vocab_size=VOCABULARY,
            num_prompts=self.num_prompts,
            windows=max([self.window, *(c.number for c in self.commands if c.what == "window")]),
            promises=Promises(durability=self.config.buffer.durability),
        )
        self._orders: Path | None = None
        """Where rounds of prompts are decided; three seeds of seven have a curriculum."""
        self._segment_bytes = rng.choice((300, 3000, 10**6))
        self.disk: SimulatedDisk | None = None
        self.checkpoint: bytes | None = None
        self._lineage = 0
        self._incarnations = 0
        self._clock_jump_s = 0.0
        self._is_over = False
        self._hosts: dict[str, GeneratorHost] = {}  # by peer
        self._all_hosts: list[GeneratorHost] = []
        self._service: BufferService | None = None

    def _with_failures(self) -> schema.Config:
        """Return the settings: where completions fail or hang, with one of several ways to tolerate it."""
        config, rng = self.config, random.Random(f"redundancy {self.seed}")
        if not self.of_completions:
            return config
        size = rng.randint(2, 4)
        algorithm = msgspec.structs.replace(
            config.algorithm,
            group_size=size,
            min_completions=rng.choice((None, 2)),
            advantage=rng.choice(("grpo", "remax")),
        )
        buffer = msgspec.structs.replace(config.buffer, straggler_factor=rng.choice((0.0, 1.5, 3.0)))
        return msgspec.structs.replace(config, algorithm=algorithm, buffer=buffer)

    @property
    def now(self) -> float:
        return self.loop.time()

    def run(self) -> None:
        self._schedule_faults()
        self.loop.call_later(TICK_S, self._tick)
        with (
            quiet(),
            scaled(),
            reading_checkpoints_of(self),
            folder_in_memory() as folder,
            folder_in_memory() as self._orders,
        ):
            self.disk = SimulatedDisk(folder, self.rng, lambda: self.now)
            self.disk.on_loss = self.checker.promises.lost_what_was_synced
            while (status := self._one_life()) != "done":
                self.note("ended", "driver", status)
                if self.now > self.faults.until_s + FINISH_WITHIN_S:
                    raise Violation("P12 liveness: the run does not finish")
            self._is_over = True
            if sorted(self._record.evaluated) != sorted(self._evals_asked):
                raise Violation(f"P16 evaluations: {self._evals_asked} were asked for, {self._record.evaluated} came")
            self.loop.run_until(self.now + 1.0)
            self.checker.finished(read_history(folder))

    # -- lives ---------------------------------------------------------------------------------------------------------

    def _one_life(self) -> str:
        live_on = False
        try:
            if self._hosts:  # a new learner and a new buffer for generators that saw the end of others
                self.loop.run_until(self.now + self.rng.uniform(0.1, 5.0))
            return self._start().run()
        except (Crash, Killed) as crash:
            live_on = str(crash) != "driver_crash"
            return str(crash)
        except StalledError as error:  # for so long that no fault excuses it
            raise Violation(f"P12 liveness: {error}") from error
        except AsyncGRPOError as error:
            if self.now > max(self.faults.until_s, self.killed_s) + NO_TROUBLE_AFTER_S:
                raise Violation(f"P12 liveness: without a fault for long, the run ends by itself: {error}") from error
            live_on = True
            return f"{type(error).__name__}: {error}"
        finally:
            if self._service is not None and not self._service._finished:
                self._abandon_buffer()
            if not (live_on and "generators_live_on" in self.faults.kinds and self.rng.random() < 0.7):
                self._kill_generators()
            if isinstance(self.loop.failure, Crash):
                self.loop.failure = None

    def _kill_generators(self) -> None:
        for host in self._all_hosts:
            host.kill()
        self._hosts, self._all_hosts, failure, self.loop.failure = {}, [], self.loop.failure, None
        self.loop.run_until(self.now)  # their tasks end; nobody hears from them
        self.loop.failure = failure

    def _start(self) -> LearnerService:
        self._lineage += 1
        state = None if self.checkpoint is None else msgspec.json.decode(self.checkpoint, type=RunState)
        run, rng = self.config.run, self.rng
        assert self._orders is not None
        curriculum = Curriculum(self._orders, is_on=self.seed % 7 < 3)
        source = PromptSource(self._prompts, seed=run.seed, shuffle=True, epochs=run.epochs, curriculum=curriculum)
        if state is not None:
            source.restore(msgspec.convert(state.prompts, PromptState))
        assert self.disk is not None
        began = RunStarted(
            lineage=self._lineage,
            parent=None if state is None else PolicyVersion(state.lineage, state.step),
            compatibility_key={},
            config={},
            policy=self.config.buffer.policy,
            max_lag=self.config.buffer.largest_max_lag,
            max_lag_is_auto=self.max_lag == "auto",
            prompts=source.state(),
        )
        with self.disk.letting_go():
            whole = read_history(self.disk.folder)
            reopened = reopen(
                self.disk.folder,
                began,
                source,
                self.config.buffer,
                clock=lambda: self.now + self._clock_jump_s,
                disk=self.disk,
                segment_bytes=self._segment_bytes,
            )
        buffer = Buffer(
            self.config.buffer,
            self.config.algorithm,
            source,
            self._sampling,
            seed=run.seed,
            lineage=self._lineage,
            journal=reopened.journal,
            quarantine=self.quarantine,
            last_max_lag=reopened.max_lag,
        )
        self._buffer = buffer
        # Before it is written down, which may be the last that this process does.
        # Under `wait` a resume leaves nobody too old, unless a person had raised the bound.
        if self.policy != "wait" or self._steer.max_lag is not None:
            for verdict in reopened.verdicts:
                if verdict.reason == "stale":
                    self.checker.promises.gave_up(verdict.record.lease_id)
        bring_back(buffer, reopened)
        held_out = self._prompts[:2] if self.config.data.eval else ()
        held_out = tuple(msgspec.structs.replace(p, info={}) for p in held_out)
        evaluations = Evaluations(
            held_out, self._sampling, run.seed, self.config.buffer.lease_timeout_s, lineage=self._lineage
        )
        self._service = BufferService(SimpleNamespace(send=self._from_buffer), buffer, evaluations)  # type: ignore[arg-type]
        self.publisher = Publisher(self, rng)
        self._line, self._record = LearnerLine(self.loop, self._from_learner), Silent()
        self._evals_asked: list[int] = []
        step = 0 if state is None else state.step
        self.checker.started(self._lineage, step, buffer, source, whole)
        there = {host.name: host for host in self._hosts.values() if host.is_alive and not host.is_orphan}
        for index in range(self.config.generators.count):
            if (host := there.get(f"generator-{index}")) is not None:
                self.publisher.join_later(host)
                self.fault_counts["generator_lived_on"] += 1
            else:
                self._start_generator(index)
        self._learner = LearnerService(
            self.config,
            Trainer(self, rng),  # type: ignore[arg-type]
            Team(0, 1),
            Inbox(self._line, 300.0, lambda: self.loop.time()),  # type: ignore[arg-type]
            self.publisher,  # type: ignore[arg-type]
            self._record,  # type: ignore[arg-type]
            lineage=self._lineage,
            run_dir=Path("nowhere"),
            start_with=self.config.generators.count,
            last_step=None,
        )
        self._learner._checkpoints = MemoryCheckpoints(self, rng)  # type: ignore[assignment]
        self._learner._writer = AtOnce()
        if state is not None:
            self._learner.resume(Path("memory"))
        self._tell_what_is_asked(self._lineage)
        self.note("start", "driver", self._lineage, self._learner.step)
        return self._learner

    def _start_generator(self, index: int) -> GeneratorHost:
        self._incarnations += 1
        # The first one always completions within the deadline of a lease: without such a one nothing could be trained.
        slow = index > 0 and "slow_node" in self.faults.kinds and self.rng.random() < 0.6
        self.network.slowness[f"generator-{index}"] = 50.0 if slow else 1.0
        pace_s = (
            self.rng.uniform(0.1, 0.5) * self.rng.choice((0.1, 1.0, 4.0 if index > 0 else 1.0)) * (4.0 if slow else 1.0)
        )
        host = GeneratorHost(self, index, self._incarnations, pace_s)
        self._hosts[host.peer] = host
        self._all_hosts.append(host)
        return host

    # -- what nodes call -----------------------------------------------------------------------------------------------

    def note(self, what: str, *details: Any) -> None:
        self.events.append((self.loop.time(), what, details))
        if what in ("drop", "copy", "cut", "corrupt") or what.startswith("fault"):
            self.fault_counts[what if what != "fault" else details[0]] += 1

    def violated(self, problem: str) -> None:
        self.loop.failure = self.loop.failure or Violation(problem)

    def spend(self, seconds: float) -> None:
        self.loop.run_until(self.now + seconds)

    def fate_of(self, completion: PendingCompletion) -> Fate | None:
        drawn = random.Random(f"{self.seed} {completion.request.prompt} {completion.seed}").random()
        for what in ("abort", "hang"):
            drawn -= self.of_completions.get(f"answer_{what}s", 0.0)
            if drawn < 0:
                return what
        return None

    def rewards_are_down(self, generator: str) -> bool:
        strikes = [o for o in self.outages if o.since_s <= self.now < o.until_s and o.generator in ("", generator)]
        self._outage_calls.update((o.since_s, generator) for o in strikes)
        return bool(strikes)

    def generator_ended(self, host: GeneratorHost) -> None:
        """The supervisor tells the buffer, and starts another after a while."""
        if not host.is_orphan:
            self._hosts.pop(host.peer, None)
        life = self._lineage
        self.note("ended", host.peer)

        def tell() -> None:
            if self._lineage == life:
                self._arrive_at_buffer("driver", GeneratorLost(generator_id=host.name))

        def restart() -> None:
            alive = {h.name for h in self._hosts.values() if not h.is_orphan}
            if self._lineage == life and self._service is not None and host.name not in alive:
                self._start_generator(host.index)

        self.loop.call_later(self.rng.uniform(0.1, 1.0), tell)
        self.loop.call_later(self.rng.uniform(1.5, 6.0), restart)

    def to_buffer(self, peer: str, name: str, message: Message, payload: Frame) -> None:
        """A generator says something. Frames of a life that has ended may still arrive in the next."""
        self.network.carry(name, "buffer", message, payload, lambda frames: self._turn((peer, frames)))

    # -- the buffer's process ------------------------------------------------------------------------------------------

    def _turn(self, received: tuple[str, Frames] | None) -> None:
        service = self._service
        if service is None or service._finished:
            return
        try:
            service.turn(received, self.now + self._clock_jump_s)
        except Killed:
            self.note("fault", "disk_killed", "buffer")
            self.checker.ended_in_a_turn()
            self._kill_buffer("disk_death", with_machine=self.rng.random() < 0.5)
        else:
            self.checker.turned(service._unacknowledged)

    def _abandon_buffer(self) -> None:
        self._service = None
        if isinstance(self._buffer.journal, Journal):
            self._buffer.journal._close_file()

    def _kill_buffer(self, why: str, *, with_machine: bool = False) -> None:
        """It ends, its machine perhaps too; after a while somebody notices, and the run ends."""
        assert self.disk is not None
        self._abandon_buffer()
        if with_machine:
            self.checker.promises.power_was_cut(has_holes=self.disk.power_cut())
        self.loop.call_later(self.rng.uniform(0.2, 6.0), self._end_life, self._lineage, why)

    def _tick(self) -> None:
        self._turn(None)
        self.loop.call_later(TICK_S, self._tick)

    def _arrive_at_buffer(self, source: str, message: Message) -> None:
        self.network.carry(source, "buffer", message, b"", lambda frames: self._turn((source, frames)))

    def _from_learner(self, message: Message, payload: Frame) -> None:
        life = self._lineage
        if isinstance(message, RequestEval):
            self._evals_asked.append(message.step)

        def arrive(frames: Frames) -> None:
            if self._lineage == life:
                self._turn(("learner", frames))

        self.network.carry("learner", "buffer", message, payload, arrive)

    def _from_buffer(self, peer: str, message: Message, payload: Frame = b"") -> bool:
        self.checker.sent_by_buffer(message)
        if peer == "learner":
            line = self._line
            self.network.carry("buffer", "learner", message, payload, line.arrive)
            return True
        host = self._hosts.get(peer)
        if isinstance(message, Grant) and self._service is not None:
            steer, is_in_effect = self._steer, self._service.steered == self._steer.revision
            if is_in_effect and (steer.is_paused or peer in steer.leaving):
                raise Violation(f"P27 steered: {message.lease.lease_id} goes to {peer} under {steer}")
        if isinstance(message, Grant) and message.lease.purpose == "train":
            serves = host.engine.version if host is not None and host.is_alive else None
            self.checker.granted(peer, message.lease, serves)
        if host is None or not host.is_alive:
            return False
        self.network.carry("buffer", host.name, message, payload, lambda frames: self._arrive_at(host, frames))
        return True

    def _arrive_at(self, host: GeneratorHost, frames: Frames) -> None:
        try:
            message, _ = decode(frames)
        except AsyncGRPOError:
            pass
        else:
            if isinstance(message, Ack | Nack):
                host.unreplied.discard(message.lease_id)
            elif isinstance(message, Grant):
                host.granted(message.lease.lease_id)
        host.arrive(frames)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        for kind, rate in self.faults.rate.items():
            self._next_fault(kind, rate)
        for command in self.commands:
            self.loop.call_at(command.at_s, self._ask, command)
        self.loop.call_at(self.faults.until_s, self.note, "quiet", "from here on nothing is done to the run")

    def _next_fault(self, kind: str, rate: float) -> None:
        at = self.now + self.rng.expovariate(rate)

        def strike() -> None:
            self._strike(kind)
            self._next_fault(kind, rate)

        if at < self.faults.until_s:
            self.loop.call_at(at, strike)

    def _strike(self, kind: str) -> None:
        if self._is_over:
            return
        assert self.disk is not None
        rng = self.rng
        hosts = [host for host in self._hosts.values() if host.is_alive]
        host = rng.choice(hosts) if hosts else None
        self.note("fault", kind, host.peer if host else "")
        seconds = rng.choice((1.0, 8.0, 25.0, 60.0)) * rng.random()
        if kind == "learner_crash" or kind == "driver_crash":
            self.loop.failure = self.loop.failure or Crash(kind)
        elif kind == "buffer_crash" or kind == "power_cut":
            if self._service is not None:
                self._kill_buffer(kind, with_machine=kind == "power_cut")
        elif kind == "disk_full":
            self.disk.full_until = self.now + seconds
        elif kind == "disk_error":
            self.disk.fails_until = self.now + seconds
        elif kind == "disk_death":
            self.disk.calls_to_live = rng.randint(1, 6)
        elif kind == "bit_flip":
            self.checker.promises.flipped(self.disk.flip(), self._lineage)
        elif kind == "drain":
            self._arrive_at_buffer("driver", Drain(reason="asked to stop"))
        elif kind == "clock_jump":
            self._clock_jump_s += rng.choice((1.0, 20.0, 3600.0))
        elif host is None:
            return
        elif kind == "generator_crash":
            host.kill()
            self.generator_ended(host)
        elif kind == "engine_failure":
            host.may_fail = True
            host.engine.fail_after_tokens = 0
        elif kind == "generator_twice":  # the supervisor cannot reach it, takes it for dead, and starts another
            host.is_orphan = True
            self.generator_ended(host)
        elif kind == "cut":
            self.network.cut(host.name, seconds)
        elif kind == "freeze":
            self.network.freeze(host.name, seconds)
        elif kind == "weights_cut":
            self.publisher.cut_until[host.name] = self.now + seconds

    def _ask(self, command: Command) -> None:
        """A person asks for something. The driver tells buffer and learner until they have heard, so it only takes time."""
        steer = self._steer
        match command.what:
            case "pause" | "resume":
                steer = msgspec.structs.replace(steer, is_paused=command.what == "pause")
            case "bound" if self.max_lag != "auto" and self.policy in WITH_AUTO:
                steer = msgspec.structs.replace(steer, max_lag=command.number)
                self.checker.asked_for(command.number)
            case "window":
                steer = msgspec.structs.replace(steer, groups_in_flight=command.number)
            case "checkpoint":
                checkpoints, evaluations = steer.checkpoints + 1, steer.evaluations + 1  # of the same moment
                steer = msgspec.structs.replace(steer, checkpoints=checkpoints, evaluations=evaluations)
            case "leave" if self._hosts:
                peer = sorted(self._hosts)[command.number % len(self._hosts)]
                leaving = tuple(
                    sorted({peer, *(one for one in steer.leaving if one in self._hosts)})
                )  # who leaves, leaves
                steer = msgspec.structs.replace(steer, leaving=leaving, ending=leaving)
        if steer is not self._steer and not self._is_over:
            self._steer = msgspec.structs.replace(steer, revision=steer.revision + 1)
            self.note("fault", f"person_{command.what}", command.number)
            self.loop.call_later(self.rng.uniform(0.0, 3.0), self._tell_what_is_asked, self._lineage)

    def _tell_what_is_asked(self, life: int) -> None:
        if self._lineage == life and self._service is not None:
            self._service.steer(self._steer)
            self._learner.steer(self._steer)

    def _end_life(self, life: int, why: str) -> None:
        if self._lineage == life and not self._is_over:
            self.loop.failure = self.loop.failure or Crash(why)


def _auto_lag(seed: int) -> schema.AutoLagConfig:
    rng = random.Random(f"auto {seed}")
    return schema.AutoLagConfig(max=rng.choice((2, 4, 8)))


def _token_ids(index: int) -> tuple[int, ...]:
    return index % VOCABULARY, 1, *([2] * (index // VOCABULARY))


def without_faults(seed: int, **settings: Any) -> World:
    """The run of a seed, undisturbed, and with time for its slowest generator."""
    world = World(seed, faults=Faults(until_s=0.0), of_completions={}, outages=(), **settings)
    patient = msgspec.structs.replace(world.config.buffer, lease_timeout_s=1000.0)
    world.config = msgspec.structs.replace(world.config, buffer=patient)
    return world
