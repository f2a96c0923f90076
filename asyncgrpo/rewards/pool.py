"""The pool of reward workers: guests that score completions, and are killed when they are late.

`Pool.call` always returns a score. When a call is late, its worker is killed; when a worker dies, the score names how; the next
call starts another worker. Each worker runs one call at a time. Calls queue here, in order, and their deadline begins with
their turn.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded
from asyncgrpo.rewards.base import Reward, Sampled, failed, place_of
from asyncgrpo.rewards.worker import Call, WorkerReady
from asyncgrpo.types import Prompt, Score

_GRACE_S = 0.05
"""Added to a deadline, so that a reply that only waited for this event loop still counts."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


async def start_worker(target: str, argument: str, what: str, timeout_s: float, hint: str = "") -> Guest:
    """Start a worker that scores with `factory(argument)`, where `target` is `module:factory`. Raises RewardError.

    Args:
        what, hint: as `Guest.start` has them.
    """
    boot = {"target": target, "argument": argument, "what": what}
    module, env = "asyncgrpo.rewards.worker", os.environ | _ONE_THREAD
    return await Guest.start(module, boot, what, timeout_s, ready=WorkerReady, env=env, hint=hint)


class _Slot:
    """A place for one worker, which may be started and killed many times."""

    def __init__(self, target: str, argument: str, what: str, start_timeout_s: float) -> None:
        self._start = partial(start_worker, target, argument, what, start_timeout_s)
        self._guest: Guest | None = None

    async def score(self, call: Call, timeout_s: float) -> list[Score]:
        """Score the completions of a call, or name what went wrong."""
        count, now = len(call.completions), asyncio.get_running_loop().time

        def ended(failure: str, detail: str, seconds: float = 0.0) -> list[Score]:
            return [failed(failure, detail, seconds=seconds / count)] * count

        try:
            guest = await self._ready()
        except RewardError as error:
            return ended("crash", str(error))
        begun_s = now()
        try:
            reply = guest.send(call)
            await asyncio.wait({reply}, timeout=timeout_s)
            if not reply.done():
                await asyncio.wait({reply}, timeout=_GRACE_S)
            if not reply.done():
                place = place_of(await guest.stack())
                await self.clear()
                detail = f"no score after {timeout_s:g} s" + (f"; it was at {place}" if place else "")
                return ended("timeout", detail, now() - begun_s)
            return msgspec.msgpack.decode(reply.result(), type=list[Score])
        except (TypeError, ValueError, OverflowError) as error:
            return ended("exception", f"the row cannot be sent to a reward worker: {error}")
        except (GuestEnded, msgspec.MsgspecError):
            return ended("crash", f"the reward worker {await self.clear()}", now() - begun_s)
        except BaseException:  # the pool closes
            await self.clear()
            raise

    async def _ready(self) -> Guest:
        """Return the worker, started if there is none. Raises RewardError."""
        if self._guest is not None and self._guest.has_ended:  # between two calls: no call is charged with it
            await self.clear()
        if self._guest is None:
            self._guest = await self._start()
            _count(1)
        return self._guest

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

    Workers start when a call finds all others busy, outside the call's deadline. Use a pool from one event loop, in a thread
    that outlives it.
    """

    def __init__(
        self,
        target: str,
        argument: str = "",
        *,
        what: str = "",
        workers: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._all = [_Slot(target, argument, what or argument or target, start_timeout_s) for _ in range(workers)]
        self._free = list(self._all)
        """Used last in, first out: a warm worker is taken again before a second one is started."""
        self._queue: deque[asyncio.Future[_Slot]] = deque()
        """Turns of the calls that wait, in order."""
        self._running: set[asyncio.Task[list[Score]]] = set()
        self._closed = False

    async def call(self, call: Call) -> list[Score]:
        """Make one call, which ends at most `timeout_s` after its turn came (plus the time to kill or start a worker).

        Cancelling loses only its scores: before its turn the call is dropped, after that it runs to its end.

        Returns:
            A score for each completion of the call.
        """
        loop = asyncio.get_running_loop()
        asked_s, turn = loop.time(), loop.create_future()
        self._queue.append(turn)
        self._dispatch()
        try:
            await asyncio.wait({turn})
        except asyncio.CancelledError:
            if not turn.cancel():
                self._give_back(turn.result())
            raise
        aborted = [failed("aborted", "the reward was closed")] * len(call.completions)
        if turn.cancelled():  # the pool closed
            return aborted
        waited_s = loop.time() - asked_s
        running = asyncio.create_task(self._score(turn.result(), call), name="reward-call")
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        await asyncio.wait({running})
        scores = aborted if running.cancelled() else running.result()
        return [msgspec.structs.replace(score, waited=waited_s) for score in scores]

    async def _score(self, slot: _Slot, call: Call) -> list[Score]:
        try:
            return await slot.score(call, self._timeout_s)
        finally:
            self._give_back(slot)

    def _give_back(self, slot: _Slot) -> None:
        self._free.append(slot)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give free slots to the calls that wait, in order. A closed pool gives none."""
        while self._queue and (self._free or self._closed):
            turn = self._queue.popleft()
            if self._closed:
                turn.cancel()
            elif not turn.done():  # else its caller has gone
                turn.set_result(self._free.pop())

    async def close(self) -> None:
        """End every worker. Calls that run or wait return `aborted`."""
        self._closed = True
        self._dispatch()
        for running in list(self._running):
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        for slot in self._all:
            await slot.clear()


class PoolReward(Reward):
    """A reward whose calls run in a pool, for each completion or once for a group."""

    def __init__(self, pool: Pool, about: str = "", *, takes_groups: bool = False) -> None:
        self.pool, self.about, self.takes_groups = pool, about, takes_groups

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        if self.takes_groups:
            return await self.pool.call(call_of(prompt, completions, is_group=True))
        replies = await asyncio.gather(*(self.pool.call(call_of(prompt, [one])) for one in completions))
        return [score for (score,) in replies]

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
