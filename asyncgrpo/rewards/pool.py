"""The pool of reward workers: guests that score completions, and are killed when they are late.

`Pool.call` always returns a score. When a call is late, its worker is killed; when a worker dies, the score names how; the next
call starts another worker. Each worker runs one call at a time. Calls queue here, in order, and their deadline begins with
their turn.

Quick calls that queue are sent to a worker together. While one of them takes long, the pool takes back those that the worker
has not begun, and they queue for any worker again.

A pool of `auto` workers follows the load: it begins with one, starts another when a call has waited for longer than a call
takes and a core is idle, and ends those that were idle for `IDLE_S`.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded
from asyncgrpo.host import cores, idle_cores
from asyncgrpo.rewards.base import WITHDRAWN, ConfiguredReward, Sampled, failed, place_of
from asyncgrpo.rewards.worker import Call, WorkerReady
from asyncgrpo.types import Prompt, Score

_GRACE_S = 0.05
"""Added to a deadline, so that a reply that only waited for this event loop still counts."""
LOOK_EVERY_S = 0.25
"""Interval at which a pool follows its load. A wait that is shorter is not worth a process."""
IDLE_S = 60.0
"""Idle time after which a worker ends, where others are left."""
BATCH_S, MOST_AT_ONCE = 0.01, 64
"""Expected duration and number of calls that are sent together."""
RECALL_S = 0.02
"""A call that takes longer does not keep those that were sent with it."""
_MEMORY = 0.9
"""Weight of the calls before in the mean duration of a call."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


async def start_worker(
    target: str, argument: str, what: str, timeout_s: float, hint: str = ""
) -> tuple[Guest, WorkerReady]:
    """Start a worker that scores with `factory(argument)`, where `target` is `module:factory`. Raises RewardError.

    Args:
        what, hint: as `Guest.start` has them.
    """
    boot = {"target": target, "argument": argument, "what": what}
    guest = await Guest.start(
        "asyncgrpo.rewards.worker", boot, what, timeout_s, env=os.environ | _ONE_THREAD, hint=hint
    )
    ready = msgspec.msgpack.decode(guest.ready, type=WorkerReady)
    if ready.error:
        await guest.kill()
        raise RewardError(ready.error)
    return guest, ready


class _Request:
    """A call, and the scores that its caller waits for."""

    def __init__(self, body: bytes, count: int) -> None:
        """
        Args:
            body: the call, encoded.
            count: completions of the call.
        """
        self.body, self.count = body, count
        self._loop = asyncio.get_running_loop()
        self.scores: asyncio.Future[list[Score]] = self._loop.create_future()
        self.asked_s = self.begun_s = self._loop.time()
        self._waited_s: float | None = None
        self.slot: _Slot | None = None
        """The slot that it was sent to."""

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


class _Slot:
    """A place for one worker, which may be started and killed many times."""

    def __init__(self, target: str, argument: str, what: str, start_timeout_s: float) -> None:
        self._start = partial(start_worker, target, argument, what, start_timeout_s)
        self._guest: Guest | None = None
        self._batch: deque[_Request] = deque()
        self._again: Callable[[Sequence[_Request]], object] = len
        self.is_starting = False
        self.free_since_s = 0.0

    @property
    def is_warm(self) -> bool:
        """True if it has a worker."""
        return self._guest is not None

    async def _ready(self) -> Guest:
        """Return the worker, started if there is none. Raises RewardError."""
        if self._guest is not None and self._guest.has_ended:  # between two calls: no call is charged with it
            await self.clear()
        if self._guest is None:
            self.is_starting = True
            try:
                self._guest, _ = await self._start()
            finally:
                self.is_starting = False
            _count(1)
        return self._guest

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
            guest = await self._ready()
        except RewardError as error:
            while batch:
                batch.popleft().fail("crash", str(error))
            return
        try:
            for reply in guest.send([request.body for request in batch]):
                if not batch:  # the rest was taken back
                    break
                batch[0].begin()
                await self._wait(reply, batch[0].begun_s + timeout_s)
                scores = msgspec.msgpack.decode(reply.result(), type=list[Score])
                batch.popleft().end(scores)
        except TimeoutError:
            place = place_of(await guest.stack())
            await self.clear()
            detail = f"no score after {timeout_s:g} s" + (f"; it was at {place}" if place else "")
            batch.popleft().fail("timeout", detail)
            again(batch)
        except (GuestEnded, msgspec.MsgspecError):
            batch.popleft().fail("crash", f"the reward worker {await self.clear()}")
            again(batch)
        except BaseException:  # the pool closes
            await self.clear()
            raise

    async def _wait(self, reply: asyncio.Future[bytes], deadline_s: float) -> None:
        """Wait for the reply to the first call. Raises TimeoutError."""
        now = asyncio.get_running_loop().time
        if len(self._batch) > 1 and not reply.done():
            await asyncio.wait({reply}, timeout=min(RECALL_S, deadline_s - now()))
            if not reply.done():
                self.recall()
        for until_s in (deadline_s, deadline_s + _GRACE_S):
            if not reply.done():
                await asyncio.wait({reply}, timeout=max(0.0, until_s - now()))
        if not reply.done():
            raise TimeoutError

    def recall(self) -> None:
        """Let all calls but the first, as far as they have not begun here, queue for any worker again."""
        count = self._guest.take_back(len(self._batch) - 1) if self._guest is not None and self._batch else 0
        self._again([self._batch.pop() for _ in range(count)][::-1])

    async def clear(self) -> str:
        """Kill the worker if there is one. Returns how it ended."""
        guest, self._guest = self._guest, None
        if guest is None:
            return "was not running"
        _count(-1)
        return await guest.kill()


def _count(change: int) -> None:
    from asyncgrpo import metrics  # only here, because workers import this module too

    metrics.reward_workers.inc(change)


class Pool:
    """Up to `workers` processes that score with `factory(argument)`, where `target` is `module:factory`.

    With `auto` they are as many as the load needs, and no more than there are cores. Workers start when calls need them,
    outside the call's deadline. Use a pool from one event loop, in a thread that outlives it.
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
        """Mean duration of a call; None: none has ended yet."""
        self._following: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    async def call(self, call: Call) -> list[Score]:
        """Make one call, which ends at most `timeout_s` after its turn came (plus the time to kill or start a worker).

        Cancelling loses only its scores: before its turn the call is dropped, after that it runs to its end.

        Returns:
            A score for each completion of the call.
        """
        count = len(call.completions)
        try:
            request = _Request(msgspec.msgpack.encode(call), count)
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
        """Return True if a call has waited for longer than a call takes and another worker would help. They start one by one."""
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


class PoolReward(ConfiguredReward):
    """A reward whose calls run in a pool, for each completion or once for a group."""

    def __init__(self, pool: Pool, about: str = "", *, takes_groups: bool = False) -> None:
        self.pool, self.about, self.takes_groups = pool, about, takes_groups

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        if self.takes_groups:
            return await self.pool.call(call_of(prompt, completions, is_group=True))
        replies = await asyncio.gather(*(self.pool.call(call_of(prompt, [one])) for one in completions))
        return [score for (score,) in replies]

    def withdraw(self) -> None:
        """See `rewards.base.ConfiguredReward`."""
        self.pool.withdraw()

    async def close(self) -> None:
        """End every worker process."""
        await self.pool.close()


def call_of(prompt: Prompt, completions: Sequence[Sampled], *, is_group: bool = False) -> Call:
    """Return the call to a worker that scores these completions of this prompt."""
    return Call(
        data_source=prompt.source,
        completions=tuple(one.text for one in completions),
        ground_truth=prompt.answer,
        info=prompt.info,
        prompt_text=prompt.turns[-1]["content"] if prompt.turns else prompt.text,
        turns=prompt.turns,
        completion_ids=tuple(tuple(one.token_ids) for one in completions) if is_group else (),
        is_group=is_group,
    )
