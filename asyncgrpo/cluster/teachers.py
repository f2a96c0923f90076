"""The teachers that a run starts: one SGLang server for each `teacher.path`, on GPUs of the run's placement.

A server that ends or hangs is restarted at the same address. Until it replies again, rewards pause as in an outage of any
service that they ask. A server that cannot be restarted there ends the run.
"""

import socket
import time

import ray

from asyncgrpo import liveness
from asyncgrpo.cluster.nodes import environment_to_share, set_environment
from asyncgrpo.cluster.processes import Started, Supervised
from asyncgrpo.cluster.ray_session import Actor, Reference, results
from asyncgrpo.cluster.wiring import Setup, begin, incarnation_of
from asyncgrpo.config.placement import TEACHER_MEMORY
from asyncgrpo.errors import AsyncGRPOError, StalledError
from asyncgrpo.host import importing
from asyncgrpo.metrics import LoopProgress


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
        host = exported[0]
        if not port:
            with socket.create_server((host, 0)) as free:
                port = int(free.getsockname()[1])
        self._address = host, port
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
        try:
            references = {self._name(index): teacher.address for index, teacher in self._running.items()}
            for index, found in enumerate(results(references, while_waiting=self._watch.listen)):
                self._has_started(index, found)
        except BaseException:
            self.end()
            raise

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
        actor = ray.remote(TeacherActor).options(**options).remote(environment_to_share(), *arguments)
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
