"""A run's folder: who owns it, which start of the run this is, and whether there is something to go on from."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.checkpoints import Checkpoints
from asyncgrpo.recording.events import read_events
from asyncgrpo.scratch import is_unheld


class RunFolder:
    """One folder, held by one driver at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    def claim(self) -> None:
        """Make the folder and hold it until this process ends. Raises CheckpointError when another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"run.out {self.path} cannot be written: {error.strerror}") from error
        self._lock_or_say(self._lock)

    def _lock_or_say(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"run.out {self.path} belongs to a run that is still going; stop it or choose another"
            ) from error

    @property
    def lineage(self) -> int:
        """Of the newest start; 0 before the first."""
        path = self.path / "lineage"
        return int(path.read_text()) if path.exists() else 0

    def check_free(self) -> None:
        """Raises CheckpointError where `claim` would. It writes nothing and holds nothing."""
        place = self.path
        while not place.exists():
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise CheckpointError(f"run.out {self.path} cannot be written: {place} is no folder that we may write to")
        with contextlib.suppress(FileNotFoundError), open(self.path / ".lock") as lock:
            self._lock_or_say(lock.fileno())

    def next_lineage(self) -> int:
        """The number of this start of the run, from 1; on disk before it is used, so that none is used twice."""
        path, lineage = self.path / "lineage", self.lineage + 1
        temporary = path.with_suffix(".tmp")
        temporary.write_text(str(lineage))
        with open(temporary) as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return lineage

    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        return Checkpoints(self.path, keep=1).latest()

    def status(self) -> str:
        """`new`, `unfinished` or `done`."""
        events = self.path / "metrics.jsonl"
        if not events.exists():
            return "new"
        last = None
        for event in read_events(events):
            if event["event"] in ("start", "end"):
                last = event
        if last is None:
            return "new"
        return "done" if last.get("status") == "done" else "unfinished"

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_abandoned(path: Path) -> bool:
    """Whether this is a run folder that no driver holds."""
    try:
        return is_unheld(path / ".lock")
    except OSError:
        return False


def hold(path: Path, within_s: float) -> int:
    """Lock the file `path` until this process ends; returns its descriptor.

    Raises:
        CheckpointError: another process still holds it after `within_s`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(f"{path} is still held by a process of an earlier start") from error
            time.sleep(0.1)


def unused(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ... : the first that holds no finished run."""
    candidate, number = path, 2
    while RunFolder(candidate).status() == "done":
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
