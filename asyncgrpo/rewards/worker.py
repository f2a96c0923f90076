"""A reward worker: the messages between it and the pool, and its process.

Messages are msgpack in frames that begin with their length. The pool sends a `Call` and the worker replies with a
`Score`, one at a time. A worker's first frame is a `WorkerReady`.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import msgspec

from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.rewards.base import describe, score_of_call
from asyncgrpo.types import Score

# -- between the pool and its workers ----------------------------------------------------------------------------------


LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20
"""Most bytes of a reply. A longer one means that something else wrote into the pipe."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """Tells that a worker has loaded its scorer, or why it cannot."""

    error: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score, and what its reward may read."""

    data_source: str
    completion_text: str
    ground_truth: Any
    info: dict[str, Any] = {}
    prompt_text: str = ""


def frame(message: msgspec.Struct) -> bytes:
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
"""Scores one call in a worker: returns a number or a dict, or an awaitable of one."""

BOOT = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
    "from asyncgrpo.rewards.worker import main; main(boot)"
)
_PR_SET_PDEATHSIG = 1


def command(target: str, argument: str) -> list[str]:
    """The command line of a worker that scores with `factory(argument)`, where `target` is `module:factory`.

    It finds the modules that this process finds. The factory returns a `Scorer`.
    """
    boot = {"path": sys.path, "parent": os.getpid(), "target": target, "argument": argument}
    return [sys.executable, "-u", "-c", BOOT, json.dumps(boot)]


def main(boot: dict[str, Any]) -> None:
    """Serve calls until the pool closes the pipe."""
    _die_with(boot["parent"])
    _be_expendable()
    calls, scores = _take_pipes()
    # A crash leaves its Python stack on stderr; the pool asks for the stack of a call that is late with SIGUSR1.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=scores, all_threads=False)
    sys.argv = ["reward-worker"]
    try:
        scorer = _load(boot["target"], boot["argument"])
    except AsyncGRPOError as error:
        _send(scores, WorkerReady(error=str(error)))
        return
    except BaseException as error:
        _send(scores, WorkerReady(error=f"cannot load {boot['argument'] or boot['target']}: {describe(error)}"))
        return
    _send(scores, WorkerReady())
    decoder = msgspec.msgpack.Decoder(Call)
    own_pid = os.getpid()
    with asyncio.Runner() as runner:
        while (body := read_frame(calls)) is not None:
            score = _score(scorer, decoder.decode(body), runner)
            if os.getpid() != own_pid:  # the reward forked, and this is the child that came back
                os._exit(0)
            _send(scores, score)


def _score(scorer: Scorer, call: Call, runner: asyncio.Runner) -> Score:
    def run() -> Any:
        value = scorer(call)
        return runner.run(_wait(value)) if inspect.isawaitable(value) else value

    started = time.perf_counter()
    score = score_of_call(run)
    return msgspec.structs.replace(score, seconds=time.perf_counter() - started)


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _load(target: str, argument: str) -> Scorer:
    module, _, factory = target.partition(":")
    scorer: Scorer = getattr(importlib.import_module(module), factory)(argument)
    return scorer


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that
        os._exit(1)


def _be_expendable() -> None:
    """Let the kernel kill this worker before the trainer when memory runs out, and write no core file in a crash."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pool's pipes to descriptors that no child inherits. stdin is empty then, and stdout goes to stderr."""
    calls, scores = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(calls, "rb"), os.fdopen(scores, "wb", buffering=0)


def _send(file: BinaryIO, message: msgspec.Struct) -> None:
    rest = memoryview(frame(message))
    while rest:
        rest = rest[file.write(rest) :]
