"""Injects faults into a run, for `asyncgrpo demo --chaos`: kill, freeze, pause, partition, reset, full disk.

Every fault is real: SIGKILL and SIGSTOP to processes of the run, an interrupted connection between generators and buffer, a
file size limit of the kernel. A run survives a fault once all processes are up again and a step was trained after it. The
time until then is the time to recovery. Repeated restarts without a step end a run. So if faults are more frequent than
restarts, random faults skip actors without a restart left.
"""

import asyncio
import contextlib
import logging
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from asyncgrpo import liveness
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.processes import Core, Fleet
from asyncgrpo.recording.events import EventLog
from asyncgrpo.wire.supervision import EndpointsChanged

log = logging.getLogger(__name__)

HOUR_S = 3600.0
CORE = ("buffer", "learner", "disk")
"""Actors whose faults may restart buffer and learner."""

# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Rate of faults, and the seed of their times and kinds."""

    per_hour: float
    seed: int
    faults: tuple[str, ...] = ()
    """Kind and actor of each fault in order, for example `kill generator`; empty: random, without end."""


@dataclass
class _Fault:
    """An injected fault."""

    kind: str
    actor: str
    at_s: float
    after: tuple[int, int]
    """Lineage and step of the run when the fault was injected or undone."""
    killed: frozenset[int] = frozenset()
    """Process ids that must disappear and be replaced."""
    heals_at_s: float = 0.0
    """Time at which the fault is undone."""
    heal: Callable[[], object] | None = None
    """Undoes the fault; None if not needed or done."""


_WEIGHTS = {
    "kill generator": 3.0,
    "freeze generator": 1.0,
    "pause generator": 1.0,
    "kill generators": 0.5,
    "kill buffer": 1.0,
    "freeze buffer": 0.5,
    "pause buffer": 0.5,
    "kill learner": 1.0,
    "freeze learner": 0.5,
    "pause learner": 0.5,
    "partition network": 1.5,
    "reset network": 1.5,
    "full disk": 1.0,
}
"""Relative frequency of each kind and actor."""


class Chaos:
    """Injects faults into one run, with kinds and times from the seed."""

    def __init__(self, plan: Plan, watch: Watch, fleet: Fleet, events: EventLog) -> None:
        self._plan, self._watch, self._fleet = plan, watch, fleet
        self._events, self._clock = events, time.monotonic
        self._rng = random.Random(plan.seed)
        self._open: list[_Fault] = []
        self._due_s: float | None = None
        self._proxy: Proxy | None = None
        self._reached = 0, 0
        self._core_faults = 0
        """Faults of core actors since the last trained step."""
        self._faults = list(plan.faults)

    def route(self, endpoints: EndpointsChanged) -> EndpointsChanged:
        """Return the endpoints with an interruptible proxy between generators and buffer."""
        if self._proxy is not None:
            self._proxy.close()
        self._proxy = Proxy(endpoints.buffer_endpoint)
        return msgspec.structs.replace(endpoints, buffer_endpoint=self._proxy.endpoint)

    def reconcile(self, core: Core, *, may_strike: bool) -> None:
        """Undo due faults, record survived ones, and inject the next. Called several times per second."""
        now, steps = self._clock(), core.steps_done
        self._reached = core.setup.lineage, core.first_step if steps is None else steps
        for fault in self._open:
            if fault.heal is not None and now >= fault.heals_at_s:
                fault.heal()
                fault.heal, fault.after = None, self._reached
        for fault in [f for f in self._open if self._is_survived(f, core)]:
            self._open.remove(fault)
            self._events.write("recovered", fault=fault.kind, actor=fault.actor, seconds=now - fault.at_s)
        if self._reached[1] > core.first_step:
            self._core_faults = 0
            if self._due_s is None:  # no fault before the first step
                self._due_s = now + self._interval_s()
        if may_strike and self._due_s is not None and now >= self._due_s and self._watch.pids("buffer", "learner"):
            kind, _, actor = self._next().partition(" ")
            self._due_s = now + self._interval_s() if self._faults or not self._plan.faults else math.inf
            self._core_faults += actor in CORE
            self._open.append(fault := self._inject(kind, actor))
            self._events.write("fault", fault=fault.kind, actor=fault.actor)
            log.warning("chaos: %s %s", fault.kind, fault.actor)

    def end(self) -> None:
        """Undo all faults in effect."""
        for fault in self._open:
            if fault.heal is not None:
                fault.heal()
        if self._proxy is not None:
            self._proxy.close()

    def _is_survived(self, fault: _Fault, core: Core) -> bool:
        if fault.heal is not None or not self._fleet.is_whole or fault.killed & set(self._watch.pids("")):
            return False
        lineage, step = fault.after
        return self._reached[1] > (step if core.setup.lineage == lineage else core.first_step)

    def _next(self) -> str:
        if self._plan.faults:
            return self._faults.pop(0)
        may_lose_core = self._core_faults + 1 < liveness.FAILED_STARTS
        weights = {name: w for name, w in _WEIGHTS.items() if may_lose_core or name.partition(" ")[2] not in CORE}
        return self._rng.choices(list(weights), list(weights.values()))[0]

    def _interval_s(self) -> float:
        return self._rng.uniform(0.5, 1.5) * HOUR_S / self._plan.per_hour

    # -- the kinds of faults -------------------------------------------------------------------------------------------

    def _inject(self, kind: str, actor: str) -> _Fault:
        fault, proxy = _Fault(kind, actor, self._clock(), self._reached), self._proxy
        match kind:
            case "kill":
                fault.actor, fault.killed = self._signal(actor, signal.SIGKILL)
            case "freeze":
                fault.actor, fault.killed = self._signal(actor, signal.SIGSTOP)
            case "pause":
                fault.actor, paused = self._signal(actor, signal.SIGSTOP)
                self._until(fault, 3.0, lambda: _send(paused, signal.SIGCONT))
            case "partition" if proxy is not None:
                proxy.hold()
                self._until(fault, 5.0, proxy.release)
            case "reset" if proxy is not None:
                proxy.cut()
            case "full":  # the kernel refuses writes of buffer and learner
                pids = self._watch.pids("buffer", "learner")
                _limit_files(pids, 1)
                self._until(fault, 5.0, lambda: _limit_files(pids, resource.RLIM_INFINITY))
        return fault

    def _signal(self, actor: str, number: signal.Signals) -> tuple[str, frozenset[int]]:
        """Send a signal to one process of a role, or to all of them if `actor` is plural. Returns its name, and their ids."""
        names = sorted(self._watch.names(actor.removesuffix("s")))
        names = [name for name in names if actor in CORE or self._fleet.may_lose(name)]
        chosen = names if actor.endswith("s") else [self._rng.choice(names)] if names else []
        pids = self._watch.pids(*chosen) if chosen else []
        _send(pids, number)
        return chosen[0] if len(chosen) == 1 else actor, frozenset(pids)

    def _until(self, fault: _Fault, about_s: float, heal: Callable[[], object]) -> None:
        fault.heals_at_s, fault.heal = self._clock() + self._rng.uniform(0.5, 1.5) * about_s, heal


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _limit_files(pids: Iterable[int], num_bytes: int) -> None:
    """Limit the file size of these processes, bytes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


# -- an interruptible connection ---------------------------------------------------------------------------------------

CHUNK = 1 << 16


class Proxy:
    """Forwards to one endpoint, in a thread, until closed."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: `tcp://host:port`.
        """
        address = urlsplit(target)
        self._target = address.hostname, address.port
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Hold all data in both directions, without loss."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def release(self) -> None:
        """Forward the held data. No effect after `close`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self) -> None:
        """Reset all connections, which loses data in flight. New connections are accepted."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _end(self) -> None:
        self._server.close()
        self._cut()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.1, self._loop.stop)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):  # Python 3.11 would log that it was cancelled
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, far_writer}
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
