"""A reward worker: the messages between it and the pool, and its process.

Messages are msgpack in frames that begin with their length. The pool sends a `Call` and the worker replies with a list
of `Score`, one for each completion of the call. A worker's first frame is a `WorkerReady`. It begins a call once it has
taken the ticket with its number out of a second pipe, which the pool reads too: a call whose ticket the pool has taken back
is skipped.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import io
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.rewards.base import PRINTED, describe, score_of_call, scores_of_call
from asyncgrpo.types import Score

# -- between the pool and its workers ----------------------------------------------------------------------------------


LENGTH = struct.Struct("!I")
TICKET = struct.Struct("!Q")
"""The number of a call, from 0 in each worker."""
MOST_PRINTED = 1 << 14
"""Bytes that a worker may print in its life: enough to find a mistake, and too few to fill a disk."""
MAX_REPLY = 1 << 20
"""Most bytes of a reply. A longer one means that something else wrote into the pipe."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """Tells that a worker has loaded its scorer, or why it cannot."""

    error: str = ""
    about: str = ""
    """The function in words, and how it is called."""
    takes_groups: bool = False
    """Whether a call may have several completions."""
    kwargs: tuple[str, ...] = ()
    """Of the keyword arguments that were given, the names of those that it takes."""


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
    """Whether the scorer returns a list, with a value for each completion."""

    @property
    def completion_text(self) -> str:
        """The text of the only completion."""
        (text,) = self.completions
        return text


def frame(message: msgspec.Struct | list[Score]) -> bytes:
    """Encode one message. Raises TypeError, ValueError or OverflowError for values that msgpack cannot hold."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(file: BinaryIO) -> bytes | None:
    """Read the body of the next frame; None at the end of the file."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = file.read(length)
    return body if len(body) == length else None


# -- inside a worker ---------------------------------------------------------------------------------------------------


Scorer = Callable[[Call], Any]
"""Scores one call in a worker: returns a number or a dict, for a group a list of them, or an awaitable of that."""

BOOT = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
    "from asyncgrpo.rewards.worker import main; main(boot)"
)
_PR_SET_PDEATHSIG = 1


def command(target: str, argument: str, what: str, tickets: int) -> list[str]:
    """The command line of a worker that scores with `factory(argument)`, where `target` is `module:factory`.

    It finds the modules that this process finds. The factory returns a `Scorer`, and `what` is its name for a person.

    Args:
        tickets: the descriptor from which it reads tickets; not blocking.
    """
    boot = {"path": sys.path, "parent": os.getpid(), "target": target, "argument": argument, "what": what}
    boot["tickets"] = tickets
    return [sys.executable, "-u", "-c", BOOT, json.dumps(boot)]


def main(boot: dict[str, Any]) -> None:
    """Serve calls until the pool closes the pipe."""
    die_with(boot["parent"])
    be_expendable()
    calls, scores = take_pipes()
    printed = bound_output()
    os.set_inheritable(boot["tickets"], False)
    # A crash leaves its Python stack on stderr; the pool asks for the stack of a call that is late with SIGUSR1.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=scores, all_threads=False)
    sys.argv = ["reward-worker"]
    try:
        scorer = _load(boot["target"], boot["argument"])
    except AsyncGRPOError as error:
        send(scores, WorkerReady(error=str(error)))
        return
    except BaseException as error:
        send(scores, WorkerReady(error=f"cannot load {boot['what']}: {describe(error)}"))
        return
    about, takes_groups = getattr(scorer, "about", ""), getattr(scorer, "takes_groups", False)
    send(scores, WorkerReady(about=about, takes_groups=takes_groups, kwargs=getattr(scorer, "kwargs", ())))
    decoder = msgspec.msgpack.Decoder(Call)
    own_pid = os.getpid()
    with asyncio.Runner() as runner:
        for body in _calls(calls, boot["tickets"]):
            reply = _score(scorer, decoder.decode(body), runner)
            if os.getpid() != own_pid:  # the reward forked, and this is the child that came back
                os._exit(0)
            send(scores, printed.noted(reply))


def bound_output() -> "Printed":
    """Let Python's stdout and stderr be one `Printed`."""
    printed = Printed()
    sys.stdout = sys.stderr = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)
    return printed


class Printed(io.RawIOBase):
    """What a worker prints: its first `MOST_PRINTED` bytes go to stderr, the rest is dropped."""

    _left = MOST_PRINTED
    _is_noted = False

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """That of stderr."""
        return 2

    def write(self, data: Any) -> int:
        """Write as much as is left, and take the rest for written."""
        text = bytes(data)
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, text[: max(self._left, 0)])
        self._left -= len(text)
        return len(text)

    def noted(self, scores: list[Score]) -> list[Score]:
        """The scores; the first has a note, once, where more than that was printed and it has nothing else to say."""
        if self._left >= 0 or self._is_noted or scores[0].detail:
            return scores
        self._is_noted = True
        note = f"{PRINTED} {MOST_PRINTED:,} bytes, and the rest of what its worker prints is dropped"
        return [msgspec.structs.replace(scores[0], detail=note), *scores[1:]]


def _calls(file: BinaryIO, tickets: int) -> Iterator[bytes]:
    """The calls that have a ticket, until the pool closes a pipe."""
    read, waiting = 0, select.poll()
    waiting.register(tickets, select.POLLIN)
    while True:
        waiting.poll()
        try:
            ticket = os.read(tickets, TICKET.size)
        except BlockingIOError:  # the pool was quicker
            continue
        if not ticket:
            return
        (number,) = TICKET.unpack(ticket)
        body: bytes | None = None
        while read <= number:
            if (body := read_frame(file)) is None:
                return
            read += 1
        assert body is not None
        yield body


def _score(scorer: Scorer, call: Call, runner: asyncio.Runner) -> list[Score]:
    def run() -> Any:
        value = scorer(call)
        return runner.run(_wait(value)) if inspect.isawaitable(value) else value

    started, count = time.perf_counter(), len(call.completions)
    scores = scores_of_call(run, count) if call.is_group else [score_of_call(run)]
    seconds = (time.perf_counter() - started) / count
    return [msgspec.structs.replace(score, seconds=seconds) for score in scores]


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _load(target: str, argument: str) -> Scorer:
    module, _, factory = target.partition(":")
    scorer: Scorer = getattr(importlib.import_module(module), factory)(argument)
    return scorer


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that
        os._exit(1)


def be_expendable() -> None:
    """Let the kernel kill this worker before the trainer when memory runs out, and write no core file in a crash."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pool's pipes to descriptors that no child inherits. stdin is empty then, and stdout goes to stderr."""
    calls, scores = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(calls, "rb"), os.fdopen(scores, "wb", buffering=0)


def send(file: BinaryIO, message: msgspec.Struct | list[Score]) -> None:
    """Write one message whole."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[file.write(rest) :]
