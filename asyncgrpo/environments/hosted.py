"""A user's environment or agent in guests beside the generator, which are replaced when they die or hang.

A call that is late fails its episode only. Its process gets no further episodes, and is killed once the others that live in it
are over; when a process dies, every episode in it fails by name.
"""

import asyncio
import itertools

import msgspec

from asyncgrpo.environments.base import Access, Environment, EnvironmentFailed, Episode, Reply, Task
from asyncgrpo.environments.worker import AGENT, Answer, Ask, Ready
from asyncgrpo.errors import RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded, run_apart
from asyncgrpo.types import Score

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


class _Host:
    """Code of a user in up to `processes` processes. Use it from one event loop."""

    def __init__(self, spec: str, *, processes: int, timeout_s: float, ready: Ready) -> None:
        """
        Args:
            timeout_s: deadline of one call.
            ready: as `check_environment` found it.
        """
        self._spec, self.timeout_s = spec, timeout_s
        self.scores, self.about = ready.scores, f"environment {ready.about}"
        self._most, self._processes = processes, list[_Process]()
        self._starting = asyncio.Lock()

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
        """End every process."""
        for process in self._processes:
            await process.guest.kill()


class Hosted(_Host):
    """The environment class of a user."""

    def episode(self, task: Task) -> Episode:
        """Return an episode for one completion."""
        return _HostedEpisode(self, task)


class HostedAgent(_Host):
    """The agent function of a user."""

    def __init__(self, spec: str, *, processes: int, timeout_s: float, ready: Ready) -> None:
        """
        Args:
            timeout_s: deadline of a whole call.
        """
        super().__init__(AGENT + spec, processes=processes, timeout_s=timeout_s, ready=ready)
        self.about = f"agent {ready.about}"

    async def run(self, task: Task, access: Access) -> Score | None:
        """Call the agent for one completion. Returns its score, unless it returned None.

        Raises:
            EnvironmentFailed: it raised, or did not return in time.
        """
        episode = next(_EPISODES)
        process = await self.place(episode)
        try:
            return (await process.ask(Ask(episode=episode, method="run", task=task, access=access))).score
        finally:
            await process.end(episode)


class _HostedEpisode:
    def __init__(self, host: Hosted, task: Task) -> None:
        self._host, self._task, self._id = host, task, next(_EPISODES)
        self._process: _Process | None = None

    async def reset(self) -> Reply:
        self._process = await self._host.place(self._id)
        return (await self._process.ask(Ask(episode=self._id, method="reset", task=self._task))).reply

    async def step(self, text: str) -> Reply:
        assert self._process is not None, "reset comes first"
        return (await self._process.ask(Ask(episode=self._id, method="step", text=text))).reply

    async def close(self) -> None:
        if self._process is not None:
            await self._process.end(self._id)


def check_environment(spec: str, *, timeout_s: float = START_TIMEOUT_S, with_schemas: bool = False) -> Ready:
    """Check a user's environment: load it in a process, which then ends. Blocks as long as the file's imports take.

    Args:
        with_schemas: the schemas of its tools are wanted too.
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
    return await Guest.start("asyncgrpo.environments.worker", boot, spec, timeout_s, ready=Ready)


_: type[Environment] = Hosted
