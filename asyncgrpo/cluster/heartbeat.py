"""Heartbeats: every process reports to the driver once a second what it waits for and when its loop last turned.

    process ──Heartbeat──▶ driver      from a separate thread: a long step does not stop it, SIGSTOP does
    process ◀──EndpointsChanged, GeneratorLost, Steer, DumpStacks── driver

Ray reports a process that has ended. Heartbeats reveal a process that hangs.
"""

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncgrpo import liveness, metrics
from asyncgrpo.control.client import ProcessState, ProcessStatus
from asyncgrpo.errors import WireError
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import decode
from asyncgrpo.wire.sockets import Client, Keys, Server
from asyncgrpo.wire.supervision import DumpStacks, Heartbeat

log = logging.getLogger(__name__)

LOG_AFTER_S = 30.0
"""Duration after which the driver logs a wait, and logs it again each time it has lasted as long once more."""


class Heart:
    """Sends the heartbeats of one process, in a thread, until the process ends."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        incarnation: str,
        keys: Keys | None,
        *,
        run_dir: Path,
        loop_age_s: Callable[[], float | None] = lambda: None,
        on_message: Mapping[type[Message], Callable[[Any], object]] = MappingProxyType({}),
        **fields: Callable[[], Any],
    ) -> None:
        """
        Args:
            endpoint: of the driver's `Watch`.
            run_dir: receives stack dumps in `logs/<name>.stacks`.
            on_message: called with the driver's messages, by type, in the thread of the heartbeats.
            loop_age_s, fields: fields of `Heartbeat`, read there too.
        """
        self._endpoint, self._keys = endpoint, keys
        self._name, self._incarnation = name, incarnation
        self._stacks = run_dir / "logs" / f"{name}.stacks"
        self._on_message: dict[Any, Callable[[Any], object]] = {DumpStacks: self._dump_stacks, **on_message}
        self._fields = {"loop_age_s": loop_age_s, **fields}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before sockets are closed under it

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with closing(Client(self._endpoint, f"{self._name}-{self._incarnation}", self._keys)) as client:
            while not self._over.is_set():
                self._beat(client)

    def _beat(self, client: Client) -> None:
        """Send a heartbeat, and take in the driver's messages until the next one is due."""
        fields = {name: read() for name, read in self._fields.items()}
        waits, due = metrics.waits(), time.monotonic() + liveness.HEARTBEAT_S
        client.send(Heartbeat(name=self._name, incarnation=self._incarnation, pid=os.getpid(), waits=waits, **fields))
        while (left_s := due - time.monotonic()) > 0 and not self._over.is_set():
            try:
                received = client.receive(min(left_s, 0.2))
            except WireError as error:
                log.warning("refused a message of the driver: %s", error)
                continue
            if received is not None and (handle := self._on_message.get(type(received[0]))) is not None:
                handle(received[0])

    def _dump_stacks(self, message: DumpStacks) -> None:
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        with open(self._stacks, "a", encoding="utf-8") as file:
            file.write(f"{message.reason}, process {os.getpid()}\n")
            # The main thread is the first. `faulthandler` ends after 100 threads, of which it is the last.
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            frames = sys._current_frames()
            for ident in sorted(frames, key=lambda ident: ident != threading.main_thread().ident):
                file.write(f"\nThread {names.get(ident, ident)}:\n")
                traceback.print_stack(frames[ident], file=file)


@dataclass
class _Process:
    """Last heartbeat of one process."""

    peer: str
    heartbeat: Heartbeat
    heard_s: float
    logged_s: float = 0.0


class Watch:
    """Receives the heartbeats of all processes. One thread of the driver uses it."""

    def __init__(self, bind: str, keys: Keys | None, *, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = Server(bind, keys, advertise=host)
        self._clock = clock
        self._processes: dict[str, _Process] = {}
        self._listened_s = clock()
        self.endpoint = self._server.endpoint

    def listen(self) -> None:
        """Receive heartbeats, and log long waits.

        Time in which the driver itself was stopped does not count as silence of the others.
        """
        now_s, before_s = self._clock(), self._listened_s
        self._listened_s = now_s
        for process in self._processes.values():
            process.heard_s += max(0.0, now_s - before_s - liveness.QUIET_S)
        while (received := self._server.receive(0.0)) is not None:
            peer, frames = received
            try:
                message, _ = decode(frames)
            except WireError as error:
                log.warning("refused a message of %s: %s", peer, error)
                continue
            if isinstance(message, Heartbeat) and peer == f"{message.name}-{message.incarnation}":
                known = self._processes.get(message.name)
                if known is None or known.peer != peer:
                    known = self._processes[message.name] = _Process(peer, message, self._clock())
                known.heartbeat, known.heard_s = message, self._clock()
        for name, process in self._processes.items():
            self._log_waits(name, process)

    def unhealthy_reason(self, name: str, incarnation: str, *, silent_s: float, still_s: float) -> str | None:
        """Return the reason to replace a process; None if it is healthy, or before its first heartbeat.

        Args:
            silent_s: liveness timeout.
            still_s: longest time without a turn of its loop.
        """
        known = self._of(name, incarnation)
        if known is None:
            return None
        if (silence_s := self._listened_s - known.heard_s) > silent_s:
            return f"no heartbeat for {silence_s:.0f} s"
        if known.heartbeat.loop_age_s is not None and known.heartbeat.loop_age_s > still_s:
            return f"its loop has not turned for {known.heartbeat.loop_age_s:.0f} s"
        return None

    def heartbeat(self, name: str, incarnation: str) -> Heartbeat:
        """Return the last heartbeat of this process; before its first, one of process 0 that has reported nothing."""
        if (known := self._of(name, incarnation)) is not None:
            return known.heartbeat
        return Heartbeat(name=name, incarnation=incarnation, pid=0, waits={}, loop_age_s=None)

    def has_begun(self, name: str, incarnation: str) -> bool:
        """True if its main loop has turned at least once."""
        return self.heartbeat(name, incarnation).loop_age_s is not None

    def status(self, name: str, incarnation: str, *, restarts: int = 0, is_leaving: bool = False) -> ProcessStatus:
        state: ProcessState = "working" if self.has_begun(name, incarnation) else "starting"
        state = "leaving" if is_leaving else state
        if (known := self._of(name, incarnation)) is None:
            return ProcessStatus(name=name, state=state, restarts=restarts)
        pid, waits, age_s = known.heartbeat.pid, known.heartbeat.waits, round(self._clock() - known.heard_s, 1)
        return ProcessStatus(name=name, state=state, restarts=restarts, pid=pid, heard_s=age_s, waits=waits)

    def missing(self) -> dict[str, str]:
        """Return generators that another process has lost, as `name-incarnation`, with the name of that process."""
        return {name: witness for witness, known in self._processes.items() for name in known.heartbeat.missing}

    def _of(self, name: str, incarnation: str) -> _Process | None:
        known = self._processes.get(name)
        return known if known is not None and known.heartbeat.incarnation == incarnation else None

    def names(self, role: str) -> list[str]:
        """Return the names of a role's processes that have sent heartbeats."""
        return [name for name in self._processes if name.startswith(role)]

    def pids(self, *roles: str) -> list[int]:
        """Return the process ids of these roles, or of one process by its name; `""` selects all."""
        return [p.heartbeat.pid for name, p in self._processes.items() if name.startswith(roles)]

    def send(self, name: str, message: Message) -> None:
        """Send a message to a process, if it has sent a heartbeat."""
        if (known := self._processes.get(name)) is not None:
            self._server.send(known.peer, message)

    def dump_stacks(self, reason: str) -> None:
        """Make every process write its stacks to `logs/<name>.stacks`."""
        for name in self._processes:
            self.send(name, DumpStacks(reason=reason))

    def forget(self, name: str) -> None:
        """Forget a process that is gone or about to be replaced."""
        self._processes.pop(name, None)

    def close(self) -> None:
        self._server.close()

    def _log_waits(self, name: str, process: _Process) -> None:
        longest = max(process.heartbeat.waits.values(), default=0.0)
        if longest < process.logged_s:
            process.logged_s = 0.0
        if longest >= process.logged_s + LOG_AFTER_S:
            process.logged_s = longest
            what = ", ".join(f"{what} for {seconds:.0f} s" for what, seconds in sorted(process.heartbeat.waits.items()))
            log.info("%s waits for %s", name, what)
