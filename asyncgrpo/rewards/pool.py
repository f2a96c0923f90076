"""The pool of reward workers: processes that score completions, and are killed when they are late.

`Pool.call` always returns a score. When a call is late, the process group of its worker is killed; when a worker dies,
the score says so; the next call starts another worker. Each worker has one call at a time. Callers wait for their turn
here, in order, and their deadline begins with their turn.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time

import msgspec

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
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _WorkerEnded(Exception):
    """The pipe of a worker closed, or something other than a frame came out of it."""


class _Worker:
    """One running worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, target: str, argument: str, timeout_s: float) -> "_Worker":
        """Start a process and wait until it has loaded its scorer. Raises RewardError with the reason."""
        what = argument or target
        try:
            process = await asyncio.create_subprocess_exec(
                *command(target, argument),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # a process group of its own to kill, and no Ctrl-C from the terminal
            )
        except OSError as error:
            raise RewardError(f"no process could be started to score with {what}: {error}") from error
        worker = cls(process)
        try:
            ready = msgspec.msgpack.decode(await asyncio.wait_for(worker._reply(), timeout_s), type=WorkerReady)
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
        if ready.error:
            await worker.kill()
            raise RewardError(ready.error)
        return worker

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ask(self, body: bytes) -> Score:
        """Send one framed call and wait for its score, however long that takes. Raises _WorkerEnded."""
        try:
            self._stdin.write(body)
            await self._stdin.drain()
            return msgspec.msgpack.decode(await self._reply(), type=Score)
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

    def __init__(self, target: str, argument: str, start_timeout_s: float) -> None:
        self._start = (target, argument, start_timeout_s)
        self._worker: _Worker | None = None

    async def ready(self) -> _Worker:
        """The worker, started if there is none. Raises RewardError."""
        if self._worker is not None and self._worker.has_ended:  # between two calls: no call is charged with it
            await self.clear()
        if self._worker is None:
            self._worker = await _Worker.start(*self._start)
        return self._worker

    async def score(self, body: bytes, timeout_s: float) -> Score:
        """Score one framed call, or name what went wrong."""
        try:
            worker = await self.ready()
        except RewardError as error:
            return failed("crash", str(error))
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
            return failed("timeout", detail, seconds=time.perf_counter() - started)
        except _WorkerEnded:
            ending = await self.clear()
            return failed("crash", f"the reward worker {ending}", seconds=time.perf_counter() - started)
        except BaseException:  # the pool closes
            await _cancel(asking)
            await self.clear()
            raise

    async def clear(self) -> str:
        """Kill the worker if there is one. Returns how it ended."""
        worker, self._worker = self._worker, None
        return await worker.kill() if worker else "was not running"


class Pool:
    """Up to `workers` processes that score with `factory(argument)`, where `target` is `module:factory`.

    Workers start when calls need them, outside the call's deadline. Use a pool from one event loop, in a thread that
    outlives it: the kernel ends a worker with the thread that started it.
    """

    def __init__(
        self,
        target: str,
        argument: str = "",
        *,
        workers: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._all = [_Slot(target, argument, start_timeout_s) for _ in range(workers)]
        self._free = list(self._all)
        """Used last in, first out: a warm worker is taken again before a second one is started."""
        self._turn = asyncio.Semaphore(workers)
        """Counts the slots in `_free`; callers wait here, first come, first served."""
        self._running: set[asyncio.Task[Score]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start one worker now, to see whether it can. Raises RewardError with the reason."""
        slot = await self._take()
        try:
            await slot.ready()
            if self._closed:
                await slot.clear()
        finally:
            self._give_back(slot)

    async def call(self, call: Call) -> Score:
        """Score one completion, at most `timeout_s` after its turn came (plus the time to kill or start a worker).

        Cancelling loses only this score: before its turn the call is dropped, after that it runs to its end.
        """
        try:
            body = frame(call)
        except (TypeError, ValueError, OverflowError) as error:
            return failed("exception", f"the row cannot be sent to a reward worker: {error}")
        slot = await self._take()
        if self._closed:
            self._give_back(slot)
            return failed("aborted", "the reward was closed")
        running = asyncio.create_task(slot.score(body, self._timeout_s), name="reward-call")
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda _: self._give_back(slot))  # also if it is cancelled before it begins
        await asyncio.wait({running})  # unlike a plain await, this does not cancel it with us
        return failed("aborted", "the reward was closed") if running.cancelled() else running.result()

    async def _take(self) -> _Slot:
        await self._turn.acquire()
        return self._free.pop()

    def _give_back(self, slot: _Slot) -> None:
        self._free.append(slot)
        self._turn.release()

    async def close(self) -> None:
        """End every worker. Calls that run or wait return `aborted`."""
        self._closed = True
        for running in list(self._running):
            await _cancel(running)
        for slot in self._all:
            await slot.clear()


async def _cancel(task: "asyncio.Task[Score]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, _WorkerEnded):
        await task
