"""The core: buffer and learner ranks, started together from the last checkpoint and ended together.

A learner that restarts goes back to a checkpoint, and the buffer's prompts must go back with it. Groups that the buffer had
acknowledged are in its journal, so the next core starts with them.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import ray

from asyncgrpo import liveness
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.nodes import environment_to_share
from asyncgrpo.cluster.ray_session import NO_PLACE_S, Placement, Reference, has_ended, result, results
from asyncgrpo.cluster.wiring import BufferActor, BufferReady, LearnerActor, LearnerReady, Setup
from asyncgrpo.errors import AsyncGRPOError, ProcessLost, StalledError
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.wire.sockets import Client
from asyncgrpo.wire.supervision import Drain, EndpointsChanged, GeneratorLost

log = logging.getLogger(__name__)


class Core:
    """One core, which is one lineage."""

    def __init__(self, setup: Setup, placement: Placement, watch: Watch) -> None:
        self.setup, self._placement, self._watch = setup, placement, watch
        # Read now: newer checkpoints replace this one during training.
        self.first_step = read_state(setup.checkpoint).step if setup.checkpoint is not None else 0
        """Step of its checkpoint."""
        environment = environment_to_share()
        self._buffer = ray.remote(BufferActor).options(**placement.here()).remote(environment)
        self._learners = [
            ray.remote(LearnerActor).options(**placement.learner(rank)).remote(environment, rank)
            for rank in range(setup.config.learner.ranks)
        ]
        self._training: list[Reference] = []
        self._began_s: float | None = None
        self._serving: Reference = None
        self._control: Client | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        """Addresses of the metrics of its processes, by name."""
        self.endpoints = EndpointsChanged(buffer_endpoint="", weights_endpoint="")
        """Endpoints for the generators; empty before the start."""

    def start(self, while_waiting: Callable[[], None]) -> tuple[BufferReady, list[LearnerReady]]:
        """Start the processes and bind their endpoints. Raises AsyncGRPOError."""
        setup = self.setup
        references = {"buffer": self._buffer.start.remote(setup)}
        references |= {f"learner-{rank}": learner.start.remote(setup) for rank, learner in enumerate(self._learners)}
        began_s, late = time.monotonic(), set[str]()

        def while_starting() -> None:
            while_waiting()
            self._follow_start(references.keys(), time.monotonic() - began_s, late)

        ready, *leaders = results(references, while_starting)
        self.addresses = {f"learner-{i}": leader.metrics_address for i, leader in enumerate(leaders)}
        self.addresses["buffer"] = ready.metrics_address
        self._control = Client(ready.endpoint, "driver", setup.keys)
        self.endpoints = EndpointsChanged(buffer_endpoint=ready.endpoint, weights_endpoint=leaders[0].weights_endpoint)
        return ready, leaders

    def _follow_start(self, names: Iterable[str], waited_s: float, late: set[str]) -> None:
        """Log once per process if Ray has no resources for it.

        Args:
            late: processes that were logged; extended here.
        Raises:
            StalledError: Ray had no resources for `cluster.stall_timeout_s`.
        """
        incarnation, stall_s = self.incarnation, self.setup.config.cluster.stall_timeout_s
        if waited_s < min(NO_PLACE_S, stall_s):
            return
        for name in names:
            if self._watch.has_heard(name, incarnation):
                continue
            if waited_s >= stall_s:
                raise StalledError(f"{self._placement.waits(name, waited_s)} (cluster.stall_timeout_s)")
            if name not in late:
                late.add(name)
                log.warning(self._placement.waits(name, waited_s))

    def run(self, leader: LearnerReady, about: dict[str, Any]) -> None:
        """Start training.

        Args:
            about: fields of the `start` event.
        """
        self._began_s = time.monotonic()
        self._serving = self._buffer.run.remote()
        self._training = [
            learner.run.remote(leader, self.endpoints.buffer_endpoint, about) for learner in self._learners
        ]

    def status(self) -> str | None:
        """Return how training ended: `done`, `drained` or `failed` (`shut_down` has the reason); None while it runs.

        Raises:
            ProcessLost: a process died or hangs; the core must be restarted.
            StalledError: no step was trained for too long.
            AsyncGRPOError: training failed for good.
        """
        done = [rank for rank, reference in enumerate(self._training) if has_ended(reference)]
        statuses = [str(result(self._training[rank], f"learner-{rank}")) for rank in done]
        if len(done) == len(self._training):
            return statuses[0]
        if has_ended(self._serving):
            result(self._serving, "buffer")
            if not ray.wait(self._training, timeout=5.0)[0]:
                raise ProcessLost("buffer: it ended before the learner")
        self._check_heartbeats()
        return None

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
        """Incarnation of its processes: the lineage."""
        return str(self.setup.lineage)

    @property
    def seconds(self) -> float:
        """Seconds since training started; 0 before."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    @property
    def steps_done(self) -> int | None:
        """Optimizer steps that the learner has reported; None before the first."""
        return self._watch.step("learner-0", self.incarnation)

    @property
    def can_save(self) -> bool:
        """True if all learner ranks and the buffer run: a checkpoint needs each of them."""
        return bool(self._training) and not any(map(has_ended, [*self._training, self._serving]))

    def drain(self, reason: str, *, is_failure: bool = False) -> None:
        """Ask buffer and learner to finish the current step, write a checkpoint and exit.

        Args:
            is_failure: True if the run has failed.
        """
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


# -- the limit on restarts ---------------------------------------------------------------------------------------------


class Budget:
    """A limit on restarts within an hour."""

    def __init__(self, name: str, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            allowed: restarts in any hour.
        """
        self._name = name
        self._allowed = allowed
        self._clock = clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Restarts so far."""

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

    @property
    def spent(self) -> float:
        """Share of the limit used in the last hour, 0 to 1. Any thread may read it."""
        since = self._clock() - liveness.RESTART_WINDOW_S
        return sum(at >= since for at in tuple(self._recent)) / max(self._allowed, 1)
