"""The processes of a run: the core, which is buffer and learner ranks, the fleet of generators, and the teachers.

The core starts together from the last checkpoint and ends together. A learner that restarts goes back to a checkpoint, and the
buffer's prompts must go back with it. Groups that the buffer had acknowledged are in its journal, so the next core starts with
them.

The fleet is started, watched, restarted and scaled, and gets the endpoints of a new core. A generator that is scaled away
delivers its groups before it leaves.

A teacher is an SGLang server for a `teacher.path`, on GPUs of the run's placement. One that ends or hangs is restarted at the
same address. Until it replies again, rewards pause as in an outage of any service that they ask. A teacher that cannot be
restarted there ends the run.
"""

import contextlib
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import ray

from asyncgrpo import liveness, metrics
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.nodes import environment_to_share
from asyncgrpo.cluster.ray_session import NO_PLACE_S, Actor, Placement, Reference, ended_of, result, results
from asyncgrpo.cluster.wiring import (
    BufferActor,
    BufferReady,
    GeneratorActor,
    LearnerActor,
    Setup,
    TeacherActor,
    incarnation_of,
)
from asyncgrpo.control.client import ProcessStatus
from asyncgrpo.errors import AsyncGRPOError, ProcessLost, StalledError
from asyncgrpo.learner.checkpoints import step_of
from asyncgrpo.recording.events import EventLog
from asyncgrpo.wire.sockets import Client
from asyncgrpo.wire.supervision import Drain, EndpointsChanged, GeneratorLost

log = logging.getLogger(__name__)

# -- the core ----------------------------------------------------------------------------------------------------------

END_S = 5.0
"""How long the processes of a run that is over, or the ranks of a lost learner, may end after each other."""
_OF_A_PEER = re.compile("gloo|NCCL")
"""In the error of a rank that has lost another one."""


@cache
def _in_ray(kind: type, remote: Callable[[type], Any]) -> Any:
    """Return Ray's class of an actor. Ray never forgets one that `remote` has made, so restarts share it."""
    return remote(kind)


NOWHERE = EndpointsChanged(buffer_endpoint="", weights_endpoint="")
"""Sent to generators while no core runs."""


class Core:
    """One core, which is one lineage."""

    def __init__(
        self, setup: Setup, placement: Placement, watch: Watch, on_address: Callable[[str, tuple[str, int]], None]
    ) -> None:
        """
        Args:
            on_address: called with the name of each process and the address of its metrics.
        """
        self.setup, self._placement, self._watch, self._on_address = setup, placement, watch, on_address
        # Read now: newer checkpoints replace this one during training.
        self.first_step = step_of(setup.checkpoint)
        """Step of its checkpoint."""
        environment = environment_to_share()
        self._buffer = _in_ray(BufferActor, ray.remote).options(**placement.here()).remote(environment)
        self._learners = [
            _in_ray(LearnerActor, ray.remote).options(**placement.learner(rank)).remote(environment, rank)
            for rank in range(setup.config.learner.ranks)
        ]
        self._training: list[Reference] = []
        self._serving: Reference = None
        self._control: Client | None = None
        self.endpoints = NOWHERE

    def start(self, while_waiting: Callable[[], None]) -> BufferReady:
        """Start the processes and bind their endpoints. Raises AsyncGRPOError."""
        setup = self.setup
        references = {"buffer": self._buffer.start.remote(setup)}
        references |= {f"learner-{rank}": learner.start.remote(setup) for rank, learner in enumerate(self._learners)}
        began_s, late = time.monotonic(), set[str]()

        def while_starting() -> None:
            while_waiting()
            self._follow_start(references.keys(), time.monotonic() - began_s, late)

        ready, *ranks = results(references, while_starting)
        for name, one in zip(references, (ready, *ranks), strict=True):
            self._on_address(name, one.metrics_address)
        self._leader = ranks[0]
        self._control = Client(ready.endpoint, "driver", setup.keys)
        self.endpoints = EndpointsChanged(buffer_endpoint=ready.endpoint, weights_endpoint=ranks[0].weights_endpoint)
        return ready

    def _follow_start(self, names: Iterable[str], waited_s: float, late: set[str]) -> None:
        """Log once per process if Ray has no resources for it.

        Args:
            late: processes that were logged; extended here.
        Raises:
            StalledError: Ray had no resources for `cluster.stall_timeout_s`, or has lost this node.
        """
        incarnation, stall_s = self.incarnation, self.setup.config.cluster.stall_timeout_s
        if waited_s < min(NO_PLACE_S, stall_s):
            return
        for name in names:
            if self._watch.heartbeat(name, incarnation).pid:
                continue
            if waited_s >= stall_s:
                raise StalledError(f"{self._placement.waits(name, waited_s)} (cluster.stall_timeout_s)")
            if name not in late:
                late.add(name)
                self._placement.require_this_node()
                log.warning(self._placement.waits(name, waited_s))

    def run(self, about: dict[str, Any]) -> None:
        """Start training. `about` has fields of the `start` event."""
        self._serving = self._buffer.run.remote()
        self._training = [
            learner.run.remote(self._leader, self.endpoints.buffer_endpoint, about) for learner in self._learners
        ]

    def status(self) -> str | None:
        """Return how training ended: `done`, `drained` or `failed` (`shut_down` has the reason); None while it runs.

        Raises:
            ProcessLost: a process died or hangs; the core must be restarted.
            StalledError: no step was trained for too long.
            AsyncGRPOError: training failed for good.
        """
        ended = ended_of([*self._training, self._serving])
        done = [rank for rank, reference in enumerate(self._training) if reference in ended]
        statuses = []
        try:
            statuses += [str(result(self._training[rank], f"learner-{rank}")) for rank in done]
        except ProcessLost as loss:
            if not loss.is_error:
                raise
        if len(statuses) < len(done):
            raise self._cause()
        if len(done) == len(self._training):
            return statuses[0]
        if self._serving in ended:
            result(self._serving, "buffer")
            if not ray.wait(self._training, timeout=END_S)[0]:
                raise ProcessLost("buffer: it ended before the learner")
        self._check_heartbeats()
        return None

    def _cause(self) -> ProcessLost:
        """Return the loss of the rank that was lost first. The others report that it is gone, often sooner than Ray does.

        Raises AsyncGRPOError: a rank reported what a replacement would meet, too.
        """
        ended, _ = ray.wait(self._training, num_returns=len(self._training), timeout=END_S)
        losses = []
        for rank, reference in enumerate(self._training):
            if reference in ended:
                try:
                    result(reference, f"learner-{rank}")
                except ProcessLost as loss:
                    losses.append(loss)
        return min(losses, key=lambda loss: (loss.is_error, bool(_OF_A_PEER.search(str(loss)))))

    def is_over(self) -> bool:
        """Return True if the buffer has ended, as it does once the run is over and the generators are told to end.

        A generator may have ended before. Waits up to `END_S`.
        """
        return self._serving is not None and bool(ray.wait([self._serving], timeout=END_S)[0])

    def _check_heartbeats(self) -> None:
        cluster, incarnation = self.setup.config.cluster, self.incarnation
        silent_s, learners = cluster.silent_timeout_s, [f"learner-{rank}" for rank in range(len(self._learners))]
        # A step of the learner may take long; only `stall_timeout_s` limits it.
        for name, still_s in {"buffer": silent_s, **dict.fromkeys(learners, math.inf)}.items():
            if reason := self._watch.unhealthy_reason(name, incarnation, silent_s=silent_s, still_s=still_s):
                raise ProcessLost(f"{name}: {reason}")
        stall_s = cluster.stall_timeout_s
        for name in learners:
            if reason := self._watch.unhealthy_reason(name, incarnation, silent_s=math.inf, still_s=stall_s):
                raise StalledError(f"{name}: {reason} (cluster.stall_timeout_s)")

    @property
    def incarnation(self) -> str:
        return str(self.setup.lineage)

    @property
    def is_training(self) -> bool:
        return bool(self._training)

    @property
    def steps_done(self) -> int | None:
        """Optimizer steps that the learner has reported; None before the first."""
        return self._watch.heartbeat("learner-0", self.incarnation).step

    @property
    def can_save(self) -> bool:
        """True if all learner ranks and the buffer run: a checkpoint needs each of them."""
        return self.is_training and not ended_of([*self._training, self._serving])

    def drain(self, reason: str, *, is_failure: bool = False) -> None:
        """Ask buffer and learner to finish the current step, write a checkpoint and exit."""
        if self._control is not None:
            self._control.send(Drain(reason=reason, is_failure=is_failure))

    def generator_lost(self, name: str, incarnation: str) -> None:
        """Notify buffer and learner of a lost generator: its leases are freed, and no publication waits for it."""
        message = GeneratorLost(generator_id=name, incarnation=incarnation)
        if self._control is not None:
            self._control.send(message)
        self._watch.send("learner-0", message)

    def shut_down(self, timeout_s: float) -> None:
        """Wait for the buffer to exit. Raises AsyncGRPOError if it failed."""
        if ray.wait([self._serving], timeout=timeout_s)[0]:
            with contextlib.suppress(ProcessLost):  # after training the buffer may die
                result(self._serving, "buffer")

    def end(self) -> None:
        """Kill all processes."""
        if self._control is not None:
            self._control.close()
            self._control = None
        for actor in (self._buffer, *self._learners):
            ray.kill(actor)


# -- the limits on restarts --------------------------------------------------------------------------------------------


class Budget:
    """The limits on restarts of one process: within an hour, and of starts in a row that never served."""

    def __init__(self, name: str, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._allowed, self._clock = name, allowed, clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Restarts so far."""
        self.failed_starts = 0
        """Starts in a row that ended before the process served."""

    def spend(self, reason: str) -> int:
        """Count a restart and return the total. Raises AsyncGRPOError above the limit."""
        now = self._clock()
        while self._recent and now - self._recent[0] > liveness.RESTART_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._allowed:
            raise AsyncGRPOError(
                f"{self._name} ended {len(self._recent) + 1} times within an hour "
                f"({self._allowed} restarts are allowed); the last time: {reason}"
            )
        self._recent.append(now)
        self.count += 1
        return self.count

    def backoff_s(self, reason: str, *, has_served: bool) -> float:
        """Count the end of a process that serves an engine, and return the seconds until its next start.

        Args:
            has_served: of the start that ended.
        Raises:
            AsyncGRPOError: it may not start again.
        """
        self.failed_starts = 0 if has_served else self.failed_starts + 1
        if self.failed_starts >= liveness.FAILED_STARTS:
            raise AsyncGRPOError(
                f"{self._name} ended {liveness.FAILED_STARTS} times before its engine served anything; the last time: {reason}"
            )
        count = self.spend(reason)
        log.warning("%s ended (%s); restart %d", self._name, reason, count)
        return liveness.BACKOFF_S[self.failed_starts]

    @property
    def spent(self) -> float:
        """Share of the limit used in the last hour, 0 to 1. Any thread may read it."""
        since = self._clock() - liveness.RESTART_WINDOW_S
        return sum(at >= since for at in tuple(self._recent)) / max(self._allowed, 1)


# -- processes that restart one by one ---------------------------------------------------------------------------------

EXITED = "it exited"


@dataclass
class Started:
    """One incarnation of a process. Ray ends an actor without a handle, so this keeps it."""

    actor: Actor
    incarnation: str
    address: Reference
    """Result of `start`. None once `start` has ended."""
    running: Reference
    """Result of `run`, when it ends. After a failed `start` it has none."""
    requested_s: float
    end: str = ""
    """Reason why `start` or `run` ended; empty: it serves, or starts."""
    is_late: bool = False
    """True once a late start was logged."""
    is_leaving: bool = False
    """True once it was asked to leave."""
    missed_s: float | None = None
    """Time since which another process has lost it; None: it is not lost."""

    @property
    def awaited(self) -> Reference:
        """Result that comes next."""
        return self.running if self.address is None else self.address


class Supervised:
    """All processes of one role, each of which is started, watched and restarted on its own."""

    role: str

    def __init__(
        self,
        setup: Setup,
        placement: Placement,
        watch: Watch,
        events: EventLog,
        *,
        count: int,
        on_address: Callable[[str, tuple[str, int] | None], None],
    ) -> None:
        """
        Args:
            on_address: called with a name and the address of its metrics; None when it has left.
        """
        self._setup, self._placement, self._watch = setup, placement, watch
        self._events, self._on_address = events, on_address
        self._running: dict[int, Started] = {}
        self._due: dict[int, float] = {}
        self._ended_by: dict[int, str] = {}
        """Reason why the previous incarnation ended, for processes that are due."""
        self._starts: Counter[int] = Counter()
        self._budgets: dict[int, Budget] = {}
        self._may_start = True
        metrics.restarts_spent_ratio.labels(of=self.role).set_function(
            lambda: max((budget.spent for budget in tuple(self._budgets.values())), default=0.0)  # by a scrape's thread
        )
        self.scale(count)

    def scale(self, count: int) -> None:
        """Run `count` processes, those with the lowest numbers."""
        self.wanted = count
        self._due = {index: due for index, due in self._due.items() if index < count}
        for index in range(count):
            self._budgets.setdefault(index, Budget(self._name(index), self._setup.config.generators.restarts))
            if index not in self._running:
                self._due.setdefault(index, 0.0)
        for index, process in self._running.items():
            process.is_leaving |= index >= count

    def processes(self) -> Iterator[ProcessStatus]:
        """Yield the status of every process that runs or is wanted."""
        for index in sorted({*self._running, *range(self.wanted)}):
            process, restarts = self._running.get(index), self._budgets[index].count
            incarnation, is_leaving = (process.incarnation, process.is_leaving) if process is not None else ("", False)
            yield self._watch.status(self._name(index), incarnation, restarts=restarts, is_leaving=is_leaving)

    @property
    def all_serve(self) -> bool:
        """True if every process that is wanted serves."""
        return len(self._running) == self.wanted and all(map(self._serves, self._running))

    def reconcile(self, *, may_restart: bool = True) -> None:
        """End processes that hang or failed, and start those that are due.

        Raises:
            AsyncGRPOError: one has ended too often, or cannot be replaced.
        """
        ended = ended_of(process.awaited for process in self._running.values())
        for index, process in list(self._running.items()):
            if process.awaited in ended:
                self._take(index, process)
            elif process.address is not None:
                self._report_late(index, process)
            if reason := self._unhealthy_reason(index, process):
                self._ended(index, process, reason, may_restart)
        if may_restart and self._may_start:
            self._start_due()

    def _name(self, index: int) -> str:
        return f"{self.role}-{index}"

    def _serves(self, index: int) -> bool:
        """Return True if this process runs and its engine serves."""
        process = self._running.get(index)
        return process is not None and self._watch.has_begun(self._name(index), process.incarnation)

    def _take(self, index: int, process: Started) -> None:
        """Take in the result of `start` or `run`, or the reason why it failed."""
        is_start = process.address is not None
        try:
            found = result(process.awaited, self._name(index))
        except AsyncGRPOError as error:
            process.end = in_a_line(error, self._name(index))
        else:
            if is_start:
                self._has_started(index, found)
            else:
                process.end = EXITED
        process.address = None

    def _report_late(self, index: int, process: Started) -> None:
        """Log once if Ray has no resources for a process."""
        if not process.is_late and time.monotonic() - process.requested_s > NO_PLACE_S:
            process.is_late = True
            log.warning("%s; the others go on", self._placement.waits(self._name(index), NO_PLACE_S))

    def _unhealthy_reason(self, index: int, process: Started) -> str | None:
        """Return the reason to replace a process; None if it is healthy. Raises AsyncGRPOError if none can replace it."""
        limit_s = self._setup.config.cluster.silent_timeout_s
        return process.end or self._watch.unhealthy_reason(
            self._name(index), process.incarnation, silent_s=limit_s, still_s=limit_s
        )

    def _start_due(self) -> None:
        for index in [index for index, due in self._due.items() if time.monotonic() >= due]:
            del self._due[index]
            start = self._starts[index]
            self._starts[index] += 1
            actor, address = self._launch(index, start)
            incarnation, running = incarnation_of(self._setup, start), actor.run.remote()
            self._running[index] = Started(actor, incarnation, address, running, time.monotonic())
            if (reason := self._ended_by.pop(index, None)) is not None:
                self._events.write("restart", actor=self._name(index), reason=reason, count=self._budgets[index].count)
                metrics.actor_restarts_total.labels(actor=self.role).inc()

    def _ended(self, index: int, process: Started, reason: str, may_restart: bool) -> None:
        has_served = self._serves(index)
        del self._running[index]
        ray.kill(process.actor)
        self._watch.forget(self._name(index))
        if may_restart:
            self._due[index] = time.monotonic() + self._budgets[index].backoff_s(reason, has_served=has_served)
            self._ended_by[index] = reason

    def _launch(self, index: int, start: int) -> tuple[Actor, Reference]:
        """Create an actor and call its `start`. Return the actor and the reference to the result."""
        raise NotImplementedError

    def _has_started(self, index: int, found: Any) -> None:
        """Take in the result of `start`."""
        raise NotImplementedError


# -- the fleet ---------------------------------------------------------------------------------------------------------


class Fleet(Supervised):
    """All generators of a run."""

    role = "generator"
    _core: Core | None = None
    _endpoints = NOWHERE
    _missing: Mapping[str, str] = MappingProxyType({})
    """Generators that another process has lost, with its name."""

    def scale(self, count: int) -> None:
        """Run `count` generators, those with the lowest numbers."""
        metrics.generators_expected.set(count)
        super().scale(count)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Generators that leave, as `name-incarnation`. One that is wanted again leaves before it restarts."""
        return tuple(f"{self._name(i)}-{g.incarnation}" for i, g in sorted(self._running.items()) if g.is_leaving)

    @property
    def is_up(self) -> bool:
        """True if at least one engine serves."""
        return any(map(self._serves, self._running))

    @property
    def is_whole(self) -> bool:
        """True if every engine serves the current core."""
        return self._core is not None and self.all_serve and all(map(self._has_endpoints, self._running))

    def may_lose(self, name: str) -> bool:
        """True if the run survives the end of this generator: its engine serves, or its start may fail once more."""
        index = int(name.rpartition("-")[2])
        return self._serves(index) or self._budgets[index].failed_starts + 1 < liveness.FAILED_STARTS

    def work_for(self, core: Core, endpoints: EndpointsChanged) -> None:
        """Connect all generators to `core`, at these endpoints."""
        self._core, self._endpoints, self._may_start = core, endpoints, True

    def leave(self) -> None:
        """Start no generator until the next `work_for`: the core is gone."""
        self._core, self._endpoints, self._may_start = None, NOWHERE, False
        self.scale(self.wanted)  # the next core replaces generators that ended with this one

    def reconcile(self, *, may_restart: bool = True) -> None:
        """End generators that hang, start those that are due, and send the others the endpoints of the core.

        Before the first core they start beside it, since loading an engine takes longer than starting the core.

        Raises:
            AsyncGRPOError: a generator has ended too often.
        """
        self._missing = self._watch.missing()
        super().reconcile(may_restart=may_restart)
        if self._core is None:
            return
        for index in self._running:
            if not self._has_endpoints(index):
                self._watch.send(self._name(index), self._endpoints)

    def _has_endpoints(self, index: int) -> bool:
        """Return True if this generator works for the current core."""
        heartbeat = self._watch.heartbeat(self._name(index), self._running[index].incarnation)
        return heartbeat.buffer_endpoint == self._endpoints.buffer_endpoint

    def shut_down(self, timeout_s: float) -> None:
        """Wait for the generators that serve to exit. One that still loads its engine holds no group."""
        references = [generator.running for index, generator in self._running.items() if self._serves(index)]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)

    def _launch(self, index: int, start: int) -> tuple[Actor, Reference]:
        environment = environment_to_share(self._setup.config.reward.judge.api_key_env)
        options = self._placement.generator(index)
        actor = _in_ray(GeneratorActor, ray.remote).options(**options).remote(environment, self._setup, index, start)
        return actor, actor.start.remote(self._endpoints)

    def _has_started(self, index: int, found: tuple[str, int]) -> None:
        self._on_address(self._name(index), found)

    def _unhealthy_reason(self, index: int, generator: Started) -> str | None:
        if generator.is_leaving and not self._serves(index):
            return "it is no longer wanted"
        if reason := super()._unhealthy_reason(index, generator):
            return reason
        name, limit_s = self._name(index), self._setup.config.cluster.silent_timeout_s
        witness = self._missing.get(f"{name}-{generator.incarnation}")
        if witness is None:
            generator.missed_s = None
            return None
        if reason := self._watch.unhealthy_reason(
            name, generator.incarnation, silent_s=liveness.SUSPECT_S, still_s=limit_s
        ):
            return f"{reason}, and {witness} has lost it too"
        now_s = time.monotonic()
        generator.missed_s = now_s if generator.missed_s is None else generator.missed_s
        if now_s - generator.missed_s > limit_s:  # one of its threads hangs while another sends heartbeats
            return f"{witness} has had no contact with it for {now_s - generator.missed_s:.0f} s"
        return None

    def _ended(self, index: int, generator: Started, reason: str, may_restart: bool) -> None:
        name, is_leaving, core = self._name(index), generator.is_leaving, self._core
        is_over = reason == EXITED and not is_leaving and core is not None and core.is_over()
        if core is not None:
            core.generator_lost(name, generator.incarnation)
        super()._ended(index, generator, reason, may_restart and not is_leaving and not is_over)
        if is_leaving:
            log.info("%s has left", name)
            self._on_address(name, None)
            self._placement.release_generator(index)
            if index < self.wanted:  # again
                self._due[index] = 0.0


# -- the teachers ------------------------------------------------------------------------------------------------------


class Teachers(Supervised):
    """All teachers that a run starts; often none."""

    role = "teacher"

    def start(self) -> None:
        """Start a process for each teacher. Their servers load meanwhile, until `all_serve`.

        Raises:
            AsyncGRPOError: a process cannot be started.
        """
        self._addresses: dict[int, tuple[str, int]] = {}
        self._start_due()
        references = {self._name(index): teacher.address for index, teacher in self._running.items()}
        for index, found in enumerate(results(references, while_waiting=self._watch.listen)):
            self._has_started(index, found)

    @property
    def urls(self) -> dict[str, str]:
        """URLs of the servers by data_source."""
        return {self._source(index): f"http://{host}:{port}" for index, (host, port) in self._addresses.items()}

    def end(self) -> None:
        """Kill all servers."""
        for teacher in self._running.values():
            ray.kill(teacher.actor)
        self._running.clear()

    def _source(self, index: int) -> str:
        return list(self._setup.config.teacher.own)[index]

    def _launch(self, index: int, start: int) -> tuple[Actor, Reference]:
        options, arguments = self._placement.teacher(index), (self._setup, self._source(index), index, start)
        actor = _in_ray(TeacherActor, ray.remote).options(**options).remote(environment_to_share(), *arguments)
        _, port = self._addresses.get(index, ("", 0))
        return actor, actor.start.remote(port)

    def _has_started(self, index: int, found: tuple[tuple[str, int], tuple[str, int]]) -> None:
        address, exported = found
        before = self._addresses.setdefault(index, address)
        if address != before:
            raise AsyncGRPOError(
                f"{self._name(index)} is lost with its node {before[0]}; the same command starts it on another one"
            )
        self._on_address(self._name(index), exported)

    def _unhealthy_reason(self, index: int, teacher: Started) -> str | None:
        stall_s = self._setup.config.cluster.stall_timeout_s
        reason = super()._unhealthy_reason(index, teacher)
        if reason is None and not self._serves(index) and time.monotonic() - teacher.requested_s > stall_s:
            raise StalledError(
                f"{self._name(index)} did not load its model within {stall_s:.0f} s (cluster.stall_timeout_s)"
            )
        return reason


def in_a_line(error: AsyncGRPOError, name: str) -> str:
    """Return the error that ended a process as one line."""
    if isinstance(error, ProcessLost):
        return str(error).removeprefix(f"{name}: ")
    return str(error).strip().splitlines()[-1][:300]
