"""A whole run: start every process, watch them, end them. The system on one page.

    with a Ray session:  buffer ─ learner ranks ─ generators
    until the learner is done: a generator that ended is started again, anything else that ends is the run's end

The driver holds no data and takes no part in training; it can be asked to drain (`SIGTERM`, Ctrl-C) and then everything
ends in order: leases stop, the learner finishes its step and writes a checkpoint, engines close.
"""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from asyncgrpo import logs, metrics
from asyncgrpo.cluster.actors import (
    BufferActor,
    BufferReady,
    GeneratorActor,
    LearnerActor,
    LearnerReady,
    Setup,
    _uses_cuda,
)
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.placement import Placement
from asyncgrpo.cluster.session import ray_session
from asyncgrpo.config import Config
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.recording.events import EventLog
from asyncgrpo.recording.targets import write_targets
from asyncgrpo.wire.messages import Drain, GeneratorLost
from asyncgrpo.wire.sockets import Client, Keys, is_loopback

log = logging.getLogger(__name__)

POLL_S = 0.2
BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Before the first, second, ... restart of one generator."""
SHORT_LIFE_S = 300.0
SHORT_LIVES = 3
"""A generator that ends so often in a row, each time so soon, will not do better: the run ends with its reason."""
FAREWELL_S = 20.0
"""For engines to close after the learner has ended."""

Tick = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """`done` or `drained`."""
    run_dir: Path


class Run:
    """One run in one folder. `execute` blocks until it is over."""

    def __init__(self, config: Config, folder: RunFolder, sizes: str) -> None:
        """
        Args:
            folder: claimed by this process.
            sizes: the configuration's sizes in words, for the screen.
        """
        self._config = config
        self._folder = folder
        self._sizes = sizes
        self._asked_to_stop = 0
        self._control: Client | None = None
        self._events = EventLog(folder.path / "metrics.jsonl")

    def execute(self, tick: Tick = lambda: None, tell: Callable[[str], None] = lambda text: None) -> Outcome:
        """Run to the end.

        Args:
            tick: called a few times a second, to redraw a screen.
            tell: called with what is being started.
        Raises:
            AsyncGRPOError: what ended the run, in a sentence.
        """
        logs.setup("driver", None, self._folder.path)
        address = ("127.0.0.1", metrics.serve("driver"))
        config = self._config
        # Ray sets a SIGTERM handler of its own when it starts, so ours comes after.
        with ray_session(config.cluster.ray_address, config.generators.gpus_each == 0), _Signals(self._stop):
            placement = Placement(config, learner_on_gpu=_uses_cuda(config))
            try:
                status = self._run(placement, address, tick, tell)
            except KeyboardInterrupt:
                if self._asked_to_stop > 1:
                    raise
                status = "drained"  # asked before anything was trained: nothing is lost
                self._events.write("end", status=status, step=self._step_so_far())
            except AsyncGRPOError as error:
                self._events.write("end", status="failed", step=self._step_so_far(), reason=str(error))
                raise
            finally:
                placement.release()
                write_targets(self._folder.path, {})
                if self._control is not None:
                    self._control.close()
        return Outcome(status, self._folder.path)

    def _step_so_far(self) -> int:
        checkpoint = self._folder.checkpoint()
        return read_state(checkpoint).step if checkpoint is not None else 0

    def _stop(self) -> None:
        """A signal came: the first drains, a second one gives up at once."""
        self._asked_to_stop += 1
        if self._asked_to_stop > 1:
            raise KeyboardInterrupt

    def _run(self, placement: Placement, address: tuple[str, int], tick: Tick, tell: Callable[[str], None]) -> str:
        config = self._config
        setup = Setup(
            config,
            self._folder.path,
            self._folder.next_lineage(),
            self._folder.checkpoint(),
            None if is_loopback(config.cluster.bind) else Keys.make(),
        )
        tell("the buffer, the learner and the engines are starting")
        buffer = ray.remote(BufferActor).options(**placement.anywhere()).remote(setup)
        learners = [
            ray.remote(LearnerActor).options(**placement.learner(rank)).remote(setup, rank)
            for rank in range(config.learner.ranks)
        ]
        leaders: list[LearnerReady] = self._get([learner.start.remote() for learner in learners], tick)
        targets = {"driver": address} | {f"learner-{i}": ready.metrics_address for i, ready in enumerate(leaders)}
        ready: BufferReady = self._get([buffer.start.remote()], tick)[0]
        targets["buffer"] = ready.metrics_address
        if ready.dropped_too_long:
            tell(f"{ready.dropped_too_long} prompts are longer than data.max_prompt_tokens and were dropped")
        if ready.recovered:
            counts = ", ".join(f"{count} {what}" for what, count in sorted(ready.recovered.items()))
            tell(f"groups of earlier starts that no step has trained: {counts}")
        self._control = Client(ready.endpoint, "driver", setup.keys)
        about: dict[str, Any] = {
            "run": self._folder.path.name,
            "sizes": self._sizes,
            "steps": ready.steps,
            "prompts": ready.prompts,
            "data_schema": ready.schema,
            "dropped_too_long": ready.dropped_too_long,
            "recovered": ready.recovered,
        }
        fleet = Fleet(
            setup, placement, ready.endpoint, leaders[0].weights_endpoint, self._events, self._control, targets
        )
        buffer_run = buffer.run.remote()
        fleet.start()
        training = [learner.run.remote(leaders[0], ready.endpoint, about) for learner in learners]
        status = self._supervise(training, buffer_run, fleet, tick)
        fleet.farewell(FAREWELL_S)
        ray.wait([buffer_run], timeout=FAREWELL_S)
        return status

    def _supervise(self, training: list[Any], buffer_run: Any, fleet: "Fleet", tick: Tick) -> str:
        """Watch until every rank of the learner has returned. Raises what ended a process that has no replacement."""
        draining = False
        while True:
            done, waiting = ray.wait(training, num_returns=len(training), timeout=POLL_S)
            for reference in done:
                self._get([reference], tick)  # raises what ended it
            tick()
            if not waiting:
                return self._get(training[:1], tick)[0]
            if self._asked_to_stop and not draining:
                draining = True
                assert self._control is not None
                self._control.send(Drain(reason="asked to stop"))
                self._events.write("drain", reason="asked to stop")
            if ray.wait([buffer_run], timeout=0)[0] and not ray.wait(training, timeout=5.0)[0]:
                self._get([buffer_run], tick)
                raise AsyncGRPOError("the buffer ended before the learner; its log says why")
            fleet.watch(may_restart=not draining)

    def _get(self, references: list[Any], tick: Tick) -> list[Any]:
        """Ray's results, with the cause of a failure as itself."""
        while len(ray.wait(references, num_returns=len(references), timeout=POLL_S)[0]) < len(references):
            tick()
            for reference in ray.wait(references, num_returns=len(references), timeout=0)[0]:
                _result(reference)
            if self._asked_to_stop:
                raise KeyboardInterrupt
        return [_result(reference) for reference in references]


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AsyncGRPOError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise AsyncGRPOError(f"a process of the run died: {str(error).splitlines()[0]}") from error


class Fleet:
    """The generators: started, watched, and started again when they end."""

    def __init__(
        self,
        setup: Setup,
        placement: Placement,
        buffer_endpoint: str,
        weights_endpoint: str,
        events: EventLog,
        control: Client,
        targets: dict[str, tuple[str, int]],
    ) -> None:
        self._setup = setup
        self._placement = placement
        self._endpoints = buffer_endpoint, weights_endpoint
        self._events = events
        self._control = control
        self._targets = targets
        self._running: dict[int, tuple[Any, Any]] = {}  # actor and its `run`; Ray ends an actor nobody holds
        self._restarts: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._short_lives: dict[int, int] = {}

    def start(self) -> None:
        """Start all generators at once."""
        for index in range(self._setup.config.generators.count):
            self._start(index)
        write_targets(self._setup.run_dir, self._targets)

    def watch(self, *, may_restart: bool) -> None:
        """Notice who ended and start who is due. Raises AsyncGRPOError when one is not to be helped."""
        for index, (actor, reference) in list(self._running.items()):
            if ray.wait([reference], timeout=0)[0]:
                del self._running[index]
                self._ended(index, reference, may_restart)
                ray.kill(actor)
        for index in [i for i, due in self._due.items() if time.monotonic() >= due]:
            del self._due[index]
            self._start(index)
            write_targets(self._setup.run_dir, self._targets)

    def farewell(self, timeout_s: float) -> None:
        """Wait for the generators to end by themselves."""
        references = [reference for _, reference in self._running.values()]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)

    def _start(self, index: int) -> None:
        options = self._placement.generator(index)
        actor = ray.remote(GeneratorActor).options(**options).remote(self._setup, index)
        self._targets[f"generator-{index}"] = ray.get(actor.start.remote())
        self._started[index] = time.monotonic()
        self._running[index] = actor, actor.run.remote(*self._endpoints)

    def _ended(self, index: int, reference: Any, may_restart: bool) -> None:
        try:
            _result(reference)
            reason = "it ended by itself"
        except Exception as error:
            reason = str(error).strip().splitlines()[-1][:300]
        name = f"generator-{index}"
        self._control.send(GeneratorLost(generator_id=name))
        if not may_restart:
            return
        count = self._restarts[index] = self._restarts.get(index, 0) + 1
        log.warning("%s ended (%s); restart %d", name, reason, count)
        self._events.write("restart", actor=name, reason=reason, count=count)
        metrics.actor_restarts_total.labels(actor="generator").inc()
        is_short = time.monotonic() - self._started[index] < SHORT_LIFE_S
        self._short_lives[index] = self._short_lives.get(index, 0) + 1 if is_short else 0
        allowed = self._setup.config.generators.restarts
        if count > allowed or self._short_lives[index] >= SHORT_LIVES:
            raise AsyncGRPOError(
                f"{name} ended {count} times (generators.restarts is {allowed}); the last time: {reason}"
            )
        self._due[index] = time.monotonic() + BACKOFF_S[min(count - 1, len(BACKOFF_S) - 1)]


class _Signals:
    """SIGINT and SIGTERM call `stop` instead of ending the process."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            self._stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
