"""The pool of reward workers: processes that score completions, and are killed when they are late.

`Pool.call` always returns a score. When a call is late, the process group of its worker is killed; when a worker dies,
the score says so; the next call starts another worker. Each worker runs one call at a time. Calls wait for their turn here,
in order, and their deadline begins with their turn.

Quick calls that wait are sent to a worker together. It takes a ticket for each before it begins it. While one of them takes
long, the pool takes the tickets that are left back, and their calls wait for any worker again.

A pool of `auto` workers follows the load: it begins with one, starts another when a call has waited for longer than a call
takes and a core is idle, and lets those go that were idle for `IDLE_S`.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec

from asyncgrpo.cores import cores, idle_cores
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import WITHDRAWN, failed, place_of
from asyncgrpo.rewards.worker import LENGTH, MAX_REPLY, TICKET, Call, WorkerReady, command, frame
from asyncgrpo.types import Score

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""How long a worker may take to import what it scores with."""
_GRACE_S = 0.05
"""A late call gets this much longer, so that a reply that only waited for this event loop still counts."""
_PLACE_TIMEOUT_S = 1.0
"""How long a late worker may take to say where it is. Only a worker that ignores signals takes this long."""
_KILL_TIMEOUT_S = 5.0
"""How long to wait after SIGKILL, which works at once unless the kernel is stuck, as on a dead network disk."""
LOOK_EVERY_S = 0.25
"""How often a pool that follows the load looks at it. A wait that is shorter is not worth a process."""
IDLE_S = 60.0
"""A worker that is not needed for so long ends, where others are left."""
BATCH_S, MOST_AT_ONCE = 0.01, 64
"""Calls are sent together as far as they take this long together, and no more than so many."""
RECALL_S = 0.02
"""A call that takes longer does not keep those that were sent with it."""
_MEMORY = 0.9
"""How much the calls before count in the time that a call takes."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _WorkerEnded(Exception):
    """The pipe of a worker closed, or something other than a frame came out of it."""


class _Request:
    """A call, and the scores that its caller waits for."""

    def __init__(self, body: bytes, count: int) -> None:
        """
        Args:
            body: the call as a frame.
            count: completions of the call.
        """
        self.body, self.count = body, count
        self._loop = asyncio.get_running_loop()
        self.scores: asyncio.Future[list[Score]] = self._loop.create_future()
        self.asked_s = self.begun_s = self._loop.time()
        self._waited_s: float | None = None
        self.slot: _Slot | None = None
        """Where it was sent to."""

    def begin(self) -> None:
        """Note that its turn has come. A second call leaves out of its time what a worker took to start."""
        self.begun_s = self._loop.time()
        if self._waited_s is None:
            self._waited_s = self.begun_s - self.asked_s

    def end(self, scores: list[Score]) -> None:
        """Hand over its scores, unless the caller has gone."""
        if not self.scores.done():
            waited_s = self._waited_s or 0.0
            self.scores.set_result([msgspec.structs.replace(score, waited=waited_s) for score in scores])

    def fail(self, failure: str, detail: str) -> None:
        """End it with a failure."""
        self.end([failed(failure, detail, seconds=(self._loop.time() - self.begun_s) / self.count)] * self.count)


class _Worker:
    """One running worker process."""

    ready: WorkerReady

    def __init__(self, process: asyncio.subprocess.Process, tickets: tuple[int, int]) -> None:
        """
        Args:
            tickets: both ends of the pipe of tickets. The worker reads it too.
        """
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._tickets: tuple[int, ...] = tickets
        self._sent = 0
        self._length: int | None = None  # of the reply that has begun

    @classmethod
    async def start(cls, target: str, argument: str, what: str, timeout_s: float) -> "_Worker":
        """Start a process and wait until it has loaded its scorer. Raises RewardError with the reason."""
        tickets = os.pipe()
        os.set_blocking(tickets[0], False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command(target, argument, what, tickets[0]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=tickets[:1],
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # a process group of its own to kill, and no Ctrl-C from the terminal
            )
        except BaseException as error:
            for end in tickets:
                os.close(end)
            if not isinstance(error, OSError):  # cancelled
                raise
            raise RewardError(f"no process could be started to score with {what}: {error}") from error
        worker = cls(process, tickets)
        try:
            reply = await asyncio.wait_for(worker._reply(), timeout_s)
            worker.ready = msgspec.msgpack.decode(reply, type=WorkerReady)
        except TimeoutError:
            await worker.kill()
            raise RewardError(
                f"{what} was not loaded within {timeout_s:g} s; is its import waiting for something?"
            ) from None
        except (_WorkerEnded, msgspec.MsgspecError):
            ending = await worker.kill()
            raise RewardError(f"the reward worker {ending} while it loaded {what}; its stderr may say why") from None
        except BaseException:  # cancelled
            await worker.kill()
            raise
        if worker.ready.error:
            await worker.kill()
            raise RewardError(worker.ready.error)
        worker._count(1)
        return worker

    @property
    def has_ended(self) -> bool:
        """Whether it ended, by the kernel's word: asyncio hears of it a moment later."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # asyncio's thread has already taken its exit status
            return True

    def give(self, requests: Iterable[_Request]) -> None:
        """Send calls, to be run in order."""
        bodies = [request.body for request in requests]
        self._stdin.write(b"".join(bodies))
        numbers = range(self._sent, self._sent + len(bodies))
        os.write(self._tickets[1], b"".join(map(TICKET.pack, numbers)))
        self._sent += len(bodies)

    def take_back(self, most: int) -> int:
        """Take back calls that it has not begun, the last ones and `most` of them. Returns how many they are."""
        try:
            tickets = os.read(self._tickets[0], 1 << 16)
        except BlockingIOError:
            return 0
        count = min(len(tickets) // TICKET.size, most)
        os.write(self._tickets[1], tickets[: len(tickets) - count * TICKET.size])
        return count

    async def scores(self) -> list[Score]:
        """The scores of the next call, however long that takes. Cancelling loses nothing. Raises _WorkerEnded."""
        try:
            return msgspec.msgpack.decode(await self._reply(), type=list[Score])
        except (OSError, msgspec.MsgspecError) as error:
            raise _WorkerEnded from error

    async def _reply(self) -> bytes:
        try:
            if self._length is None:
                (self._length,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
            if self._length > MAX_REPLY:
                raise _WorkerEnded
            body = await self._stdout.readexactly(self._length)
        except asyncio.IncompleteReadError as error:
            raise _WorkerEnded from error
        self._length = None
        return body

    async def place(self) -> str:
        """`FILE:LINE` where the worker is now, if it can say. After this the worker can only be killed."""
        text, place = b"", ""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self._process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(_PLACE_TIMEOUT_S):
                # The stack arrives in many small pieces, the innermost frame first, the worker's own start last.
                while not place and b"in <module>" not in text and (more := await self._stdout.read(1 << 16)):
                    text += more
                    frames = re.findall(r'File "([^"]+)", line (\d+) in', text.decode(errors="replace"))
                    place = place_of([(path, int(line)) for path, line in frames])
        return place

    @staticmethod
    def _count(change: int) -> None:
        from asyncgrpo import metrics  # only here, because workers import this module too

        metrics.reward_workers.inc(change)

    async def end(self) -> str:
        """Kill it, once it was ready. Returns how it ended, for a person."""
        self._count(-1)
        return await self.kill()

    async def kill(self) -> str:
        """Kill the process and all it started. Returns how it ended, for a person."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        for end in self._tickets:
            os.close(end)
        self._tickets = ()
        try:
            code = await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            log.warning("reward worker %d does not end although it was killed; left behind", self._process.pid)
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class _Slot:
    """A place for one worker, which may be started and killed many times."""

    def __init__(self, target: str, argument: str, what: str, start_timeout_s: float) -> None:
        self._start = (target, argument, what, start_timeout_s)
        self._worker: _Worker | None = None
        self._batch: deque[_Request] = deque()
        self._again: Callable[[Sequence[_Request]], object] = len
        self.is_starting = False
        self.free_since_s = 0.0

    @property
    def is_warm(self) -> bool:
        """True if it has a worker."""
        return self._worker is not None

    async def ready(self) -> _Worker:
        """The worker, started if there is none. Raises RewardError."""
        if self._worker is not None and self._worker.has_ended:  # between two calls: no call is charged with it
            await self.clear()
        if self._worker is None:
            self.is_starting = True
            try:
                self._worker = await _Worker.start(*self._start)
            finally:
                self.is_starting = False
        return self._worker

    async def serve(
        self, batch: deque[_Request], timeout_s: float, again: Callable[[Sequence[_Request]], None]
    ) -> None:
        """Score calls in order, or name what went wrong with them.

        Args:
            batch: each is taken out once it has ended.
            again: gets those that did not begin here.
        """
        self._batch, self._again = batch, again
        batch[0].begin()
        try:
            worker = await self.ready()
        except RewardError as error:
            while batch:
                batch.popleft().fail("crash", str(error))
            return
        try:
            worker.give(batch)
            while batch:
                batch[0].begin()
                scores = await self._scores(worker, batch, timeout_s)
                batch.popleft().end(scores)
        except TimeoutError:
            place = await worker.place()
            await self.clear()
            detail = f"no score after {timeout_s:g} s" + (f"; it was at {place}" if place else "")
            batch.popleft().fail("timeout", detail)
            again(batch)
        except _WorkerEnded:
            batch.popleft().fail("crash", f"the reward worker {await self.clear()}")
            again(batch)
        except BaseException:  # the pool closes
            await self.clear()
            raise

    async def _scores(self, worker: _Worker, batch: deque[_Request], timeout_s: float) -> list[Score]:
        """The scores of the first call. Raises TimeoutError or _WorkerEnded."""
        deadline_s = batch[0].begun_s + timeout_s
        if len(batch) > 1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RECALL_S, timeout_s)):
                    return await worker.scores()
            self.recall()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                return await worker.scores()
        async with asyncio.timeout(_GRACE_S):
            return await worker.scores()

    def recall(self) -> None:
        """Let all calls but the first, as far as they have not begun here, wait for any worker again."""
        count = self._worker.take_back(len(self._batch) - 1) if self._worker is not None and self._batch else 0
        self._again([self._batch.pop() for _ in range(count)][::-1])

    async def clear(self) -> str:
        """Kill the worker if there is one. Returns how it ended."""
        worker, self._worker = self._worker, None
        return await worker.end() if worker else "was not running"


class Pool:
    """Up to `workers` processes that score with `factory(argument)`, where `target` is `module:factory`.

    With `auto` they are as many as the load needs, and no more than there are cores. Workers start when calls need them,
    outside the call's deadline. Use a pool from one event loop, in a thread that outlives it: the kernel ends a worker with
    the thread that started it.
    """

    def __init__(
        self,
        target: str,
        argument: str = "",
        *,
        what: str = "",
        workers: int | Literal["auto"],
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        idle_cores: Callable[[], float] = idle_cores,
    ) -> None:
        self._timeout_s, self._idle_cores = timeout_s, idle_cores
        self._new_slot = partial(_Slot, target, argument, what or argument or target, start_timeout_s)
        self._follows_load = workers == "auto"
        self._most = cores() if workers == "auto" else workers
        self._all = [self._new_slot() for _ in range(1 if workers == "auto" else workers)]
        self._free = list(self._all)
        """Used last in, first out: a warm worker is taken again before a second one is started."""
        self._queue: deque[_Request] = deque()
        """Calls that wait for their turn, in order."""
        self._is_dispatching = False
        self._call_s: float | None = None
        """What a call takes, about; None: none has ended yet."""
        self._following: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> WorkerReady:
        """Start one worker now, before the first call, to see whether it can. Raises RewardError with the reason."""
        slot = self._free.pop()
        try:
            worker = await slot.ready()
            if self._closed:
                await slot.clear()
            return worker.ready
        finally:
            self._give_back(slot)

    async def call(self, call: Call) -> list[Score]:
        """Make one call, which ends at most `timeout_s` after its turn came (plus the time to kill or start a worker).

        Cancelling loses only its scores: before its turn the call is dropped, after that it runs to its end.

        Returns:
            A score for each completion of the call.
        """
        count = len(call.completions)
        try:
            request = _Request(frame(call), count)
        except (TypeError, ValueError, OverflowError) as error:
            return [failed("exception", f"the row cannot be sent to a reward worker: {error}")] * count
        if self._closed:
            return [_CLOSED] * count
        if self._follows_load and self._following is None:
            self._following = asyncio.create_task(self._follow_load(), name="reward-pool")
        self._queue.append(request)
        self._dispatch_soon()
        try:
            scores = await request.scores
        except asyncio.CancelledError:
            if request.slot is not None:
                request.slot.recall()
            raise
        took_s = sum(score.seconds for score in scores)
        self._call_s = took_s if self._call_s is None else _MEMORY * self._call_s + (1 - _MEMORY) * took_s
        return scores

    def withdraw(self) -> None:
        """End the calls whose turn has not come with the failure `withdrawn`."""
        for slot in self._all:
            slot.recall()
        _end_all(self._queue, failed(WITHDRAWN, "not called: rewards are paused"))

    def _dispatch_soon(self) -> None:
        """Send calls once every task that is ready now has made its own."""
        if not self._is_dispatching:
            self._is_dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send the calls that wait to the workers that are free."""
        self._is_dispatching = False
        while self._free and not self._closed and self._first() is not None:
            slot = self._free.pop()
            share = -(-len(self._queue) // (len(self._free) + 1))
            batch: deque[_Request] = deque()
            while len(batch) < (min(share, self._most_at_once) if slot.is_warm else 1) and self._first() is not None:
                batch.append(request := self._queue.popleft())
                request.slot = slot
            running = asyncio.create_task(self._serve(slot, batch), name="reward-calls")
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def _first(self) -> _Request | None:
        """The first call that waits. Those whose callers have gone are dropped."""
        while self._queue and self._queue[0].scores.done():
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    @property
    def _most_at_once(self) -> int:
        if self._call_s is None:
            return 1
        return max(1, min(MOST_AT_ONCE, int(BATCH_S / max(self._call_s, 1e-9))))

    async def _serve(self, slot: _Slot, batch: deque[_Request]) -> None:
        try:
            await slot.serve(batch, self._timeout_s, self._again)
        finally:
            if self._closed:
                _end_all(batch, _CLOSED)
            self._give_back(slot)

    def _again(self, requests: Sequence[_Request]) -> None:
        """Let calls wait for their turn again, as the first."""
        for request in requests:
            request.slot = None
        self._queue.extendleft(reversed(requests))
        self._dispatch_soon()

    def _give_back(self, slot: _Slot) -> None:
        slot.free_since_s = asyncio.get_running_loop().time()
        self._free.append(slot)
        self._dispatch_soon()

    async def _follow_load(self) -> None:
        """Have as many workers as the load needs, as long as the pool is open."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = asyncio.get_running_loop().time()
            if self._is_one_missing(now_s):
                self._all.append(slot := self._new_slot())
                self._give_back(slot)
            elif len(self._all) > 1 and self._free and now_s - self._free[0].free_since_s > IDLE_S:
                self._all.remove(slot := self._free.pop(0))
                await slot.clear()

    def _is_one_missing(self, now_s: float) -> bool:
        """Whether a call has waited for longer than a call takes, and another worker would help. They start one by one."""
        first = self._first()
        if first is None or self._call_s is None or len(self._all) >= self._most:
            return False
        is_late = now_s - first.asked_s > max(self._call_s, LOOK_EVERY_S)
        return is_late and not any(slot.is_starting for slot in self._all) and self._idle_cores() >= 1

    async def close(self) -> None:
        """End every worker. Calls that run or wait return `aborted`."""
        self._closed = True
        if self._following is not None:
            await _cancel(self._following)
        for running in list(self._running):
            await _cancel(running)
        _end_all(self._queue, _CLOSED)
        for slot in self._all:
            await slot.clear()


_CLOSED = failed("aborted", "the reward was closed")


def _end_all(requests: deque[_Request], score: Score) -> None:
    while requests:
        request = requests.popleft()
        request.end([score] * request.count)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
