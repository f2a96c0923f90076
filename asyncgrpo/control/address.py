"""Where the admin API of a run listens: `RUN/control.json`, which only its user can read and which is there while it lives."""

import os
import platform
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncgrpo.errors import RunNotAlive

FILE = "control.json"


class Address(Struct, frozen=True, kw_only=True):
    """Where and with what a run is asked."""

    url: str
    """Such as `http://127.0.0.1:41234`."""
    token: str
    """Whoever has it may look at the run and steer it."""
    pid: int
    """The driver's."""
    host: str
    """The driver's machine."""

    @classmethod
    def of_this_process(cls, url: str, token: str) -> "Address":
        """The address of an API in this process."""
        return cls(url=url, token=token, pid=os.getpid(), host=platform.node())

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the driver is on the machine of this process."""
        return self.host == platform.node()

    def __repr__(self) -> str:
        return f"Address({self.url}, token hidden)"


def write_address(run_dir: Path, address: Address) -> Path:
    """Replace `RUN/control.json` atomically. Its mode is 0600."""
    path = run_dir / FILE
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    os.replace(temporary, path)
    return path


def remove_address(run_dir: Path) -> None:
    """Remove the file, if it is there."""
    (run_dir / FILE).unlink(missing_ok=True)


def read_address(run_dir: Path) -> Address:
    """The address of the run in this folder.

    Raises:
        RunNotAlive: there is no such run, or nobody is there to ask, with how to start it.
    """
    path = run_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError:
        raise RunNotAlive(not_alive(run_dir)) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RunNotAlive(f"{path} cannot be read: {error}") from error


def not_alive(run_dir: Path, why: str = "") -> str:
    """The sentence that says that nobody is there to ask, and what to do."""
    if not run_dir.is_dir():
        return f"there is no run folder {run_dir}"
    if not (run_dir / "metrics.jsonl").exists():
        return f"{run_dir} is no run folder: it holds no metrics.jsonl"
    why = why or f"it has no {FILE}, which a run has while it goes on (unless control.port is null)"
    return f"{run_dir} is not going on: {why}; start it again with the command that started it"
