"""The buffer and the ranks of the learner: one gang, started together from the last checkpoint, and ended together.

Neither is of use without the other: a learner that starts again goes back to a checkpoint, and the buffer's prompts with
it. What the buffer had acknowledged is in its journal, so the next gang begins with the groups that this one had.
"""

import math
from collections.abc import Callable
from typing import Any

import ray

from asyncgrpo.cluster.actors import BufferActor, BufferReady, LearnerActor, LearnerReady, Setup
from asyncgrpo.cluster.placement import Placement
from asyncgrpo.cluster.pulse import Watch
from asyncgrpo.cluster.results import has_ended, result, results
from asyncgrpo.errors import ProcessLost, StalledError
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.wire.messages import Drain, GeneratorLost, Moved
from asyncgrpo.wire.sockets import Client


class Core:
    """One gang, of one lineage."""

    def __init__(self, setup: Setup, placement: Placement, watch: Watch) -> None:
        self.setup = setup
        self._watch = watch
        self._buffer = ray.remote(BufferActor).options(**placement.anywhere()).remote(setup)
        self._learners = [
            ray.remote(LearnerActor).options(**placement.learner(rank)).remote(setup, rank)
            for rank in range(setup.config.learner.ranks)
        ]
        # Read now: newer checkpoints replace this one while the core trains.
        self.first_step = read_state(setup.checkpoint).step if setup.checkpoint is not None else 0
        self._training: list[Any] = []
        self._serving: Any = None
        self._control: Client | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        """Of the metrics of its processes."""
        self.home = Moved(buffer_endpoint="", weights_endpoint="")
        """What a generator must know to work for it, once it has started."""

    def start(self, while_waiting: Callable[[], None]) -> tuple[BufferReady, list[LearnerReady]]:
        """Bind everything that others connect to. Raises AsyncGRPOError."""
        references = {"buffer": self._buffer.start.remote()}
        references |= {f"learner-{rank}": learner.start.remote() for rank, learner in enumerate(self._learners)}
        ready, *leaders = results(references, while_waiting)
        self.addresses = {f"learner-{i}": leader.metrics_address for i, leader in enumerate(leaders)}
        self.addresses["buffer"] = ready.metrics_address
        self._control = Client(ready.endpoint, "driver", self.setup.keys)
        self.home = Moved(buffer_endpoint=ready.endpoint, weights_endpoint=leaders[0].weights_endpoint)
        return ready, leaders

    def run(self, leader: LearnerReady, about: dict[str, Any]) -> None:
        """Begin to train.

        Args:
            about: the run in numbers, for its first event.
        """
        self._serving = self._buffer.run.remote()
        self._training = [learner.run.remote(leader, self.home.buffer_endpoint, about) for learner in self._learners]

    def status(self) -> str | None:
        """How training ended, `done` or `drained`, or None while it goes on.

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
            ailment = self._watch.ailment(name, incarnation, silent_s=silent_s, still_s=still_s)
            if ailment is not None:
                raise ProcessLost(f"{name}: {ailment}")
        for name in learners:
            ailment = self._watch.ailment(name, incarnation, silent_s=math.inf, still_s=cluster.stall_timeout_s)
            if ailment is not None:
                raise StalledError(f"{name}: {ailment} (cluster.stall_timeout_s)")

    @property
    def steps_done(self) -> int | None:
        """Optimizer steps that the learner has said it has done."""
        return self._watch.step("learner-0", str(self.setup.lineage))

    def drain(self, reason: str) -> None:
        """Ask for an end in order."""
        if self._control is not None:
            self._control.send(Drain(reason=reason))

    def generator_lost(self, name: str) -> None:
        """Its leases are free at once."""
        if self._control is not None:
            self._control.send(GeneratorLost(generator_id=name))

    def farewell(self, timeout_s: float) -> None:
        """Wait for the buffer to end by itself."""
        ray.wait([self._serving], timeout=timeout_s)

    def end(self) -> None:
        """Kill what still lives."""
        if self._control is not None:
            self._control.close()
            self._control = None
        for actor in (self._buffer, *self._learners):
            ray.kill(actor)
