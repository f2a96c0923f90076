"""The pool of reward workers: guests that score completions, and are killed when they are late.

The pool sends a `Call` and the worker replies with a list of `Score`, one for each completion of the call. It loads its scorer
first, and reports that as a `WorkerReady`. Each worker runs one call at a time.

`PoolReward.call` always returns a score. When a call is late, its worker is killed; when a worker dies, the score names how;
the next call starts another worker. Calls queue here, in order, and their deadline begins with their turn.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from asyncgrpo.errors import AsyncGRPOError, RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded, Host
from asyncgrpo.rewards.base import Reward, Sampled, describe, failed, scores_of_call
from asyncgrpo.types import Prompt, Score

# -- messages ----------------------------------------------------------------------------------------------------------


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a worker that has loaded its scorer, or cannot."""

    error: str = ""
    about: str = ""
    """Name and form of the function."""
    takes_groups: bool = False
    """True if a call may have several completions."""
    kwargs: tuple[str, ...] = ()
    """Of the keyword arguments that were given, the names of those that the function takes."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one prompt to score, and what their reward may read."""

    prompt: Prompt
    """Without its token ids."""
    completions: tuple[str, ...]
    """One, unless the scorer takes groups."""
    completion_ids: tuple[tuple[int, ...], ...] = ()
    """The token ids of each completion, where the scorer takes groups."""

    @property
    def completion_text(self) -> str:
        (text,) = self.completions
        return text


# -- the process of a worker -------------------------------------------------------------------------------------------

Scorer = Callable[[Call], Any]
"""Scores one call in a worker: returns a number or a dict, for a group a list of them, or an awaitable of that."""


def main(boot: dict[str, Any]) -> None:
    """Serve calls until the pool closes the pipes.

    Args:
        boot: `target` is `module:factory`, and `factory(**arguments)` returns the `Scorer`; `what` is its name in messages.
    """
    host = Host(boot, "reward-worker")
    try:
        module, _, factory = boot["target"].partition(":")
        scorer: Scorer = getattr(importlib.import_module(module), factory)(**boot["arguments"])
    except AsyncGRPOError as error:
        return host.reply(0, WorkerReady(error=str(error)))
    except BaseException as error:
        return host.reply(0, WorkerReady(error=f"cannot load {boot['what']}: {describe(error)}"))
    found = {name: getattr(scorer, name) for name in ("about", "takes_groups", "kwargs") if hasattr(scorer, name)}
    ready = WorkerReady(**found)
    host.reply(0, ready)
    decoder, own_pid = msgspec.msgpack.Decoder(Call), os.getpid()
    with asyncio.Runner() as runner:
        while (call := host.next_call()) is not None:
            scores = _score(scorer, ready.takes_groups, decoder.decode(call[1]), runner)
            if os.getpid() != own_pid:  # the reward forked, and this is the child that came back
                os._exit(0)
            host.reply(call[0], scores)


def _score(scorer: Scorer, takes_groups: bool, call: Call, runner: asyncio.Runner) -> list[Score]:
    def run() -> Any:
        value = scorer(call)
        return runner.run(wait(value)) if inspect.isawaitable(value) else value

    async def wait(value: Awaitable[Any]) -> Any:
        return await value

    started, count = time.perf_counter(), len(call.completions)
    scores = scores_of_call(run, count if takes_groups else None)
    seconds = (time.perf_counter() - started) / count
    return [msgspec.structs.replace(score, seconds=seconds) for score in scores]


# -- the pool ----------------------------------------------------------------------------------------------------------

NOTHING: Mapping[str, Any] = MappingProxyType({})
_GRACE_S = 0.05
"""Added to a deadline, so that a reply that only waited for this event loop still counts."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


async def start_worker(target: str, arguments: Mapping[str, Any], what: str, timeout_s: float, hint: str = "") -> Guest:
    """Start a worker that scores with `factory(**arguments)`, where `target` is `module:factory`. Raises RewardError.

    Args:
        arguments: can be written as JSON.
        what, hint: as `Guest.start` has them.
    """
    boot = {"target": target, "arguments": dict(arguments), "what": what}
    env = os.environ | _ONE_THREAD
    return await Guest.start(__name__, boot, what, timeout_s, ready=WorkerReady, env=env, hint=hint)


class PoolReward(Reward):
    """Scores in up to `workers` processes with `factory(**arguments)`, where `target` is `module:factory`.

    Workers start when a call finds all others busy, outside the call's deadline. Use it from one event loop, in a thread that
    outlives it.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any] = NOTHING,
        *,
        what: str = "",
        workers: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        takes_groups: bool = False,
        about: str = "",
    ) -> None:
        """
        Args:
            what: name of the scorer in messages.
            timeout_s: deadline of a call.
            takes_groups: a call is for a group; otherwise for one completion.
        """
        self.takes_groups, self.about, self._timeout_s = takes_groups, about, timeout_s
        self._start = partial(start_worker, target, arguments, what or target, start_timeout_s)
        self._turn = asyncio.Semaphore(workers)
        """Calls wait for it in order."""
        self._idle: list[Guest] = []
        """Used last in, first out: a warm worker is taken again before a second one is started."""
        self._running: set[asyncio.Task[list[Score]]] = set()
        self._closed = False

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        if self.takes_groups:
            return await self.call(call_of(prompt, completions, is_group=True))
        replies = await asyncio.gather(*(self.call(call_of(prompt, [one])) for one in completions))
        return [score for (score,) in replies]

    async def call(self, call: Call) -> list[Score]:
        """Make one call, which ends at most `timeout_s` after its turn came (plus the time to kill or start a worker).

        Cancelling loses only its scores: before its turn the call is dropped, after that it runs to its end.

        Returns:
            A score for each completion of the call.
        """
        asked_s = time.monotonic()
        await self._turn.acquire()
        waited_s = time.monotonic() - asked_s
        running = asyncio.create_task(self._score(call), name="reward-call")
        self._running.add(running)
        running.add_done_callback(self._ended)
        await asyncio.wait({running})
        if running.cancelled():
            return _all_failed(call, "aborted", "the reward was closed")
        return [msgspec.structs.replace(score, waited=waited_s) for score in running.result()]

    def _ended(self, running: asyncio.Task[list[Score]]) -> None:
        self._running.discard(running)
        self._turn.release()

    async def _score(self, call: Call) -> list[Score]:
        """Score the completions of a call, or name what went wrong."""
        if self._closed:
            raise asyncio.CancelledError
        try:
            guest = await self._worker()
        except RewardError as error:
            return _all_failed(call, "crash", str(error))
        is_usable, begun_s = False, time.monotonic()
        try:
            reply = guest.send(call)
        except (TypeError, ValueError, OverflowError) as error:
            self._idle.append(guest)
            return _all_failed(call, "exception", f"the row cannot be sent to a reward worker: {error}")
        try:
            await asyncio.wait({reply}, timeout=self._timeout_s)
            if not reply.done():
                await asyncio.wait({reply}, timeout=_GRACE_S)
            if not reply.done():
                await guest.kill(with_stack=True)
                detail = f"no score after {self._timeout_s:g} s; stderr of its process shows where it was"
                return _all_failed(call, "timeout", detail, begun_s)
            scores = msgspec.msgpack.decode(reply.result(), type=list[Score])
            is_usable = True
            return scores
        except (GuestEnded, ValueError):  # ValueError: a reply of another form
            return _all_failed(call, "crash", f"the reward worker {await guest.kill()}", begun_s)
        finally:
            if is_usable:
                self._idle.append(guest)
            else:
                _count(-1)
                await guest.kill()

    async def _worker(self) -> Guest:
        """Take an idle worker, or start one. Raises RewardError."""
        while self._idle:
            guest = self._idle.pop()
            if not guest.has_ended:  # between two calls: no call is charged with it
                return guest
            _count(-1)
            await guest.kill()
        guest = await self._start()
        _count(1)
        return guest

    async def close(self) -> None:
        """End every worker. Calls that run or wait return `aborted`."""
        self._closed = True
        for running in list(self._running):
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        while self._idle:
            _count(-1)
            await self._idle.pop().kill()


def _all_failed(call: Call, failure: str, detail: str, begun_s: float | None = None) -> list[Score]:
    seconds = 0.0 if begun_s is None else (time.monotonic() - begun_s) / len(call.completions)
    return [failed(failure, detail, seconds=seconds)] * len(call.completions)


def _count(change: int) -> None:
    from asyncgrpo import metrics  # only here, because workers import this module too

    metrics.reward_workers.inc(change)


def call_of(prompt: Prompt, completions: Sequence[Sampled], *, is_group: bool = False) -> Call:
    return Call(
        prompt=msgspec.structs.replace(prompt, token_ids=()),
        completions=tuple(one.text for one in completions),
        completion_ids=tuple(tuple(one.token_ids) for one in completions) if is_group else (),
    )
