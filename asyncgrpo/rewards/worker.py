"""A reward worker: the messages between it and the pool, and what runs in its process.

The pool sends a `Call` and the worker replies with a list of `Score`, one for each completion of the call. It loads its scorer
first, and reports that as a `WorkerReady`.
"""

import asyncio
import faulthandler
import importlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.guests import Host
from asyncgrpo.rewards.base import describe, score_of_call, scores_of_call
from asyncgrpo.types import Score

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

    data_source: str
    completions: tuple[str, ...]
    """One, unless the scorer takes groups."""
    ground_truth: Any
    info: dict[str, Any] = {}
    prompt_text: str = ""
    """The prompt before tokenisation; of chat turns the last one."""
    turns: tuple[dict[str, Any], ...] = ()
    """Of `Prompt`."""
    completion_ids: tuple[tuple[int, ...], ...] = ()
    """The token ids of each completion, where the scorer takes groups."""
    is_group: bool = False
    """True if the scorer returns a list, with a value for each completion."""

    @property
    def completion_text(self) -> str:
        """The text of the only completion."""
        (text,) = self.completions
        return text


# -- the process -------------------------------------------------------------------------------------------------------


Scorer = Callable[[Call], Any]
"""Scores one call in a worker: returns a number or a dict, for a group a list of them, or an awaitable of that."""


def main(boot: dict[str, Any]) -> None:
    """Serve calls until the pool closes the pipes.

    Args:
        boot: `target` is `module:factory`, and `factory(argument)` returns the `Scorer`; `what` is its name in messages.
    """
    host = Host(boot, "reward-worker")
    faulthandler.enable()  # a crash, or SIGABRT to a call that is late, leaves its Python stack on stderr
    try:
        module, _, factory = boot["target"].partition(":")
        scorer: Scorer = getattr(importlib.import_module(module), factory)(boot["argument"])
    except AsyncGRPOError as error:
        return host.reply(0, WorkerReady(error=str(error)))
    except BaseException as error:
        return host.reply(0, WorkerReady(error=f"cannot load {boot['what']}: {describe(error)}"))
    found = {name: getattr(scorer, name) for name in ("about", "takes_groups", "kwargs") if hasattr(scorer, name)}
    host.reply(0, WorkerReady(**found))
    decoder, own_pid = msgspec.msgpack.Decoder(Call), os.getpid()
    with asyncio.Runner() as runner:
        while (call := host.next_call()) is not None:
            scores = _score(scorer, decoder.decode(call[1]), runner)
            if os.getpid() != own_pid:  # the reward forked, and this is the child that came back
                os._exit(0)
            host.reply(call[0], scores)


def _score(scorer: Scorer, call: Call, runner: asyncio.Runner) -> list[Score]:
    def run() -> Any:
        value = scorer(call)
        return runner.run(wait(value)) if inspect.isawaitable(value) else value

    async def wait(value: Awaitable[Any]) -> Any:
        return await value

    started, count = time.perf_counter(), len(call.completions)
    scores = scores_of_call(run, count) if call.is_group else [score_of_call(run)]
    seconds = (time.perf_counter() - started) / count
    return [msgspec.structs.replace(score, seconds=seconds) for score in scores]
