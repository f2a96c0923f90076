"""The pool of reward workers: processes that score completions, and are killed when they are late.

`Pool.call` always returns a score. When a call is late, the process group of its worker is killed; when a worker dies,
the score says so; the next call starts another worker. Each worker has one call at a time. Callers wait for their turn
here, in order, and their deadline begins with their turn.

A pool of `auto` workers follows the load: it begins with one, starts another when a call has waited for longer than a call
takes and a core is idle, and lets those go that were idle for `IDLE_S`.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from asyncgrpo.cores import cores, idle_cores
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import failed, place_of
from asyncgrpo.rewards.worker import LENGTH, MAX_REPLY, Call, WorkerReady, command, frame
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
_MEMORY = 0.9
"""How much the calls before count in the time that a call takes."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _WorkerEnded(Exception):
    """The pipe of a worker closed, or something other than a frame came out of it."""


class _Worker:
    """One running worker process."""

    ready: WorkerReady

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, target: str, argument: str, what: str, timeout_s: float) -> "_Worker":
        """Start a process and wait until it has loaded its scorer. Raises RewardError with the reason."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command(target, argument, what),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # a process group of its own to kill, and no Ctrl-C from the terminal
            )
        except OSError as error:
            raise RewardError(f"no process could be started to score with {what}: {error}") from error
        worker = cls(process)
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

    async def ask(self, body: bytes) -> list[Score]:
        """Send one framed call and wait for its scores, however long that takes. Raises _WorkerEnded."""
        try:
            self._stdin.write(body)
            await self._stdin.drain()
            return msgspec.msgpack.decode(await self._reply(), type=list[Score])
        except (OSError, msgspec.MsgspecError) as error:
            raise _WorkerEnded from error

    async def _reply(self) -> bytes:
        try:
            (length,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
            if length > MAX_REPLY:
                raise _WorkerEnded
            return await self._stdout.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise _WorkerEnded from error

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
        self.is_starting = False
        self.free_since_s = 0.0

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

    async def score(self, body: bytes, count: int, timeout_s: float) -> list[Score]:
        """Score one framed call for `count` completions, or name what went wrong."""
        try:
            worker = await self.ready()
        except RewardError as error:
            return [failed("crash", str(error))] * count
        started = time.perf_counter()
        asking = asyncio.create_task(worker.ask(body), name="reward-ask")
        try:
            await asyncio.wait({asking}, timeout=timeout_s)
            if not asking.done():
                await asyncio.wait({asking}, timeout=_GRACE_S)
            if asking.done():
                return asking.result()
            await _cancel(asking)
            place = await worker.place()
            await self.clear()
            detail = f"no score after {timeout_s:g} s" + (f"; it was at {place}" if place else "")
            return [failed("timeout", detail, seconds=(time.perf_counter() - started) / count)] * count
        except _WorkerEnded:
            ending = await self.clear()
            seconds = (time.perf_counter() - started) / count
            return [failed("crash", f"the reward worker {ending}", seconds=seconds)] * count
        except BaseException:  # the pool closes
            await _cancel(asking)
            await self.clear()
            raise

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
        self._turn = asyncio.Semaphore(len(self._all))
        """Counts the slots in `_free`; callers wait here, first come, first served."""
        self._waiting: dict[object, float] = {}
        """Since when each caller waits, the first of them first."""
        self._call_s: float | None = None
        """What a call takes, about; None: none has ended yet."""
        self._following: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[list[Score]]] = set()
        self._closed = False

    async def start(self) -> WorkerReady:
        """Start one worker now, to see whether it can. Raises RewardError with the reason."""
        slot = await self._take()
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
            body = frame(call)
        except (TypeError, ValueError, OverflowError) as error:
            return [failed("exception", f"the row cannot be sent to a reward worker: {error}")] * count
        asked_s = asyncio.get_running_loop().time()
        slot = await self._take()
        waited = asyncio.get_running_loop().time() - asked_s
        if self._closed:
            self._give_back(slot)
            return [failed("aborted", "the reward was closed")] * count
        running = asyncio.create_task(slot.score(body, count, self._timeout_s), name="reward-call")
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda _: self._give_back(slot))  # also if it is cancelled before it begins
        await asyncio.wait({running})  # unlike a plain await, this does not cancel it with us
        if running.cancelled():
            return [failed("aborted", "the reward was closed")] * count
        scores = running.result()
        took_s = sum(score.seconds for score in scores)
        self._call_s = took_s if self._call_s is None else _MEMORY * self._call_s + (1 - _MEMORY) * took_s
        return [msgspec.structs.replace(score, waited=waited) for score in scores]

    async def _take(self) -> _Slot:
        if self._follows_load and self._following is None:
            self._following = asyncio.create_task(self._follow_load(), name="reward-pool")
        caller = object()
        self._waiting[caller] = asyncio.get_running_loop().time()
        try:
            await self._turn.acquire()
        finally:
            del self._waiting[caller]
        return self._free.pop()

    def _give_back(self, slot: _Slot) -> None:
        slot.free_since_s = asyncio.get_running_loop().time()
        self._free.append(slot)
        self._turn.release()

    async def _follow_load(self) -> None:
        """Have as many workers as the load needs, as long as the pool is open."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = asyncio.get_running_loop().time()
            if self._is_one_missing(now_s):
                self._all.append(slot := self._new_slot())
                self._give_back(slot)
            elif len(self._all) > 1 and self._free and now_s - self._free[0].free_since_s > IDLE_S:
                await self._turn.acquire()  # at once, as one is free
                self._all.remove(slot := self._free.pop(0))
                await slot.clear()

    def _is_one_missing(self, now_s: float) -> bool:
        """Whether a call has waited for longer than a call takes, and another worker would help. They start one by one."""
        if not self._waiting or self._call_s is None or len(self._all) >= self._most:
            return False
        waited_s = now_s - next(iter(self._waiting.values()))
        is_late = waited_s > max(self._call_s, LOOK_EVERY_S)
        return is_late and not any(slot.is_starting for slot in self._all) and self._idle_cores() >= 1

    async def close(self) -> None:
        """End every worker. Calls that run or wait return `aborted`."""
        self._closed = True
        if self._following is not None:
            await _cancel(self._following)
        for running in list(self._running):
            await _cancel(running)
        for slot in self._all:
            await slot.clear()


async def _cancel(task: "asyncio.Task[list[Score]] | asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, _WorkerEnded):
        await task
