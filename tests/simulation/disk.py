"""A disk that forgets: below the product's journal, on real files, with the faults of disks drawn from the seed."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncgrpo.journal.history import SUFFIX, JournalRecord, Whole, scan
from asyncgrpo.journal.log import Disk
from asyncgrpo.wire.codec import Buffer


class Killed(Exception):
    """The process ended inside a call of the disk."""


class SimulatedDisk(Disk):
    def __init__(self, folder: Path, rng: random.Random, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.full_until = 0.0
        self.fails_until = 0.0
        self.calls_to_live: int | None = None
        """Whoever makes the last of these calls dies in it. None: nobody."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called when a failed sync takes bytes that the system had been given."""
        self._rng = rng
        self._now = clock
        self._safe: dict[int, int] = {}  # synced bytes by inode, of files that were made here
        self._names: set[str] = set()  # synced
        self._paths: dict[int, Path] = {}  # by descriptor
        self._begun: int | None = None

    # -- what the journal calls ----------------------------------------------------------------------------------------

    def create(self, path: Path) -> int:
        self._count()
        self._must_have_room()
        calls, self.calls_to_live = self.calls_to_live, None  # a call by itself
        descriptor = super().create(path)
        self.calls_to_live = calls
        self._safe[os.fstat(descriptor).st_ino] = 0
        self._paths[descriptor] = path
        self._begun = descriptor
        return descriptor

    def write(self, descriptor: int, parts: list[Buffer]) -> None:  # type: ignore[override]
        try:
            self._count()
            self._must_have_room()
        except (Killed, OSError):
            data = b"".join(map(bytes, parts))
            super().write(descriptor, [data[: self._rng.randrange(len(data))]])
            raise
        super().write(descriptor, parts)

    def sync(self, descriptor: int) -> None:
        self._count()
        status = os.fstat(descriptor)
        if self._now() < self.fails_until:
            if self._rng.random() < 0.5:  # the system gives the pages up, and calls them clean
                self._blank(self._paths[descriptor], self._safe[status.st_ino], status.st_size)
                self._safe[status.st_ino] = status.st_size
                self.on_loss()
            raise OSError(5, "Input/output error")
        self._safe[status.st_ino] = status.st_size

    def sync_file(self, path: Path) -> None:
        self._count()
        if self._now() < self.fails_until:
            raise OSError(5, "Input/output error")
        status = path.stat()
        self._safe[status.st_ino] = status.st_size

    def truncate(self, path: Path, num_bytes: int) -> None:
        self._count()
        super().truncate(path, num_bytes)
        self._safe[path.stat().st_ino] = num_bytes

    def sync_folder(self, folder: Path) -> None:
        self._count()
        if folder == self.folder:
            self._names = set(os.listdir(folder))

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        self._begun = None
        try:
            yield
        except Killed:
            if self._begun is not None:
                os.close(self._begun)
            raise

    # -- what is done to it --------------------------------------------------------------------------------------------

    def power_cut(self) -> bool:
        """The machine ends: what was not synced may be gone. Returns whether it left more than a torn end."""
        rng, has_holes = self._rng, False
        for path in sorted(self.folder.iterdir()):
            status = path.stat()
            safe = min(self._safe.get(status.st_ino, status.st_size), status.st_size)
            if path.name not in self._names and rng.random() < 0.5:
                path.unlink()
            elif safe < status.st_size:
                end = rng.randint(safe, status.st_size)
                os.truncate(path, end)
                if end > safe and rng.random() < 0.2:  # later pages may be there, and earlier ones not
                    start = rng.randrange(safe, end)
                    self._blank(path, start, rng.randint(start, end))
                    has_holes = True
        self._safe.clear()
        return has_holes

    def flip(self) -> JournalRecord | None:
        """One bit somewhere in the journal is another. Returns the record that it was in."""
        paths = sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.stat().st_size)
        if not paths:
            return None
        path = self._rng.choice(paths)
        data = path.read_bytes()
        at, bit = self._rng.randrange(len(data)), self._rng.randrange(8)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << bit]))
        hit = next(item for item in scan(data) if at < item.end)
        return hit.record if isinstance(hit, Whole) else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _must_have_room(self) -> None:
        if self._now() < self.full_until:
            raise OSError(28, "No space left on device")

    def _count(self) -> None:
        if self.calls_to_live is not None:
            self.calls_to_live -= 1
            if self.calls_to_live <= 0:
                self.calls_to_live = None
                raise Killed

    def _blank(self, path: Path, start: int, end: int) -> None:
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(bytes(end - start))
