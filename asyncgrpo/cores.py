"""How many cores this process may use, how many of the machine's are idle, and what this process uses of them."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those it may run on, and no more than a container's quota of time."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, _quota(_CGROUP)))


def idle_cores() -> float:
    """Cores of the machine that were idle on average since the last call; all of them at the first."""
    import psutil  # only here, because the configuration imports this module

    return (1 - psutil.cpu_percent() / 100) * (os.cpu_count() or 1)


class CoreSeconds(NamedTuple):
    """Core-seconds of a machine, or of the container that limits this process."""

    cores: float
    """That there were: the number of cores times the seconds."""
    spare: float
    """Of these, idle."""
    cpu: float
    """Of these, used by this process and its descendants."""


class CoreClock:
    """Counts core-seconds since it was made."""

    EVERY_S = 1.0
    """The processes of the machine are listed at most so often. Between, the last count is returned."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._cores = clock, clock(), cores()
        self._busy_before, self._cpu_before = _busy_seconds(), _own_seconds()
        self._last, self._counted_s = CoreSeconds(0.0, 0.0, 0.0), self._began_s

    def count(self) -> CoreSeconds:
        """Return the core-seconds so far. None of the three ever shrinks."""
        now_s = self._clock()
        if now_s - self._counted_s >= self.EVERY_S:
            self._counted_s = now_s
            there = self._cores * (now_s - self._began_s)
            spare = there - (_busy_seconds() - self._busy_before)
            cpu = _own_seconds() - self._cpu_before
            self._last = CoreSeconds(there, max(spare, self._last.spare), max(cpu, self._last.cpu))
        return self._last


def _busy_seconds() -> float:
    """Core-seconds that the machine has worked; those of the container alone where a quota limits it."""
    import psutil

    if _quota(_CGROUP) < len(os.sched_getaffinity(0)):
        with contextlib.suppress(OSError, ValueError, StopIteration):  # version 2
            usage = next(line for line in (_CGROUP / "cpu.stat").read_text().splitlines() if "usage_usec" in line)
            return int(usage.split()[1]) / 1e6
        with contextlib.suppress(OSError, ValueError):  # version 1
            return int((_CGROUP / "cpuacct" / "cpuacct.usage").read_text()) / 1e9
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # guests are in `user` already


def _own_seconds() -> float:
    """CPU seconds of this process and its descendants, those that have ended included."""
    import psutil

    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


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
