"""The inside of a worker process: load what scores, say hello, then score one call after the other in the main thread.

The pipes that the pool talks through are moved away from stdin and stdout at once, so prints land on stderr and a
reward that reads stdin finds it empty. A worker dies with its parent, however that one ends. It protects the trainer
from code that hangs or crashes; it is no sandbox against code that means harm.
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
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import msgspec

from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.rewards.base import describe, score_of_call
from asyncgrpo.rewards.frames import Call, Hello, frame, read_frame
from asyncgrpo.types import Score

Scorer = Callable[[Call], Any]
"""What a worker runs: gives a number or a dict, or an awaitable of one."""

BOOT = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
    "from asyncgrpo.rewards.worker import main; main(boot)"
)
_PR_SET_PDEATHSIG = 1


def command(target: str, argument: str) -> list[str]:
    """The command line of a worker that scores with `factory(argument)`, where `target` is `module:factory`.

    It finds the modules that this process finds; the factory gives a `Scorer`.
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
        _send(scores, Hello(error=str(error)))
        return
    except BaseException as error:
        _send(scores, Hello(error=f"cannot load {boot['argument'] or boot['target']}: {describe(error)}"))
        return
    _send(scores, Hello())
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
    """Ask the kernel to kill this process when the thread that started it ends, in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _be_expendable() -> None:
    """When memory runs out, lose a worker and not the trainer; and a crash leaves no core file."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pool's pipes to descriptors that no child inherits; leave an empty stdin and stdout joined to stderr."""
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
