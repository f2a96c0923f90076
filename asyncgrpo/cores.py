"""How many cores this process may use, and how many of the machine's are idle."""

import contextlib
import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those it may run on, and no more than a container's quota of time."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, _quota(_CGROUP)))


def idle_cores() -> float:
    """Cores of the machine that were idle on average since the last call; all of them at the first."""
    import psutil  # only here, because the configuration imports this module

    return (1 - psutil.cpu_percent() / 100) * (os.cpu_count() or 1)


def _quota(folder: Path) -> int:
    """Cores that the time of a cgroup makes, rounded up; without a limit as many as anyone has."""
    with contextlib.suppress(OSError, ValueError):  # version 2; without a limit it says `max`
        quota, period = (folder / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):  # version 1; without a limit it says -1
        quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return math.ceil(int(quota) / int(period))
    return 1 << 16
