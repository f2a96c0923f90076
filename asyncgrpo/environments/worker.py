"""A process in which a user's environment or agent runs, and the messages between it and the generator (`host.py`).

Messages are msgpack in frames that begin with their length. Many episodes live in one process; each has one call at a
time. A method that is no coroutine runs in a thread, so that a slow one holds up nobody else.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from asyncgrpo.environments.agent import AGENT, UserAgent, load_agent
from asyncgrpo.environments.base import (
    Access,
    EnvironmentFailed,
    Reply,
    Task,
    names_of,
    reply_of_reset,
    reply_of_step,
)
from asyncgrpo.environments.tools import SPEC, ToolBox, load_tools, schemas_of
from asyncgrpo.errors import AsyncGRPOError, RewardError
from asyncgrpo.rewards.base import describe, score_of_value
from asyncgrpo.rewards.user import run_file, split_spec
from asyncgrpo.rewards.worker import be_expendable, bound_output, die_with, read_frame, send, take_pipes
from asyncgrpo.types import Score

DEFAULT_NAME = "Environment"
AT_ONCE = 256
"""Methods and agents that are no coroutines and run at the same time in one process."""

# -- messages ----------------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Tells that a process has loaded its environment, or why it cannot."""

    error: str = ""
    about: str = ""
    scores: bool = True
    tools: list[dict[str, Any]] = []
    """The JSON schemas of its tools, where they were asked for."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an episode's method."""

    episode: int
    method: Literal["reset", "step", "run", "close"]
    task: Task | None = None
    """With `reset` and `run`."""
    access: Access | None = None
    """With `run`, the whole call of an agent."""
    text: str = ""
    """With `step`."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the call returned, or the text of what it raised."""

    episode: int
    reply: Reply = Reply()
    score: Score | None = None
    """What an agent returned, unless that was None."""
    error: str = ""


# -- the process -------------------------------------------------------------------------------------------------------


BOOT = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
    "from asyncgrpo.environments.worker import main; main(boot)"
)


def command(spec: str, *, with_schemas: bool = False) -> list[str]:
    """The command line of a process for the environment `FILE.py`, `FILE.py:CLASS`, or `tools:` and a list.

    Args:
        with_schemas: its `Ready` holds the schemas of its tools, which takes seconds.
    """
    boot = {"path": sys.path, "parent": os.getpid(), "spec": spec, "with_schemas": with_schemas}
    return [sys.executable, "-u", "-c", BOOT, json.dumps(boot)]


def main(boot: dict[str, Any]) -> None:
    """Serve episodes until the generator closes the pipe."""
    die_with(boot["parent"])
    be_expendable()
    asks, answers = take_pipes()
    bound_output()
    faulthandler.enable()
    sys.argv = ["environment"]
    try:
        made = load(boot["spec"])
        tools = schemas_of(made.tools) if boot["with_schemas"] else []
    except AsyncGRPOError as error:
        send(answers, Ready(error=str(error)))
        return
    send(answers, Ready(about=made.about, scores=made.scores, tools=tools))
    asyncio.run(_serve(made, asks, answers))
    os._exit(0)  # a method that never returns would keep its thread, and the process


class UserClass:
    """An environment class of a user, checked."""

    def __init__(self, cls: Any, path: Path, name: str) -> None:
        """Raises RewardError: it has no such methods; one sentence."""
        where = f"{path}: {name}"
        if not callable(getattr(cls, "step", None)):
            raise RewardError(f"{where} has no method step(self, text), which answers a turn of the model")
        try:
            inspect.signature(cls.step).bind(None, "text")
        except TypeError as error:
            raise RewardError(f"{where}.step cannot be called as step(text): {error}") from None
        reset = getattr(cls, "reset", None)
        self._make = cls
        self._takes = None if reset is None else names_of(reset, Task.NAMES, f"{where}.reset", skip=1)
        self.tools: dict[str, Callable[..., Any]] = {}
        self.scores = bool(getattr(cls, "scores", True))
        self.about = f"{name} of {path.name}"

    def make(self) -> Any:
        """A new environment, for one episode."""
        return self._make()

    def arguments(self, task: Task) -> dict[str, Any] | None:
        """What its `reset` asks for; None: it has none."""
        if self._takes is None:
            return None
        known = task.named()
        return {name: known[name] for name in self._takes}


class UserTools(UserClass):
    """Tools, checked."""

    def __init__(self, specs: list[str]) -> None:
        """Raises RewardError, one sentence."""
        self.tools = load_tools(specs)
        self.scores, self.about = ToolBox.scores, f"tools {', '.join(self.tools)}"

    def make(self) -> ToolBox:
        """A box of the tools, for one episode."""
        return ToolBox(self.tools)

    def arguments(self, task: Task) -> None:
        """It asks for nothing."""


def load(spec: str) -> UserClass | UserAgent:
    """What `FILE.py`, `FILE.py:CLASS`, `tools:` and a JSON list, or `agent:` and `FILE.py:FUNCTION` name.

    Raises:
        RewardError: one sentence.
    """
    if spec.startswith(SPEC):
        return UserTools(json.loads(spec.removeprefix(SPEC)))
    if spec.startswith(AGENT):
        return load_agent(spec.removeprefix(AGENT))
    path, name = split_spec(spec, DEFAULT_NAME)
    module = run_file(path, "environment")
    cls = getattr(module, name, None)
    if not inspect.isclass(cls):
        own = [key for key, one in vars(module).items() if inspect.isclass(one) and one.__module__ == module.__name__]
        there = f"it has {', '.join(own)}: name one with {path.name}:{own[0]}" if own else "it has no class at all"
        raise RewardError(f"{path} has no class {name}; {there}")
    return UserClass(cls, path, name)


async def _serve(made: UserClass | UserAgent, asks: BinaryIO, answers: BinaryIO) -> None:
    loop, games, running = asyncio.get_running_loop(), dict[int, Any](), set[asyncio.Task[None]]()
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="environment")
    decoder = msgspec.msgpack.Decoder(Ask)
    runs = dict[int, asyncio.Task[None]]()

    async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        value = await loop.run_in_executor(threads, lambda: function(*arguments, **named))
        return await value if inspect.isawaitable(value) else value

    async def reply_to(ask: Ask) -> Reply:
        if ask.method == "step":
            return reply_of_step(await call(games[ask.episode].step, ask.text))
        if ask.method == "close":
            if (run := runs.get(ask.episode)) is not None:
                run.cancel()
            if (close := getattr(games.pop(ask.episode, None), "close", None)) is not None:
                await call(close)
            return Reply()
        assert ask.task is not None and isinstance(made, UserClass)
        game = games[ask.episode] = await call(made.make)
        arguments = made.arguments(ask.task)
        return Reply() if arguments is None else reply_of_reset(await call(game.reset, **arguments))

    async def score_of(ask: Ask) -> Score | None:
        assert ask.task is not None and ask.access is not None and isinstance(made, UserAgent)
        value = await call(made.call, **made.arguments(ask.task, ask.access))
        return None if value is None else score_of_value(value)

    async def answer(ask: Ask) -> None:
        try:
            if ask.method == "run":
                found = Answer(episode=ask.episode, score=await score_of(ask))
            else:
                found = Answer(episode=ask.episode, reply=await reply_to(ask))
        except EnvironmentFailed as error:
            found = Answer(episode=ask.episode, error=str(error))
        except BaseException as error:
            found = Answer(episode=ask.episode, error=describe(error))
        if ask.method != "close":
            send(answers, found)

    while (body := await asyncio.to_thread(read_frame, asks)) is not None:
        ask = decoder.decode(body)
        task = asyncio.create_task(answer(ask))
        running.add(task)
        task.add_done_callback(running.discard)
        if ask.method == "run":
            runs[ask.episode] = task
            task.add_done_callback(partial(runs.pop, ask.episode))
