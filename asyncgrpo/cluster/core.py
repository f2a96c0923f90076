"""The buffer and the ranks of the learner: one gang, started together from the last checkpoint, and ended together.

Neither is of use without the other: a learner that starts again goes back to a checkpoint, and the buffer's prompts with
it. What the buffer had acknowledged is in its journal, so the next gang begins with the groups that this one had. A gang
may stand by: its processes are there and have imported everything before they are told for whom they work.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray

from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.ray_session import Placement, has_ended, result, results
from asyncgrpo.cluster.wiring import BufferActor, BufferReady, LearnerActor, LearnerReady, Setup, uses_cuda
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import AsyncGRPOError, ProcessLost, StalledError
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.wire.sockets import Client
from asyncgrpo.wire.supervision import Drain, EndpointsChanged, GeneratorLost

# -- how often something may be started again --------------------------------------------------------------------------


WINDOW_S = 3600.0


class Budget:
    """Restarts of one thing."""

    def __init__(self, name: str, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            allowed: restarts within any hour.
        """
        self._name = name
        self._allowed = allowed
        self._clock = clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Of all times."""

    def spend(self, reason: str) -> int:
        """One more restart; returns their count. Raises AsyncGRPOError when that is one too many."""
        now = self._clock()
        while self._recent and now - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._allowed:
            raise AsyncGRPOError(
                f"{self._name} ended {len(self._recent) + 1} times within an hour "
                f"({self._allowed} restarts are allowed); the last time: {reason}"
            )
        self._recent.append(now)
        self.count += 1
        return self.count


# -- the gang ----------------------------------------------------------------------------------------------------------


class Core:
    """One gang. It works once it knows for which lineage."""

    setup: Setup
    first_step: int
    """Of the checkpoint that it starts from."""

    def __init__(self, ranks: int, placement: Placement, watch: Watch) -> None:
        self._watch = watch
        self._buffer = ray.remote(BufferActor).options(**placement.anywhere()).remote()
        self._learners = [
            ray.remote(LearnerActor).options(**placement.learner(rank)).remote(rank) for rank in range(ranks)
        ]
        self._training: list[Any] = []
        self._began_s: float | None = None
        self._serving: Any = None
        self._control: Client | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        """Of the metrics of its processes."""
        self.endpoints = EndpointsChanged(buffer_endpoint="", weights_endpoint="")
        """What a generator must know to work for it, once it has started."""

    def warm_up(self) -> None:
        """Import now what takes seconds later."""
        for actor in (self._buffer, *self._learners):
            actor.warm_up.remote()

    def assign(self, setup: Setup) -> None:
        """This is what it works on."""
        self.setup = setup
        # Read now: newer checkpoints replace this one while the core trains.
        self.first_step = read_state(setup.checkpoint).step if setup.checkpoint is not None else 0

    def start(self, while_waiting: Callable[[], None]) -> tuple[BufferReady, list[LearnerReady]]:
        """Bind everything that others connect to. Raises AsyncGRPOError."""
        setup = self.setup
        references = {"buffer": self._buffer.start.remote(setup)}
        references |= {f"learner-{rank}": learner.start.remote(setup) for rank, learner in enumerate(self._learners)}
        ready, *leaders = results(references, while_waiting)
        self.addresses = {f"learner-{i}": leader.metrics_address for i, leader in enumerate(leaders)}
        self.addresses["buffer"] = ready.metrics_address
        self._control = Client(ready.endpoint, "driver", setup.keys)
        self.endpoints = EndpointsChanged(buffer_endpoint=ready.endpoint, weights_endpoint=leaders[0].weights_endpoint)
        return ready, leaders

    def run(self, leader: LearnerReady, about: dict[str, Any]) -> None:
        """Begin to train.

        Args:
            about: the run in numbers, for its first event.
        """
        self._began_s = time.monotonic()
        self._serving = self._buffer.run.remote()
        self._training = [
            learner.run.remote(leader, self.endpoints.buffer_endpoint, about) for learner in self._learners
        ]

    def status(self) -> str | None:
        """How training ended, `done`, `drained` or `failed` (`farewell` says why), or None while it goes on.

        Raises:
            ProcessLost: a process died or hangs; the others are of no use either.
            StalledError: nothing was trained for too long.
            AsyncGRPOError: what ended training for good.
        """
        done = [rank for rank, reference in enumerate(self._training) if has_ended(reference)]
        statuses = [str(result(self._training[rank], f"learner-{rank}")) for rank in done]
        if len(done) == len(self._training):
            return statuses[0]
        if has_ended(self._serving):
            result(self._serving, "buffer")
            if not ray.wait(self._training, timeout=5.0)[0]:
                raise ProcessLost("buffer: it ended before the learner")
        self._check_signs_of_life()
        return None

    def _check_signs_of_life(self) -> None:
        cluster, incarnation = self.setup.config.cluster, str(self.setup.lineage)
        silent_s, learners = cluster.silent_timeout_s, [f"learner-{rank}" for rank in range(len(self._learners))]
        # A step of the learner may take long; what ends that wait is the limit on the whole run's progress.
        for name, still_s in {"buffer": silent_s, **dict.fromkeys(learners, math.inf)}.items():
            unhealthy_reason = self._watch.unhealthy_reason(name, incarnation, silent_s=silent_s, still_s=still_s)
            if unhealthy_reason is not None:
                raise ProcessLost(f"{name}: {unhealthy_reason}")
        for name in learners:
            unhealthy_reason = self._watch.unhealthy_reason(
                name, incarnation, silent_s=math.inf, still_s=cluster.stall_timeout_s
            )
            if unhealthy_reason is not None:
                raise StalledError(f"{name}: {unhealthy_reason} (cluster.stall_timeout_s)")

    @property
    def seconds(self) -> float:
        """Since it began to train."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    @property
    def steps_done(self) -> int | None:
        """Optimizer steps that the learner has said it has done."""
        return self._watch.step("learner-0", str(self.setup.lineage))

    @property
    def can_save(self) -> bool:
        """Whether every rank of the learner is at work, and the buffer without which there is no checkpoint."""
        return bool(self._training) and not any(map(has_ended, [*self._training, self._serving]))

    def drain(self, reason: str, *, is_failure: bool = False) -> None:
        """Ask for an end in order.

        Args:
            is_failure: the run is given up.
        """
        if self._control is not None:
            self._control.send(Drain(reason=reason, is_failure=is_failure))

    def generator_lost(self, name: str, incarnation: str) -> None:
        """Its leases are free at once, and no publication waits for it."""
        message = GeneratorLost(generator_id=name, incarnation=incarnation)
        if self._control is not None:
            self._control.send(message)
        self._watch.tell("learner-0", message)

    def shut_down(self, timeout_s: float) -> None:
        """Wait for the buffer to end by itself. Raises AsyncGRPOError: it could not go on."""
        if ray.wait([self._serving], timeout=timeout_s)[0]:
            with contextlib.suppress(ProcessLost):  # training is over: it may die
                result(self._serving, "buffer")

    def end(self) -> None:
        """Kill what still lives."""
        if self._control is not None:
            self._control.close()
            self._control = None
        for actor in (self._buffer, *self._learners):
            ray.kill(actor)


class Cores:
    """Makes one core after another. While one trains the next may stand by, where it needs no GPU for that."""

    def __init__(self, config: Config, placement: Placement, watch: Watch) -> None:
        self._placement = placement
        self._watch = watch
        self._ranks = config.learner.ranks
        self._after_s = None if uses_cuda(config) else config.cluster.standby_after_s
        self._standby: Core | None = None

    def next(self, setup: Setup) -> Core:
        """For a new lineage: the one that stands by, or else a new one."""
        core, self._standby = self._standby or self._make(), None
        core.assign(setup)
        return core

    def reconcile(self, core: Core) -> None:
        """While `core` trains."""
        if self._standby is None and self._after_s is not None and core.seconds >= self._after_s:
            self._standby = self._make()
            self._standby.warm_up()

    def end(self) -> None:
        """None is wanted any more."""
        if self._standby is not None:
            self._standby.end()
            self._standby = None

    def _make(self) -> Core:
        return Core(self._ranks, self._placement, self._watch)
