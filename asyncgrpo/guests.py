"""A guest is a process that runs code of the user: start it, call it with deadlines, kill it with all that it started.

Frames on its pipes are a length, the number of a call and a msgpack body. A guest may reply to calls in any order. Its first
frame reports that it is ready, or why it cannot be.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import struct
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from asyncgrpo.errors import RewardError

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""Deadline of a start, imports included."""
MAX_REPLY = 1 << 23
"""Largest reply, bytes. A longer one means that something else wrote into the pipe."""
_STACK_TIMEOUT_S = 1.0
"""Only a guest that ignores signals takes this long to write its stack."""
_KILL_TIMEOUT_S = 5.0
"""SIGKILL works at once unless the kernel is stuck, as on a dead network disk."""
_HEAD = struct.Struct("!IQ")
_PR_SET_PDEATHSIG = 1


class GuestEnded(Exception):
    """The process ended, or wrote something other than a frame. The message is how, such as "exited with code 1"."""


class Guest:
    """One running process. Use it from one event loop, in a thread that outlives it: the kernel ends a guest with the
    thread that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._sent, self._is_killed = 0, False
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.ready: Any = None
        """First frame."""

    @classmethod
    async def start(
        cls,
        module: str,
        boot: Mapping[str, Any],
        what: str,
        timeout_s: float,
        *,
        ready: type,
        env: Mapping[str, str] = os.environ,
        hint: str = "",
    ) -> "Guest":
        """Run `module.main(boot)` in a new process and wait for its first frame.

        Args:
            what: name of the user's code in messages.
            ready: type of the first frame, which has an `error`, empty if there was none.
            hint: ends the message for a start that misses its deadline.
        Raises:
            RewardError: one sentence.
        """
        run = (
            "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
            f"from {module} import main; main(boot)"
        )
        given = {"path": sys.path, "parent": os.getpid()} | dict(boot)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-c", run, json.dumps(given)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(env),  # uvloop takes no other mapping
                start_new_session=True,  # a process group of its own to kill, and no Ctrl-C from the terminal
            )
        except OSError as error:
            raise RewardError(f"no process could be started for {what}: {error}") from error
        guest = cls(process)
        try:
            async with asyncio.timeout(timeout_s):
                guest.ready = msgspec.msgpack.decode((await guest._frame())[1], type=ready)
            if guest.ready.error:
                raise RewardError(guest.ready.error)
        except BaseException as error:
            ending = await guest.kill()
            if isinstance(error, TimeoutError):
                raise RewardError(
                    f"{what} was not imported within {timeout_s:g} s; does its import wait?{hint}"
                ) from None
            if isinstance(error, GuestEnded):
                raise RewardError(f"the process {ending} while it loaded {what}; see its stderr") from None
            raise
        guest._reading = asyncio.create_task(guest._read(), name="guest")
        return guest

    @property
    def has_ended(self) -> bool:
        """True if the process ended, which the kernel knows before asyncio."""
        if self._process.returncode is not None or self._is_killed:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # asyncio's thread has already taken its exit status
            return True

    def send(self, call: Any) -> asyncio.Future[bytes]:
        """Send a call. Returns the body of its reply, or GuestEnded. Raises TypeError, ValueError or OverflowError."""
        body = msgspec.msgpack.encode(call)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._is_killed or self._reading is None or self._reading.done():
            _fail(reply, "ended")
            return reply
        self._replies[self._sent] = reply
        self._stdin.write(_framed(self._sent, body))
        self._sent += 1
        return reply

    async def kill(self, *, with_stack: bool = False) -> str:
        """Kill the process and all it started. Returns how it ended, such as "exited with code 1".

        Args:
            with_stack: it writes its Python stack to its stderr first.
        """
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                if with_stack:
                    self._process.send_signal(signal.SIGUSR1)
                    await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=_STACK_TIMEOUT_S)
                os.killpg(self._process.pid, signal.SIGKILL)
            self._stdin.close()
        try:
            code = await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            log.warning("process %d does not end although it was killed; left behind", self._process.pid)
            return "does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def _frame(self) -> tuple[int, bytes]:
        try:
            length, number = _HEAD.unpack(await self._stdout.readexactly(_HEAD.size))
            if length > MAX_REPLY:
                raise GuestEnded
            return number, await self._stdout.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise GuestEnded from error

    async def _read(self) -> None:
        """Give every reply to its future, until the process ends."""
        with contextlib.suppress(GuestEnded):
            while True:
                number, body = await self._frame()
                reply = self._replies.pop(number, None)
                if reply is not None and not reply.done():
                    reply.set_result(body)
        ending = await self.kill()
        for reply in self._replies.values():
            _fail(reply, ending)


def _framed(number: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body), number) + body


def _fail(reply: asyncio.Future[bytes], ending: str) -> None:
    if not reply.done():
        reply.set_exception(GuestEnded(ending))
        reply.exception()  # a reply that nothing awaits is not reported


def split_spec(spec: str, default: str = "compute_score") -> tuple[Path, str]:
    """Split `my_reward.py:name` into an absolute path and a name, which is `default` if there is none."""
    head, colon, tail = spec.rpartition(":")
    path, name = (head, tail) if colon and tail.isidentifier() else (spec, default)
    return Path(path).expanduser().absolute(), name


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because the caller may be inside a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="guest-check") as executor:
        return executor.submit(asyncio.run, coroutine).result()


# -- inside the process ------------------------------------------------------------------------------------------------


class Host:
    """The process that started this guest: its calls, and the replies to it.

    A guest dies with the thread that started it, is killed before the trainer when memory runs out, and writes no core file.
    A crash and SIGUSR1 end it with its Python stack on stderr. No child of it inherits the pipes; stdin is empty and stdout
    goes to stderr.
    """

    def __init__(self, boot: Mapping[str, Any], name: str) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != boot["parent"]:  # the parent ended before that
            os._exit(1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, chain=True)
        self._calls = os.fdopen(os.dup(0), "rb")
        self.replies: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout, sys.argv = sys.stderr, [name]

    def next_call(self) -> tuple[int, bytes] | None:
        """Wait for a call. Returns its number and its body; None once the pipes are closed."""
        head = self._calls.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, number = _HEAD.unpack(head)
        body = self._calls.read(length)
        return (number, body) if len(body) == length else None

    def reply(self, number: int, message: Any) -> None:
        """Reply to a call. The first reply, to 0, reports that the guest is ready."""
        rest = memoryview(_framed(number, msgspec.msgpack.encode(message)))
        while rest:
            rest = rest[self.replies.write(rest) :]
