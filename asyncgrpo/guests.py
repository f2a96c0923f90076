"""A guest is a process that runs code of the user: start it, call it with deadlines, kill it with all that it started.

Frames on its pipes are a length, the number of a call and a msgpack body. A guest may reply to calls in any order. Its first
frame reports that it is ready. It begins a call once it has taken the ticket with its number out of a second pipe, which this
process reads too: a call whose ticket was taken back is never begun.
"""

import asyncio
import contextlib
import ctypes
import io
import json
import logging
import os
import re
import resource
import select
import signal
import struct
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

import msgspec

from asyncgrpo.errors import RewardError

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""Deadline of a start, imports included."""
MAX_REPLY = 1 << 23
"""Largest reply, bytes. A longer one means that something else wrote into the pipe."""
MOST_PRINTED = 1 << 14
"""Bytes that a guest may print in its life: enough to find a mistake, and too few to fill a disk."""
_STACK_TIMEOUT_S = 1.0
"""Only a guest that ignores signals takes this long to write its stack."""
_KILL_TIMEOUT_S = 5.0
"""SIGKILL works at once unless the kernel is stuck, as on a dead network disk."""
_HEAD, _TICKET = struct.Struct("!IQ"), struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class GuestEnded(Exception):
    """The process ended, or wrote something other than a frame. The message is how, such as "exited with code 1"."""


class Guest:
    """One running process. Use it from one event loop, in a thread that outlives it: the kernel ends a guest with the
    thread that started it."""

    def __init__(self, process: asyncio.subprocess.Process, tickets: tuple[int, int]) -> None:
        """
        Args:
            tickets: both ends of the pipe of tickets, which are closed with the guest.
        """
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._tickets: tuple[int, ...] = tickets
        self._sent = 0
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.ready = b""
        """Body of the first frame."""

    @classmethod
    async def start(
        cls,
        module: str,
        boot: Mapping[str, Any],
        what: str,
        timeout_s: float,
        *,
        env: Mapping[str, str] = os.environ,
        hint: str = "",
    ) -> "Guest":
        """Run `module.main(boot)` in a new process and wait for its first frame.

        Args:
            what: name of the user's code in messages.
            hint: ends the message for a start that misses its deadline.
        Raises:
            RewardError: one sentence.
        """
        run = (
            "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
            f"from {module} import main; main(boot)"
        )
        tickets = os.pipe()
        os.set_blocking(tickets[0], False)
        given = {"path": sys.path, "parent": os.getpid(), "tickets": tickets[0]} | dict(boot)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-c", run, json.dumps(given)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=tickets[:1],
                env=dict(env),  # uvloop takes no other mapping
                start_new_session=True,  # a process group of its own to kill, and no Ctrl-C from the terminal
            )
        except BaseException as error:
            for end in tickets:
                os.close(end)
            if not isinstance(error, OSError):  # cancelled
                raise
            raise RewardError(f"no process could be started for {what}: {error}") from error
        guest = cls(process, tickets)
        try:
            async with asyncio.timeout(timeout_s):
                _, guest.ready = await guest._frame()
        except TimeoutError:
            await guest.kill()
            raise RewardError(
                f"{what} was not imported within {timeout_s:g} s; does its import wait for something?{hint}"
            ) from None
        except GuestEnded:
            raise RewardError(f"the process {await guest.kill()} while it loaded {what}; see its stderr") from None
        except BaseException:  # cancelled
            await guest.kill()
            raise
        guest._reading = asyncio.create_task(guest._read(), name="guest")
        return guest

    @property
    def has_ended(self) -> bool:
        """True if the process ended, which the kernel knows before asyncio."""
        if self._process.returncode is not None or not self._tickets:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # asyncio's thread has already taken its exit status
            return True

    def send(self, bodies: Sequence[bytes]) -> list[asyncio.Future[bytes]]:
        """Send calls, which the guest begins in order. Returns the body of each reply, or GuestEnded."""
        loop = asyncio.get_running_loop()
        numbers = range(self._sent, self._sent + len(bodies))
        replies = [loop.create_future() for _ in numbers]
        if not self._tickets or self._reading is None or self._reading.done():
            _fail(replies, "ended")
            return replies
        self._sent += len(bodies)
        self._replies.update(zip(numbers, replies, strict=True))
        self._stdin.write(b"".join(map(_framed, numbers, bodies)))
        os.write(self._tickets[1], b"".join(map(_TICKET.pack, numbers)))
        return replies

    def take_back(self, most: int) -> int:
        """Take back calls that were not begun, the last ones and at most `most`. Returns their number."""
        if not self._tickets:
            return 0
        try:
            tickets = os.read(self._tickets[0], 1 << 16)
        except BlockingIOError:
            return 0
        count = min(len(tickets) // _TICKET.size, most)
        kept = len(tickets) - count * _TICKET.size
        os.write(self._tickets[1], tickets[:kept])
        for (number,) in _TICKET.iter_unpack(tickets[kept:]):
            self._replies.pop(number, None)
        return count

    async def stack(self) -> list[tuple[str, int]]:
        """Return file and line of each frame of the main thread, the innermost first. The guest can only be killed after it."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        text = b""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self._process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                # The stack arrives in many small pieces, the start of the process last.
                while b"in <module>" not in text and (more := await self._stdout.read(1 << 16)):
                    text += more
        found = re.findall(r'File "([^"]+)", line (\d+) in', text.decode(errors="replace"))
        return [(path, int(line)) for path, line in found]

    async def kill(self) -> str:
        """Kill the process and all it started. Returns how it ended, such as "exited with code 1"."""
        if self._tickets:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._stdin.close()
            for end in self._tickets:
                os.close(end)
            self._tickets = ()
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
        _fail(self._replies.values(), await self.kill())


def _framed(number: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body), number) + body


def _fail(replies: Iterable[asyncio.Future[bytes]], ending: str) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(GuestEnded(ending))
            reply.exception()  # a reply that nothing awaits is not reported


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because the caller may be inside a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="guest-check") as executor:
        return executor.submit(asyncio.run, coroutine).result()


# -- inside the process ------------------------------------------------------------------------------------------------


class Printed(io.RawIOBase):
    """Output of a guest: the first `MOST_PRINTED` bytes go to stderr, the rest is dropped."""

    _left = MOST_PRINTED

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of stderr."""
        return 2

    def write(self, data: Any) -> int:
        """Write as much as is left, and report all as written."""
        text = bytes(data)
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, text[: max(self._left, 0)])
        self._left -= len(text)
        return len(text)

    @property
    def was_cut(self) -> bool:
        """True if output was dropped."""
        return self._left < 0


class Host:
    """The process that started this guest: its calls, and the replies to it.

    A guest dies with the thread that started it, is killed before the trainer when memory runs out, and writes no core file.
    No child of it inherits the pipes; stdin is empty and stdout goes to stderr.
    """

    def __init__(self, boot: Mapping[str, Any], name: str) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != boot["parent"]:  # the parent ended before that
            os._exit(1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self._calls = os.fdopen(os.dup(0), "rb")
        self.replies: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._tickets: int = boot["tickets"]
        os.set_inheritable(self._tickets, False)
        self.printed = Printed()
        sys.stdout = sys.stderr = io.TextIOWrapper(self.printed, encoding="utf-8", errors="replace", write_through=True)
        sys.argv = [name]

    def next_call(self) -> tuple[int, bytes] | None:
        """Wait for a call and take its ticket. Returns its number and its body; None once the pipes are closed."""
        waiting = select.poll()
        waiting.register(self._tickets, select.POLLIN)
        while True:
            waiting.poll()
            try:
                ticket = os.read(self._tickets, _TICKET.size)
            except BlockingIOError:  # taken back meanwhile
                continue
            if not ticket:
                return None
            (wanted,) = _TICKET.unpack(ticket)
            while (call := self._next_frame()) is not None:
                if call[0] == wanted:
                    return call
            return None

    def _next_frame(self) -> tuple[int, bytes] | None:
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
