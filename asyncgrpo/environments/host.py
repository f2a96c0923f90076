"""Runs a user's environment or agent in processes beside the generator, which are replaced when they die or hang.

A call that is late fails its episode only. Its process gets no further episodes, and is killed once the others that live in it
are over; when a process dies, every episode in it fails by name.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import threading

import msgspec

from asyncgrpo.environments.agent import AGENT
from asyncgrpo.environments.base import Access, Environment, EnvironmentFailed, Episode, Reply, Task
from asyncgrpo.environments.worker import Answer, Ask, Ready, command
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.worker import LENGTH, frame
from asyncgrpo.types import Score

START_TIMEOUT_S = 60.0
"""How long a process may take to import the environment's file."""
KILL_TIMEOUT_S = 5.0
_MAX_ANSWER = 1 << 23
"""Most bytes of an answer. A longer one means that something else wrote into the pipe."""
_EPISODES = itertools.count()


class _Process:
    """One running process, and the episodes in it."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.episodes: set[int] = set()
        self.is_retired = False
        """It takes no new episodes."""
        self.ready = Ready()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: str, timeout_s: float, start_timeout_s: float, *, with_schemas: bool = False
    ) -> "_Process":
        """Start a process and wait until it has loaded the environment. Raises RewardError."""
        process = await asyncio.create_subprocess_exec(
            *command(spec, with_schemas=with_schemas),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self = cls(process, timeout_s)
        try:
            async with asyncio.timeout(start_timeout_s):
                self.ready = msgspec.msgpack.decode(await self._read(), type=Ready)
        except TimeoutError:
            await self.kill()
            raise RewardError(
                f"{spec} was not imported within {start_timeout_s:g} s; does it wait for something?"
            ) from None
        except (asyncio.IncompleteReadError, msgspec.MsgspecError):
            raise RewardError(f"the process of {spec} {await self.kill()} while it loaded the environment") from None
        except BaseException:
            await self.kill()
            raise
        if self.ready.error:
            await self.kill()
            raise RewardError(self.ready.error)
        self._reading = asyncio.create_task(self._listen(), name="environment")
        return self

    async def _read(self) -> bytes:
        (length,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
        if length > _MAX_ANSWER:
            raise asyncio.IncompleteReadError(b"", length)
        return await self._stdout.readexactly(length)

    async def _listen(self) -> None:
        """Hand every answer to its caller, until the process ends."""
        decoder = msgspec.msgpack.Decoder(Answer)
        try:
            while True:
                answer = decoder.decode(await self._read())
                if (waiting := self._waiting.pop(answer.episode, None)) is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            pass
        finally:
            self.is_retired = True
            ending = await self.kill()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EnvironmentFailed(f"the environment's process {ending}"))
            self._waiting.clear()

    async def ask(self, ask: Ask) -> Answer:
        """Make one call. Raises EnvironmentFailed."""
        if self._reading is None or self._reading.done():
            raise EnvironmentFailed("the environment's process ended")
        self._waiting[ask.episode] = waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._stdin.write(frame(ask))
                await self._stdin.drain()
                answer = await waiting
        except TimeoutError:
            self.is_retired = True
            raise EnvironmentFailed(f"{ask.method} did not return within {self._timeout_s:g} s") from None
        except OSError:
            raise EnvironmentFailed("the environment's process ended") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(f"the row cannot be sent to the environment: {error}") from error
        finally:
            self._waiting.pop(ask.episode, None)
        if answer.error:
            raise EnvironmentFailed(answer.error)
        return answer

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self, episode: int) -> None:
        """End an episode; the last one of a process that is retired ends the process."""
        self.episodes.discard(episode)
        if self.is_retired and not self.episodes:
            await self.kill()
        elif not self.has_ended:
            with contextlib.suppress(OSError):
                self._stdin.write(frame(Ask(episode=episode, method="close")))

    async def kill(self) -> str:
        """Kill the process and all it started. Returns how it ended, for a person."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        try:
            code = await asyncio.wait_for(self._process.wait(), KILL_TIMEOUT_S)
        except TimeoutError:
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class _Host:
    """Code of a user in up to `processes` processes. Use it from one event loop."""

    def __init__(
        self, spec: str, *, processes: int, timeout_s: float, ready: Ready, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """
        Args:
            timeout_s: of one call of a method, or of an agent.
            ready: as `check_environment` found it.
        """
        self._spec, self._timeout_s, self._start_timeout_s = spec, timeout_s, start_timeout_s
        self.scores, self.about = ready.scores, f"environment {ready.about}"
        self._most, self._processes = processes, list[_Process]()
        self._starting = asyncio.Lock()

    async def place(self, episode: int) -> _Process:
        """The process with the fewest episodes, which has this one too now; another process is started while there may be
        more and each has some.

        Raises:
            EnvironmentFailed: none can be started.
        """
        async with self._starting:
            self._processes = [one for one in self._processes if not one.has_ended]
            free = [one for one in self._processes if not one.is_retired]
            fewest = min(free, key=lambda one: len(one.episodes), default=None)
            if fewest is None or (fewest.episodes and len(free) < self._most):
                try:
                    fewest = await _Process.start(self._spec, self._timeout_s, self._start_timeout_s)
                except (RewardError, OSError) as error:
                    raise EnvironmentFailed(str(error)) from error
                self._processes.append(fewest)
            fewest.episodes.add(episode)
            return fewest

    async def close(self) -> None:
        """End every process."""
        for process in self._processes:
            await process.kill()


class Hosted(_Host):
    """The environment class of a user."""

    def episode(self, task: Task) -> Episode:
        """An episode for one completion."""
        return _HostedEpisode(self, task)


class HostedAgent(_Host):
    """The agent function of a user."""

    def __init__(self, spec: str, *, processes: int, timeout_s: float, ready: Ready) -> None:
        """
        Args:
            timeout_s: of a whole call.
        """
        super().__init__(AGENT + spec, processes=processes, timeout_s=timeout_s, ready=ready)
        self.about = f"agent {ready.about}"

    async def run(self, task: Task, access: Access) -> Score | None:
        """Call the agent for one completion: what it returned as a score, unless that was None.

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
        RewardError: there is no such file or class, or it has not the methods; one sentence.
    """
    found: list[Ready | BaseException] = []

    async def load() -> Ready:
        process = await _Process.start(spec, timeout_s, timeout_s, with_schemas=with_schemas)
        await process.kill()
        return process.ready

    def run() -> None:
        try:
            found.append(asyncio.run(load()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="environment-check")  # the caller may be inside a running event loop
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


_: type[Environment] = Hosted
