"""Virtual time, and stand-ins on it: sockets, the receiver of weights, and the recorder."""

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import SimpleNamespace
from typing import Any

from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, decode
from asyncgrpo.wire.rollouts import EvalResult

NO_WEIGHTS = SharedTensors((), SimpleNamespace(flags=[0]), 0, 0)  # type: ignore[arg-type]
"""For engines that need none."""

# -- virtual time ------------------------------------------------------------------------------------------------------


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that asyncio's tasks, locks, queues and task groups need; no files, no threads.

    Nothing waits, so the cost of an hour is the cost of its events. Callbacks at one instant run in the order of their
    requests, so a program with one random generator is a function of its seed.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sequence = itertools.count()
        self.failure: BaseException | None = None
        """Set by a part of the simulation that ends it; `run_until` raises it, once."""

    def run_until(self, deadline_s: float, is_done: Callable[[], Any] = lambda: False) -> None:
        """Run callbacks in the order of their time, until `is_done()` or until `deadline_s`. Raises `failure`."""
        events._set_running_loop(self)
        try:
            while self.failure is None and not is_done():
                if self._ready:
                    handle: asyncio.Handle = self._ready.popleft()
                elif self._timers and self._timers[0][0] <= deadline_s:
                    when, _, handle = heapq.heappop(self._timers)
                    self._now_s = max(self._now_s, when)
                else:
                    self._now_s = max(self._now_s, deadline_s)
                    break
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine, *, name: str | None = None, context: Context | None = None) -> asyncio.Task:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the exception of a callback. The holder of a failed task handles its exception."""
        if "handle" in context and self.failure is None:
            self.failure = context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The handle stays in the heap and is passed over when its time comes."""

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False


Frames = list[bytes]


class GeneratorLine:
    """Stands for `wire.sockets.AsyncClient`."""

    def __init__(self, send: Callable[[Message, Buffer], None]) -> None:
        self._send = send
        self._arrived: asyncio.Queue[Frames] = asyncio.Queue()
        self.is_closed = False

    def arrive(self, frames: Frames) -> None:
        self._arrived.put_nowait(frames)

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        if not self.is_closed:
            self._send(message, payload)

    async def receive(self) -> tuple[Message, memoryview]:
        return decode(await self._arrived.get())

    def close(self) -> None:
        self.is_closed = True


class LearnerLine:
    """Stands for `wire.sockets.Client`. `receive` runs the loop."""

    def __init__(self, loop: VirtualLoop, send: Callable[[Message, Buffer], None]) -> None:
        self._loop = loop
        self._send = send
        self._arrived: deque[Frames] = deque()
        self.endpoint = "the simulated buffer"

    def arrive(self, frames: Frames) -> None:
        self._arrived.append(frames)

    def send(self, message: Message, payload: Buffer = b"") -> None:
        self._send(message, payload)

    def receive(self, timeout_s: float) -> tuple[Message, memoryview] | None:
        self._loop.run_until(self._loop.time() + timeout_s, lambda: self._arrived)
        return decode(self._arrived.popleft()) if self._arrived else None

    def close(self) -> None:
        """Nothing to close."""


class Receiver:
    """Stands for `weights.Receiver`: it only joins."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._join = join
        self.failure: BaseException | None = None
        self.is_alive = False

    def start(self) -> None:
        self._join()

    def stop(self) -> None:
        """Nothing runs."""


class Silent:
    """Stands for `learner.Recorder` and for gauges: accepts every call."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        """Steps of the evaluations that it was given."""

    def evaluation(self, result: EvalResult) -> None:
        self.evaluated.append(result.step)

    def last(self, counters: dict[str, float]) -> dict[str, float]:
        """The totals for a checkpoint."""
        return counters

    def __getattr__(self, name: str) -> "Silent":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Accept a call."""
