"""Memory of this machine: what processes may take here, and what they may share."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """Memory of one machine, in bytes."""

    memory: int
    """Main memory; in a container that limits it, the limit. Shared memory counts towards it."""
    shared: int
    """Size of the file system of shared memory; 0: there is none."""
    shared_free: int
    """Of these, free."""

    @classmethod
    def here(cls, shared_memory: Path) -> "Host":
        """This machine.

        Args:
            shared_memory: where its processes share memory, `/dev/shm`.
        """
        import psutil  # only here, because commands that only print import this module

        size = free = 0
        with contextlib.suppress(OSError):
            there = os.statvfs(shared_memory)
            size, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
        return cls(min(psutil.virtual_memory().total, _limit(_CGROUP)), size, free)


def _limit(folder: Path) -> int:
    """Memory that a cgroup may take, bytes; without a limit more than anyone has."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of version 2, which says `max` without a limit, and 1
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return 1 << 62
