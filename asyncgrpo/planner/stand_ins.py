"""Virtual time, and stand-ins on it: sockets, the receiver of weights, the recorder, and an engine of continuous batching."""

import asyncio
import heapq
import itertools
import math
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context
from typing import Any

import numpy as np

from asyncgrpo.engines.base import Engine, EngineOccupancy, PendingCompletion, Request
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, decode

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

    def last(self, counters: dict[str, float]) -> dict[str, float]:
        """The totals for a checkpoint."""
        return counters

    def __getattr__(self, name: str) -> "Silent":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Accept a call."""


class VirtualEngine(Engine[Request]):
    """An engine of continuous batching: of b that run, every completion gets a token each a + c b seconds."""

    request_type, vocab_size, max_context = Request, 2, 2**31

    def __init__(
        self,
        lengths_of: Callable[[int, int], np.ndarray],
        token_s: Callable[[int], float],
        swap_s: float,
        capacity: int | None = None,
    ) -> None:
        """
        Args:
            lengths_of: [completions] tokens of the group of this prompt index and attempt.
            token_s: seconds of a token of each of so many that run.
            swap_s: seconds for which a change of weights stops sampling.
            capacity: completions that run at once at most, the others wait; none: all run.
        """
        super().__init__()
        self._lengths_of, self._token_s, self._swap_s = lengths_of, token_s, swap_s
        self._capacity = math.inf if capacity is None else capacity
        self.aborted_tokens = 0.0
        self.busy_s = 0.0
        """Seconds with at least one completion."""
        self.completion_s = 0.0
        """Seconds summed over the completions that ran at once."""
        self._tokens = 0.0  # that a completion has got which runs since the start
        self._since_s = 0.0
        self._running: list[tuple[float, int, float, PendingCompletion]] = []
        """End, tie, start, completion, in `_tokens`; a heap."""
        self._queued: deque[tuple[int, PendingCompletion]] = deque()
        """Tokens and completion of those that wait for room."""
        self._ties = itertools.count()
        self._paused = False
        self._wake: asyncio.TimerHandle | None = None

    async def start(self, version: PolicyVersion) -> None:
        self._started(version)

    def _begin(self, request: Request) -> None:
        self._advance()
        lengths = self._lengths_of(*map(int, request.request_id.split(".")[1:3]))
        self._queued += ((int(lengths[completion.index]), completion) for completion in request.pending)
        self._admit()
        self._set_alarm()

    async def _load(self, tensors: Iterable, version: PolicyVersion, *, keep_kv: bool) -> None:
        self._advance()
        self._paused = True
        self._set_alarm()
        await asyncio.sleep(self._swap_s)
        self._advance()
        self._paused, self._version = False, version
        for _, _, start, completion in self._running:
            completion.sampled_by(version, int(self._tokens - start))
        self._set_alarm()

    def _abort(self, request: Request) -> None:
        """Free the places of a request. Its caller awaits no completion of it."""
        self._advance()
        self.aborted_tokens += sum(self._tokens - start for _, _, start, one in self._running if one.request is request)
        self._running = [entry for entry in self._running if entry[3].request is not request]
        self._queued = deque(entry for entry in self._queued if entry[1].request is not request)
        heapq.heapify(self._running)
        self._admit()
        self._set_alarm()

    def occupancy(self) -> EngineOccupancy:
        self._advance()
        running = len(self._running)
        return EngineOccupancy(running, 0, running, math.nan, self._tokens, self.busy_s)

    async def probe(self) -> None:
        """It never hangs."""

    async def checksum(self) -> str:
        return ""

    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        return []

    async def close(self) -> None:
        """Nothing runs."""

    async def _end(self, request: Request) -> None:
        """Leave the rest running: only an abort frees places."""

    def _admit(self) -> None:
        while self._queued and len(self._running) < self._capacity:
            length, completion = self._queued.popleft()
            completion.sampled_by(self.version, 0)
            heapq.heappush(self._running, (self._tokens + length, next(self._ties), self._tokens, completion))

    def _advance(self) -> None:
        now_s, running = asyncio.get_running_loop().time(), len(self._running)
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        if running and not self._paused:
            self._tokens += elapsed_s / self._token_s(running)
            self.busy_s += elapsed_s
            self.completion_s += elapsed_s * running

    def _set_alarm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._running and not self._paused:
            wait_s = (self._running[0][0] - self._tokens) * self._token_s(len(self._running))
            self._wake = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._complete)

    def _complete(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            end, _, start, completion = heapq.heappop(self._running)
            length = round(end - start)
            completion.complete(np.zeros(length, np.int32), np.zeros(length, np.float32), "length")
        self._admit()
        self._set_alarm()
