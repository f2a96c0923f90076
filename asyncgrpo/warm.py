"""A run on the CPU imports torch and its engine once, in a warm process; its other processes are forks of that one.

    driver ── begin ──▶ the warm process: the standard library's fork server, which imports `cluster/preload.py`
           ── call ──▶ a fork, which calls one function and ends
    Ray    ── start a worker ──▶ this file as a script ──▶ a fork, which becomes the worker
    engine ── start a scheduler ──▶ a fork

Importing torch, transformers and SGLang takes seconds, and five processes of a small run need them. The warm process ends
with the driver. Without it, processes start and import on their own: after it was killed, on GPUs, whose libraries cannot be
forked, and on a Ray cluster. Only the standard library is imported here.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose `types` would hide that of the standard library

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver, process, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

ADDRESS = "ASYNCGRPO_WARM"
"""Environment variable of the processes of a run: the socket of the warm process."""
ENGINE = "ASYNCGRPO_WARM_ENGINE"
"""Environment variable of the warm process: the engine that it imports."""
_PRELOAD = "asyncgrpo.cluster.preload"
_NEWEST_PYTHON = (3, 13)
"""Later fork servers require a key that only the process that started them has."""
_SETUP = "setup_worker.py"
"""The script that Ray runs to start a worker, beside that of the worker itself."""
_FOR_SETUP = ("--serialized-runtime-env-context=", "--language=")

Result = TypeVar("Result")
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


# -- the driver --------------------------------------------------------------------------------------------------------


def begin(engine: str, folder: Path) -> None:
    """Start the warm process, which imports the libraries of a run with this engine. Its socket is in `folder`."""
    if _server._forkserver_pid is not None or sys.version_info[:2] > _NEWEST_PYTHON:
        return
    process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    os.environ[ENGINE] = engine
    _server.set_forkserver_preload([_PRELOAD])
    _server.ensure_running()
    _server.ensure_running = lambda: None  # a lost one is not replaced: workers of Ray would not find the new one
    os.environ[ADDRESS] = _server._forkserver_address


def is_on() -> bool:
    """True if this process or its driver has started a warm process."""
    return ADDRESS in os.environ


def end() -> None:
    """Kill the warm process that this one has started, and the forks that `call` waits for. Workers keep running."""
    if os.environ.pop(ADDRESS, None) is None or _server._forkserver_pid is None:
        return
    for kill in (os.kill, os.killpg):  # it makes its group with its first import
        with contextlib.suppress(ProcessLookupError):
            kill(_server._forkserver_pid, signal.SIGKILL)
    _server._stop()
    del _server.ensure_running


class Lost(ChildProcessError):
    """The warm process has died."""


def call(function: Callable[..., Result], *args: Any) -> Result:
    """Call the function in a fork of the warm process, or in this process if there is none, and return its result.

    Raises:
        AsyncGRPOError: the fork died.
        Lost: the warm process died, and this is not the main thread, which some functions need.
        Exception: the function raised it.
    """
    if not is_on():
        return function(*args)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = Process(target=_reply, args=(writer, function, args))
    try:
        child.start()
        writer.close()
        result, error = reader.recv()
    except (EOFError, OSError) as lost:
        if _is_alive():
            from asyncgrpo.errors import AsyncGRPOError  # not in the script

            raise AsyncGRPOError(f"the process of {function.__name__} died") from lost
        end()
        if threading.current_thread() is not threading.main_thread():
            raise Lost from lost
        return function(*args)
    if error is not None:
        raise error
    return result


def _is_alive() -> bool:
    """True unless the warm process, which this one has started, ends within a second."""
    for _ in range(100):
        if os.waitid(os.P_PID, _server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.01)
    return True


def _reply(writer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result = error = None
    try:
        result = function(*args)
    except BaseException as raised:
        raised.add_note(traceback.format_exc())  # a pickled exception has no traceback
        error = raised
    writer.send((result, error))


# -- forks -------------------------------------------------------------------------------------------------------------


class Process(ForkServerProcess):
    """A fork of the warm process, with the environment of the process that starts it."""

    def start(self) -> None:
        """Raises OSError or EOFError if the warm process is lost."""
        self._environment = dict(os.environ)
        _attach()
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else the fork would import the main module
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class Context(ForkServerContext):
    """Multiprocessing whose processes are forks of the warm process."""

    Process = Process

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Ignore the call, which libraries make."""


def _attach() -> None:
    """Use the warm process of the driver."""
    if _server._forkserver_pid is None:
        _server._forkserver_address = os.environ[ADDRESS]
        _server.ensure_running = lambda: None
        if _server._forkserver_alive_fd is None:
            _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR)


def end_with_parent() -> None:
    """Kill this process when the one that started it ends. Its parent for the kernel is the warm process."""
    starter = multiprocessing.parent_process()
    if starter is None or starter.pid == os.getppid():
        return

    def watch() -> None:
        connection.wait([starter.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


# -- workers of Ray ----------------------------------------------------------------------------------------------------


class _File:
    """An open file of this process, as the number that it has in a fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self._number),)  # type: ignore[attr-defined]


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def start_worker(arguments: list[str]) -> None:
    """Start a worker of Ray in a fork of the warm process and end this process; without one, become what Ray starts.

    Args:
        arguments: of Ray's script that starts a worker. The first is the script of the worker itself.
    """
    if is_on():
        resource_tracker.getfd = lambda: _server._forkserver_alive_fd  # it would start a process
        own = [argument for argument in arguments if not argument.startswith(_FOR_SETUP)]
        worker = Process(target=_become_worker, args=(own, [_File(number) for number in range(3)]))
        with contextlib.suppress(OSError, EOFError):
            worker.start()
            os._exit(0)
        del os.environ[ADDRESS]  # else the worker would look for it too
    os.execv(sys.executable, [sys.executable, str(Path(arguments[0]).with_name(_SETUP)), *arguments])


def _become_worker(arguments: list[str], files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setpgid(0, 0)  # Ctrl-C is for the driver
    os.close(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks would draw the same numbers
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from asyncgrpo import warm

    warm.start_worker(sys.argv[1:])
