"""A run that is going on, asked and told over its admin API: what the commands `status`, `top`, `pause`... are made of."""

import contextlib
import urllib.error
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from asyncgrpo.control.address import FILE, not_alive, read_address
from asyncgrpo.control.fetch import fetch
from asyncgrpo.control.operator import Command, Done, Status
from asyncgrpo.control.problems import Problem, Problems
from asyncgrpo.errors import CommandRefused, RunNotAlive

T = TypeVar("T")

REPLY_S = 25.0
"""How long a run may take to say how it is."""
COMMAND_S = 70.0
"""How long a command may take: longer than the API itself waits for the driver."""


class RunClient:
    """One run. Every method raises RunNotAlive if its driver does not reply."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._address = read_address(run_dir)

    @property
    def page(self) -> str:
        """The address of the run's page. The token is its fragment, which a browser sends to nobody."""
        return f"{self._address.url}/#token={self._address.token}"

    def status(self) -> Status:
        """How it is."""
        return self._ask("/api/status", Status)

    def problems(self) -> list[Problem]:
        """What is wrong with it, most urgent first."""
        return self._ask("/api/alerts", Problems).problems

    def tell(self, command: Command) -> str:
        """Have it carry out a command; returns what was done, in a sentence. Raises CommandRefused."""
        return self._ask("/api/command", Done, body=msgspec.json.encode(command), timeout_s=COMMAND_S).done

    def _ask(self, path: str, kind: type[T], *, body: bytes | None = None, timeout_s: float = REPLY_S) -> T:
        address = self._address
        try:
            reply = fetch(f"{address.url}{path}", token=address.token, body=body, timeout_s=timeout_s)
        except urllib.error.HTTPError as problem:
            raise CommandRefused(f"{self.run_dir}: {_sentence(problem)}") from None
        except OSError as problem:
            raise RunNotAlive(self._silence(problem)) from None
        return msgspec.json.decode(reply, type=kind)

    def _silence(self, problem: OSError) -> str:
        """Why nobody replied."""
        address = self._address
        if not address.is_of_this_machine:
            return f"{self.run_dir} belongs to a run on {address.host}: give the command there"
        if not psutil.pid_exists(address.pid):
            return not_alive(self.run_dir, f"its driver, process {address.pid}, is gone")
        why = getattr(problem, "reason", problem)
        return f"the driver of {self.run_dir}, process {address.pid}, does not reply at {address.url}: {why}"


def _sentence(problem: urllib.error.HTTPError) -> str:
    said: Any = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        said = msgspec.json.decode(problem.read())
    return said["error"] if isinstance(said, dict) and "error" in said else f"the reply was {problem.code}"


def alive_in(folder: Path) -> list[Path]:
    """The run folders in `folder` whose drivers live on this machine, in order of their names."""
    found = []
    for file in sorted(folder.glob(f"*/{FILE}")):
        try:
            address = read_address(file.parent)
        except RunNotAlive:
            continue  # gone meanwhile, or not ours to read
        if address.is_of_this_machine and psutil.pid_exists(address.pid) and _listens(address.url):
            found.append(file.parent)
    return found


def _listens(url: str) -> bool:
    """Whether anybody is there. One that does not reply in time is, and the command will say so."""
    try:
        fetch(f"{url}/healthz", timeout_s=2.0)
    except OSError as problem:
        return not isinstance(getattr(problem, "reason", problem), ConnectionRefusedError)
    return True


def one_run(given: Path | None, folder: Path) -> Path:
    """The run that a command means: the one that was given, else the only one in `folder` that lives. Raises RunNotAlive."""
    if given is not None:
        return given
    match alive_in(folder):
        case [only]:
            return only
        case []:
            raise RunNotAlive(f"no run in {folder}/ is going on; give the folder of one")
        case several:
            raise RunNotAlive(f"several runs are going on, give one: {', '.join(map(str, several))}")
