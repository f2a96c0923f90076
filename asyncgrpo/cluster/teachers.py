"""The teachers that a run starts: one SGLang server for each `teacher.path`, on GPUs of the run's placement.

A server that ends or hangs is restarted at the same address. Until it replies again, rewards pause as in an outage of any
service that they ask. A server that cannot be restarted there ends the run.
"""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ray

from asyncgrpo import liveness, metrics
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.nodes import environment_to_share, set_environment
from asyncgrpo.cluster.processes import Budget, in_a_line, process_status
from asyncgrpo.cluster.ray_session import Actor, Placement, Reference, has_ended, result, results
from asyncgrpo.cluster.wiring import Setup, begin, incarnation_of
from asyncgrpo.config.placement import TEACHER_MEMORY
from asyncgrpo.control.client import ProcessState, ProcessStatus
from asyncgrpo.errors import AsyncGRPOError, StalledError
from asyncgrpo.host import importing
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.recording.events import EventLog


class TeacherActor:
    """Runs the server of one teacher."""

    def __init__(self, environment: dict[str, str], setup: Setup, source: str, index: int, start: int) -> None:
        """
        Args:
            environment: variables that the processes share with the driver.
            source: the data_source of the teacher.
            start: number of earlier starts of this teacher.
        """
        set_environment(environment)
        self._setup, self._source, self._index, self._start = setup, source, index, start
        self.progress = LoopProgress()
        """Ticks with each proof of the server's health."""

    def start(self, port: int) -> tuple[tuple[str, int], tuple[str, int]]:
        """Start logs and heartbeats. Returns the address of the server and that of the metrics.

        Args:
            port: of the server; 0: a free one.
        """
        exported = begin(
            self._setup,
            "teacher",
            incarnation_of(self._setup, self._start),
            lambda: self,
            rank=self._index,
        )
        self._address = exported[0], port or _free_port(exported[0])
        return self._address, exported

    def run(self) -> None:
        """Serve until a process of the server ends."""
        with importing():
            import torch

            from asyncgrpo.engines.sglang.engine import SGLangOptions

        config = self._setup.config
        options = SGLangOptions(
            model_path=config.teacher.own[self._source],
            dtype=getattr(torch, config.model.dtype),
            max_context=config.data.max_prompt_tokens + config.sampling.max_tokens + 1,
            device="cuda" if config.teacher_gpus_each else "cpu",
            tensor_parallel=max(1, config.teacher_gpus_each),
            max_completions=config.teacher.max_concurrent,
            memory_fraction=TEACHER_MEMORY,
        )
        options.prepare()
        with importing():
            from asyncgrpo.engines.sglang.server import serve

        key, tick = self._setup.teacher_key, self.progress.tick
        serve(options, self._address, key, tick, probe_every_s=liveness.PROBE_EVERY_S)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as free:
        return int(free.getsockname()[1])


@dataclass
class _Teacher:
    """One incarnation of a teacher. Ray ends an actor without a handle, so this keeps it."""

    actor: Actor
    incarnation: str
    address: Reference
    """Result of `start`. None once it is known to be right."""
    running: Reference
    """Result of `run`, when it ends."""
    began_s: float


class Teachers:
    """All teachers that a run starts; often none."""

    def __init__(
        self,
        setup: Setup,
        placement: Placement,
        watch: Watch,
        events: EventLog,
        *,
        on_address: Callable[[str, tuple[str, int]], None],
    ) -> None:
        """Start a process for each teacher. Their servers load meanwhile, until `are_up`.

        Args:
            on_address: called with a name and the address of its metrics.
        Raises:
            AsyncGRPOError: a process cannot be started.
        """
        self._setup, self._placement, self._watch, self._events = setup, placement, watch, events
        self._sources = list(setup.config.teacher.own)
        self._names = [f"teacher-{index}" for index in range(len(self._sources))]
        self._budgets = [Budget(name, setup.config.generators.restarts) for name in self._names]
        self._due: dict[int, float] = {}
        self._addresses: list[tuple[str, int]] = []
        metrics.restarts_spent_ratio.labels(of="teacher").set_function(
            lambda: max((budget.spent for budget in self._budgets), default=0.0)
        )
        self._running = {index: self._start(index, 0) for index in range(len(self._sources))}
        try:
            started = results(
                {self._names[i]: teacher.address for i, teacher in self._running.items()}, while_waiting=watch.listen
            )
        except BaseException:
            self.end()
            raise
        for name, (address, exported) in zip(self._names, started, strict=True):
            self._addresses.append(address)
            on_address(name, exported)

    @property
    def urls(self) -> dict[str, str]:
        """URLs of the servers by data_source."""
        return {
            source: f"http://{host}:{port}" for source, (host, port) in zip(self._sources, self._addresses, strict=True)
        }

    @property
    def are_up(self) -> bool:
        """True if every server replies."""
        return len(self._running) == len(self._sources) and all(map(self._is_up, self._running))

    def processes(self) -> Iterator[ProcessStatus]:
        """Yield the status of every teacher."""
        for index, name in enumerate(self._names):
            running = self._running.get(index)
            heard = self._watch.heartbeat(name, running.incarnation) if running is not None else None
            state: ProcessState = "working" if running is not None and self._is_up(index) else "starting"
            yield process_status(name, state, self._budgets[index].count, heard)

    def reconcile(self, *, may_restart: bool = True) -> None:
        """Restart servers that have ended or hang.

        Raises:
            AsyncGRPOError: a teacher has ended too often, or starts on another node.
        """
        for index, teacher in list(self._running.items()):
            if (reason := self._unhealthy_reason(index, teacher)) is not None:
                self._ended(index, reason, may_restart)
        for index in [index for index, due in self._due.items() if may_restart and time.monotonic() >= due]:
            del self._due[index]
            self._running[index] = self._start(index, self._addresses[index][1])

    def end(self) -> None:
        """Kill all servers."""
        for teacher in self._running.values():
            ray.kill(teacher.actor)
        self._running.clear()

    def _is_up(self, index: int) -> bool:
        return self._watch.has_begun(self._names[index], self._running[index].incarnation)

    def _start(self, index: int, port: int) -> _Teacher:
        start = self._budgets[index].count
        options, arguments = self._placement.teacher(index), (self._setup, self._sources[index], index, start)
        actor = ray.remote(TeacherActor).options(**options).remote(environment_to_share(), *arguments)
        address, running = actor.start.remote(port), actor.run.remote()
        return _Teacher(actor, incarnation_of(self._setup, start), address, running, time.monotonic())

    def _unhealthy_reason(self, index: int, teacher: _Teacher) -> str | None:
        """Return the reason to replace a server; None if it is healthy. Raises AsyncGRPOError if none can replace it."""
        name, cluster = self._names[index], self._setup.config.cluster
        try:
            if teacher.address is not None and has_ended(teacher.address):
                address, _ = result(teacher.address, name)
                teacher.address = None
            else:
                address = self._addresses[index]
            if has_ended(teacher.running):
                result(teacher.running, name)
                return "its server ended"
        except AsyncGRPOError as error:
            return in_a_line(error, name)
        if address != self._addresses[index]:
            raise AsyncGRPOError(
                f"{name} is lost with its node {self._addresses[index][0]}; the same command starts it on another one"
            )
        if not self._is_up(index) and time.monotonic() - teacher.began_s > cluster.stall_timeout_s:
            raise StalledError(
                f"{name} did not load its model within {cluster.stall_timeout_s:.0f} s (cluster.stall_timeout_s)"
            )
        limit_s = cluster.silent_timeout_s
        return self._watch.unhealthy_reason(name, teacher.incarnation, silent_s=limit_s, still_s=limit_s)

    def _ended(self, index: int, reason: str, may_restart: bool) -> None:
        name, was_up = self._names[index], self._is_up(index)
        ray.kill(self._running.pop(index).actor)
        self._watch.forget(name)
        if not may_restart:
            return
        self._due[index] = time.monotonic() + self._budgets[index].backoff_s(reason, has_served=was_up)
        self._events.write("restart", actor=name, reason=reason, count=self._budgets[index].count)
        metrics.actor_restarts_total.labels(actor="teacher").inc()
