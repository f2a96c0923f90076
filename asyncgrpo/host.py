"""Memory of this machine: main memory and shared memory that processes may use."""

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
    """Size of the file system for shared memory; 0 if it does not exist."""
    shared_free: int
    """Free bytes of `shared`."""

    @classmethod
    def here(cls, shared_memory: Path) -> "Host":
        """Measure this machine.

        Args:
            shared_memory: file system for shared memory, `/dev/shm`.
        """
        import psutil  # only here, because commands that only print import this module

        size = free = 0
        with contextlib.suppress(OSError):
            there = os.statvfs(shared_memory)
            size, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
        return cls(min(psutil.virtual_memory().total, _limit(_CGROUP)), size, free)


def _limit(folder: Path) -> int:
    """Return the memory limit of a cgroup, bytes; 2^62 without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of version 2, `max` without a limit, and of version 1
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return 1 << 62
