"""A user's environment, tools or agent in guests beside the generator, which are replaced when they die or hang.

Many episodes live in one process; each has one call at a time. A method that is not a coroutine runs in a thread, so that a slow
one does not delay others. An agent is a function that calls the model through an OpenAI-compatible URL and returns a reward:
one call for each completion.

A call that is late fails its episode only. Its process gets no further episodes, and is killed once the others that live in it
are over; when a process dies, every episode in it fails by name.
"""

import asyncio
import inspect
import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from asyncgrpo.environments.base import (
    TASK_NAMES,
    Access,
    EnvironmentFailed,
    Reply,
    Task,
    call_function,
    names_of,
    reply_of_reset,
    reply_of_step,
)
from asyncgrpo.environments.tools import BUILTIN, SPEC, ToolBox, load_tools, schemas_of
from asyncgrpo.errors import AsyncGRPOError, RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded, Host, run_apart, split_spec
from asyncgrpo.rewards.base import MAX_DETAIL, describe, score_of_value
from asyncgrpo.rewards.user import find_in, run_file
from asyncgrpo.types import Score

AGENT = "agent:"
"""Prefix of the specification of an agent, among those of environments."""

# -- messages ----------------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a process that has loaded its environment, or cannot."""

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
    """The value of a call, or the text of what it raised."""

    reply: Reply = Reply()
    score: Score | None = None
    """Of an agent, unless it returned None."""
    error: str = ""


# -- what is loaded ----------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Code of a user, checked."""

    about: str
    make: Callable[..., Any]
    """Makes an environment for one episode; of an agent, the whole call."""
    takes: tuple[str, ...] | None = None
    """Names that `reset`, or an agent, takes; None: it has no `reset`."""
    scores: bool = True
    tools: dict[str, Callable[..., Any]] = {}


def load(spec: str) -> Loaded:
    """Load what a built-in name, `FILE.py`, `FILE.py:CLASS`, `tools:` and a JSON list, or `agent:` and `FILE.py:FUNCTION` name.

    Raises:
        RewardError: one sentence.
    """
    if spec in BUILTIN:
        return _environment(BUILTIN[spec], spec, spec)
    if spec.startswith(SPEC):
        tools = load_tools(json.loads(spec.removeprefix(SPEC)))
        about = f"environment tools {', '.join(tools)}"
        return Loaded(about=about, make=partial(ToolBox, tools), scores=ToolBox.scores, tools=tools)
    if spec.startswith(AGENT):
        path, name = split_spec(spec.removeprefix(AGENT), "run")
        run = find_in(run_file(path, "agent"), path, name, "function")
        # Its client would ask a proxy for our address otherwise.
        direct = ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1"]))
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = direct
        takes = names_of(run, (*Access.__struct_fields__, *TASK_NAMES), f"{path}: {name}")
        if "base_url" not in takes:
            raise RewardError(f"{path}: {name} takes no base_url, so it cannot reach the model that is trained")
        return Loaded(about=f"agent {name} of {path.name}", make=run, takes=takes)
    path, name = split_spec(spec, "Environment")
    cls = find_in(run_file(path, "environment"), path, name, "class")
    return _environment(cls, f"{path}: {name}", f"{name} of {path.name}")


def _environment(cls: Any, where: str, about: str) -> Loaded:
    if not callable(getattr(cls, "step", None)):
        raise RewardError(f"{where} has no method step(self, text), which answers a turn of the model")
    try:
        inspect.signature(cls.step).bind(*[None] * _num_bound(cls, "step"), "text")
    except TypeError as error:
        raise RewardError(f"{where}.step cannot be called as step(text): {error}") from None
    reset = getattr(cls, "reset", None)
    takes = None if reset is None else names_of(reset, TASK_NAMES, f"{where}.reset", skip=_num_bound(cls, "reset"))
    return Loaded(about=f"environment {about}", make=cls, takes=takes, scores=bool(getattr(cls, "scores", True)))


def _num_bound(cls: Any, name: str) -> int:
    """Return the number of parameters that an instance adds to those of `getattr(cls, name)`: 1, its `self`, or 0."""
    return int(not isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod))


# -- the process -------------------------------------------------------------------------------------------------------


def main(boot: dict[str, Any]) -> None:
    """Serve episodes until the generator closes the pipes.

    Args:
        boot: `spec` is that of `load`; `with_schemas`: `Ready` holds the schemas of its tools, which takes seconds.
    """
    host = Host(boot, "environment")
    try:
        made = load(boot["spec"])
        tools = schemas_of(made.tools) if boot["with_schemas"] else []
    except AsyncGRPOError as error:
        return host.reply(0, Ready(error=str(error)))
    host.reply(0, Ready(about=made.about, scores=made.scores, tools=tools))
    asyncio.run(_serve(made, host))
    os._exit(0)  # a method that never returns would keep its thread, and the process


async def _serve(made: Loaded, host: Host) -> None:
    games = dict[int, Any]()
    running = dict[tuple[int, str], asyncio.Task[None]]()  # by episode and method
    decoder = msgspec.msgpack.Decoder(Ask)

    async def answer_to(ask: Ask) -> Answer:
        match ask.method:
            case "step":
                return Answer(reply=reply_of_step(await call_function(games[ask.episode].step, ask.text)))
            case "close":
                if (run := running.get((ask.episode, "run"))) is not None:
                    run.cancel()
                if ask.episode not in games and (reset := running.get((ask.episode, "reset"))) is not None:
                    await asyncio.wait({reset})  # which still makes the environment
                if (close := getattr(games.pop(ask.episode, None), "close", None)) is not None:
                    await call_function(close)
                return Answer()
        assert ask.task is not None
        known = ask.task if ask.access is None else ask.task | msgspec.structs.asdict(ask.access)
        arguments = {name: known[name] for name in made.takes or ()}
        if ask.method == "run":
            value = await call_function(made.make, **arguments)
            return Answer(score=None if value is None else score_of_value(value))
        game = games[ask.episode] = await call_function(made.make)
        if made.takes is None:
            return Answer()
        return Answer(reply=reply_of_reset(await call_function(game.reset, **arguments)))

    async def answer(number: int, ask: Ask) -> None:
        try:
            found = await answer_to(ask)
        except BaseException as error:
            found = Answer(error=describe(error)[:MAX_DETAIL])
        host.reply(number, found)

    while (asked := await asyncio.to_thread(host.next_call)) is not None:
        ask = decoder.decode(asked[1])
        key = ask.episode, ask.method
        running[key] = asyncio.create_task(answer(asked[0], ask))
        running[key].add_done_callback(partial(lambda key, _: running.pop(key, None), key))


# -- beside the generator ----------------------------------------------------------------------------------------------

AGENT_CALLS = 20
"""Deadline of a whole call of an agent, in deadlines of a step."""
_EPISODES = itertools.count()


class _Process:
    """One running process, and the episodes in it."""

    def __init__(self, guest: Guest, timeout_s: float) -> None:
        self.guest, self._timeout_s = guest, timeout_s
        self.episodes: set[int] = set()
        self.is_retired = False
        """True if it takes no new episodes."""

    async def ask(self, ask: Ask) -> Answer:
        """Make one call. Raises EnvironmentFailed."""
        try:
            reply = self.guest.send(ask)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(f"the row cannot be sent to the environment: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = msgspec.msgpack.decode(await reply, type=Answer)
        except TimeoutError:
            self.is_retired = True
            raise EnvironmentFailed(f"{ask.method} did not return within {self._timeout_s:g} s") from None
        except (GuestEnded, msgspec.MsgspecError) as ending:
            raise EnvironmentFailed(f"the environment's process {ending}") from None
        if answer.error:
            raise EnvironmentFailed(answer.error)
        return answer

    async def end(self, episode: int) -> None:
        """End an episode; the last one of a process that is retired ends the process."""
        self.episodes.discard(episode)
        if self.is_retired and not self.episodes:
            await self.guest.kill()
        else:
            self.guest.send(Ask(episode=episode, method="close"))


class Hosted:
    """A class of environments or an agent of the user in up to `processes` processes. Use it from one event loop."""

    def __init__(self, spec: str, *, processes: int, timeout_s: float, ready: Ready) -> None:
        """
        Args:
            timeout_s: deadline of one call: of a step or reset, or of an agent's whole call.
            ready: as `check_environment` found it.
        """
        self._spec, self.timeout_s = spec, timeout_s
        self.scores, self.about = ready.scores, ready.about
        self._most, self._processes = processes, list[_Process]()
        self._starting = asyncio.Lock()

    def episode(self, task: Task) -> "_HostedEpisode":
        return _HostedEpisode(self, task)

    async def run(self, task: Task, access: Access) -> Score | None:
        """Call the agent for one completion. Returns its score, unless it returned None.

        Raises:
            EnvironmentFailed: it raised, or did not return in time.
        """
        episode = _HostedEpisode(self, task)
        try:
            return (await episode.ask(method="run", task=task, access=access)).score
        finally:
            await episode.close()

    async def place(self, episode: int) -> _Process:
        """Add an episode to the process with the fewest, or to a new one while each has some and there may be more.

        Raises:
            EnvironmentFailed: none can be started.
        """
        async with self._starting:
            self._processes = [one for one in self._processes if not one.guest.has_ended]
            free = [one for one in self._processes if not one.is_retired]
            fewest = min(free, key=lambda one: len(one.episodes), default=None)
            if fewest is None or (fewest.episodes and len(free) < self._most):
                try:
                    fewest = _Process(await _start(self._spec, START_TIMEOUT_S), self.timeout_s)
                except RewardError as error:
                    raise EnvironmentFailed(str(error)) from error
                self._processes.append(fewest)
            fewest.episodes.add(episode)
            return fewest

    async def close(self) -> None:
        for process in self._processes:
            await process.guest.kill()


class _HostedEpisode:
    def __init__(self, host: Hosted, task: Task) -> None:
        self._host, self._task, self._id = host, task, next(_EPISODES)
        self._process: _Process | None = None

    async def reset(self) -> Reply:
        return (await self.ask(method="reset", task=self._task)).reply

    async def step(self, text: str) -> Reply:
        return (await self.ask(method="step", text=text)).reply

    async def ask(self, **call: Any) -> Answer:
        """Make one call, which has these fields of `Ask`. Raises EnvironmentFailed."""
        if self._process is None:
            self._process = await self._host.place(self._id)
        return await self._process.ask(Ask(episode=self._id, **call))

    async def close(self) -> None:
        if self._process is not None:
            await self._process.end(self._id)


def check_environment(spec: str, *, timeout_s: float = START_TIMEOUT_S, with_schemas: bool = False) -> Ready:
    """Check a user's environment: load it in a process, which then ends. Blocks as long as the file's imports take.

    Raises:
        RewardError: the file or class does not exist, or it lacks the methods; one sentence.
    """

    async def load() -> Ready:
        guest = await _start(spec, timeout_s, with_schemas=with_schemas)
        await guest.kill()
        return guest.ready

    return run_apart(load())


async def _start(spec: str, timeout_s: float, *, with_schemas: bool = False) -> Guest:
    """Start a process and wait until it has loaded the environment. Raises RewardError."""
    boot = {"spec": spec, "with_schemas": with_schemas}
    return await Guest.start(__name__, boot, spec, timeout_s, ready=Ready)
