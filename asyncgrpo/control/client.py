"""A run that is active: commands to it, its status, and the client of its admin API that `status`, `top`, `pause`... are made of.

`api.py` turns requests into commands; `cluster/steering.py` carries them out. Neither knows the other.
`RUN/control.json` has the address and the token. Only its user can read it, and it is there while the run lives.
"""

import contextlib
import os
import platform
import urllib.error
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
import psutil
from msgspec import Meta, Struct, field

from asyncgrpo.config.reach import fetch
from asyncgrpo.errors import AsyncGRPOError, CommandRefused, RunNotAlive
from asyncgrpo.host import replace_file
from asyncgrpo.recording.advice import Advice
from asyncgrpo.recording.events import NEWEST_BYTES, Follower
from asyncgrpo.recording.health import Problem
from asyncgrpo.recording.progress import Progress
from asyncgrpo.recording.screen import figures, position

# -- commands ----------------------------------------------------------------------------------------------------------


class _Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="command"):
    pass


class Pause(_Command, frozen=True, tag="pause"):
    """No more leases and no more batches. What is in flight is finished and kept."""


class Resume(_Command, frozen=True, tag="resume"):
    """Go on after `Pause`."""


class DrainRun(_Command, frozen=True, tag="drain"):
    """End in order: the step in flight, a checkpoint, exit code 0; the same as SIGTERM."""


class WriteCheckpoint(_Command, frozen=True, tag="checkpoint"):
    """Write a checkpoint after the step in flight."""


class Evaluate(_Command, frozen=True, tag="evaluate"):
    """Sample `data.eval` after the step in flight."""


class Scale(_Command, frozen=True, tag="scale"):
    """Run so many generators, within `generators.min` and `generators.max`."""

    generators: Annotated[int, Meta(ge=1, le=4096)]


class ChangeSettings(_Command, frozen=True, tag="set"):
    """Change settings while the run goes on; all of them, or none if one is refused."""

    settings: Annotated[dict[str, float | int], Meta(min_length=1, max_length=16)]
    """Values by key: one of `CHANGEABLE`."""

    def __post_init__(self) -> None:
        """Raises ValueError: a key may not change."""
        if fixed := [key for key in self.settings if key not in CHANGEABLE]:
            raise ValueError(f"{fixed[0]} cannot change during a run; {', '.join(CHANGEABLE)} can")


Command = Pause | Resume | DrainRun | WriteCheckpoint | Evaluate | Scale | ChangeSettings


CHANGEABLE = ("learner.lr", "buffer.max_lag", "generators.groups_in_flight")
"""Settings that may change while a run goes on.

The schedule goes on with the new learning rate from where it is; the bound on the lag is that of leases from now on.
"""

# -- status of a run ---------------------------------------------------------------------------------------------------


RunState = Literal["starting", "training", "paused", "draining", "ended"]
ProcessState = Literal["starting", "working", "leaving"]


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    state: ProcessState
    pid: int | None = None
    """None before its first heartbeat."""
    restarts: int = 0
    heard_s: float | None = None
    """Seconds since its last heartbeat."""
    waits: dict[str, float] = {}
    """Seconds that it has waited, by what it waits for."""


class Status(Struct, frozen=True, kw_only=True):
    """A run at this moment, as its driver knows it. What it has done is in its `metrics.jsonl`."""

    run: str
    folder: str
    state: RunState
    started: float
    """Unix seconds."""
    lineage: int
    step: int
    """Optimizer steps done."""
    steps: int | None
    """The last one; None: without an end."""
    generators_wanted: int
    """Target; `processes` has those that run."""
    generators_min: int
    generators_max: int
    settings: dict[str, float | int | str]
    """Of `CHANGEABLE`, in force. `buffer.max_lag` may be `auto`."""
    processes: tuple[ProcessStatus, ...] = ()
    waits_for: str = ""
    """Processes that a run that is starting waits for; empty in every other state."""
    advice: tuple[Advice, ...] = ()
    """Most urgent first; () unless the run trains."""


class Operator(Protocol):
    """The driver, as the admin API sees it. Both methods may be called from any thread."""

    def status(self) -> Status: ...

    def carry_out(self, command: Command) -> str:
        """Blocks until the command is in effect, or begun where that takes long. Returns what was done, in a sentence.

        Raises:
            CommandRefused: one sentence with the reason, and what would be accepted.
        """
        ...


T = TypeVar("T")

FILE = "control.json"
REPLY_S = 25.0
COMMAND_S = 70.0
"""Deadline of a command: longer than the API itself waits for the driver."""

# -- its address -------------------------------------------------------------------------------------------------------


class Address(Struct, frozen=True, kw_only=True):
    """Address and token of a run's API."""

    url: str
    """Such as `http://127.0.0.1:41234`."""
    token: str
    """Allows to look at the run and to steer it."""
    pid: int = field(default_factory=os.getpid)
    """The driver's; by default this process."""
    host: str = field(default_factory=platform.node)
    """The driver's machine; by default this one."""

    @property
    def is_of_this_machine(self) -> bool:
        """True if the driver is on the machine of this process."""
        return self.host == platform.node()

    def __repr__(self) -> str:
        return f"Address({self.url}, token hidden)"


def write_address(run_dir: Path, address: Address) -> None:
    """Replace `RUN/control.json` atomically. Its mode is 0600."""
    replace_file(run_dir / FILE, msgspec.json.encode(address), mode=0o600)


def read_address(run_dir: Path) -> Address:
    """The address of the run in this folder.

    Raises:
        RunNotAlive: the run does not exist, or it is not active, with how to start it.
    """
    path = run_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotAlive(not_alive(run_dir)) from None
    except (OSError, ValueError) as error:
        raise RunNotAlive(f"{path} cannot be read: {error}") from error


def not_alive(run_dir: Path, why: str = "") -> str:
    """Return the sentence for a run that is not active, with what to do."""
    if not run_dir.is_dir():
        return f"run folder {run_dir} does not exist"
    if not (run_dir / "metrics.jsonl").exists():
        return f"{run_dir} is not a run folder: it has no metrics.jsonl"
    why = why or f"it has no {FILE}, which an active run has (unless control.port is null)"
    return f"{run_dir} is not active: {why}; start it again with the command that started it"


# -- its API -----------------------------------------------------------------------------------------------------------


class RunClient:
    """One run. Every method raises RunNotAlive if its driver does not reply."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._address = read_address(run_dir)

    @property
    def page(self) -> str:
        """The address of the run's page. The token is its fragment, which a browser does not send."""
        return f"{self._address.url}/#token={self._address.token}"

    def status(self) -> Status:
        return self._ask("/api/status", Status)

    def problems(self) -> list[Problem]:
        """Return its problems, most urgent first."""
        return self._ask("/api/alerts", dict[str, list[Problem]])["problems"]

    def send(self, command: Command) -> str:
        """Have it carry out a command; returns what was done, in a sentence. Raises CommandRefused."""
        body = msgspec.json.encode(command)
        return self._ask("/api/command", dict[str, str], body=body, timeout_s=COMMAND_S)["done"]

    def _ask(self, path: str, kind: type[T], *, body: bytes | None = None, timeout_s: float = REPLY_S) -> T:
        address = self._address
        try:
            reply = fetch(f"{address.url}{path}", token=address.token, body=body, timeout_s=timeout_s)
            return msgspec.json.decode(reply, type=kind)
        except urllib.error.HTTPError as problem:
            raise CommandRefused(f"{self.run_dir}: {_sentence(problem)}") from None
        except (OSError, ValueError) as problem:
            raise RunNotAlive(self._silence(problem)) from None

    def _silence(self, problem: Exception) -> str:
        address = self._address
        if not address.is_of_this_machine:
            return f"{self.run_dir} belongs to a run on {address.host}: give the command there"
        if not psutil.pid_exists(address.pid):
            return not_alive(self.run_dir, f"its driver, process {address.pid}, is gone")
        why = getattr(problem, "reason", problem)
        return f"the driver of {self.run_dir}, process {address.pid}, does not reply at {address.url}: {why}"


def _sentence(problem: urllib.error.HTTPError) -> str:
    body: Any = None
    with contextlib.suppress(OSError, ValueError):
        body = msgspec.json.decode(problem.read())
    return body["error"] if isinstance(body, dict) and "error" in body else f"the reply was {problem.code}"


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
    """Return True if a server listens. One that does not reply in time does, and the command will report it."""
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
            raise RunNotAlive(f"no run in {folder}/ is active; give the folder of one")
        case several:
            raise RunNotAlive(f"several runs are active, give one: {', '.join(map(str, several))}")


# -- its state ---------------------------------------------------------------------------------------------------------


class Look:
    """Snapshot of a run's state, refreshed again and again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.status: Status | None = None
        """The last reply of the driver; None: it has never replied."""
        self.problems: list[Problem] = []
        self.silence = ""
        """Reason why the driver does not reply; empty: it does."""
        self.progress = Progress()
        self._follower = Follower(run_dir / "metrics.jsonl", NEWEST_BYTES)

    def refresh(self) -> None:
        try:
            client = RunClient(self.run_dir)
            self.status, self.problems, self.silence = client.status(), client.problems(), ""
        except AsyncGRPOError as error:
            self.silence = str(error)
        for event in self._follower.poll():
            self.progress.update(event)

    @property
    def name(self) -> str:
        return self.status.run if self.status is not None else self.run_dir.name

    @property
    def position(self) -> str:
        """Steps done, of how many."""
        if self.status is None:
            return position(self.progress.step, self.progress.total_steps)
        return position(self.status.step, self.status.steps)

    @property
    def state(self) -> str:
        return "no reply" if self.silence or self.status is None else self.status.state

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the figures, each with its name. A run that is starting has none."""
        if self.status is None:
            yield from figures(self.progress)
        elif self.status.state == "starting":
            yield "waits for", self.status.waits_for
        else:
            states = Counter(p.state for p in self.status.processes if p.name.startswith("generator"))
            counts = ", ".join(f"{count} {state}" for state, count in states.items())
            yield "engines", f"{counts}, of {self.status.generators_wanted}"
            yield from figures(self.progress)

    def advice(self) -> Iterator[str]:
        for piece in self.status.advice if self.status is not None else ():
            yield piece.sentence + (f": asyncgrpo {piece.command} {self.run_dir}" if piece.command else "")

    def warnings(self) -> Iterator[str]:
        if self.silence:
            yield self.silence
        for problem in self.problems:
            yield f"{problem.name}: {problem.text} ({problem.runbook})"
