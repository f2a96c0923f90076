"""This machine and process: quiet imports, atomic writes, a free port, a GPU, main and shared memory, cores and core-seconds."""

import contextlib
import gc
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

QUIET = {
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # Ray writes stderr to files, on a disk that may be full
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of the processes of a run. Libraries read them when they are imported."""
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu() -> bool:
    """Return True if torch sees a GPU here. Imports torch only if the device file of a driver exists."""
    if not any(map(os.path.exists, _DEVICES)):
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector for the block, which first imports torch, transformers or SGLang, then freeze objects.

    The imports create a million permanent objects. The collector would traverse them repeatedly during the import, and,
    unless frozen, in every later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def refused_as(kind: type[Exception], sentence: str) -> Iterator[None]:
    """Raise an error of this kind, with this sentence and the reason, if the disk refuses what the block does."""
    try:
        yield
    except OSError as error:
        raise kind(f"{sentence}: {error.strerror or error}") from error


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it does not exist. Raises OSError where `Path.glob` finds nothing."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def sync(path: Path) -> None:
    """Sync a file or a folder to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666, is_durable: bool = False) -> None:
    """Replace a file atomically: at every moment the old or the new one is there, whole. Raises OSError.

    Args:
        mode: of the new file, less the umask.
        is_durable: True: it is on disk before it replaces the old one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
    if is_durable:
        sync(temporary)
    os.replace(temporary, path)


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that is bound to a free port and does not listen.

    Until it is closed, no other process is given the port, and a server that sets SO_REUSEADDR may listen at it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


stderr_file: Path | None = None
"""File to which stderr of this process and its children is written; None: it is not known."""


def stderr_size() -> int:
    """Return the size of `stderr_file`, bytes; 0 if it does not exist."""
    return stderr_file.stat().st_size if stderr_file is not None and stderr_file.is_file() else 0


DELIVERED_S = 5.0
"""Longest wait for output that is on its way to `stderr_file`."""


def last_error(since: int, after: str = "") -> str:
    """Return the last exception in `stderr_file`; empty if there is none. A library may only report that its child failed.

    Ray copies stderr through a pipe into the file, in a thread. So this writes a line to stderr and waits until it is there.

    Args:
        since: size of the file before the library was called.
        after: text that must come before the exception.
    """
    if stderr_file is None or not stderr_file.is_file():
        return ""
    end, deadline = f"read for its last exception at {time.monotonic_ns()}\n", time.monotonic() + DELIVERED_S
    os.write(2, end.encode())
    while True:
        with stderr_file.open("rb") as file:
            file.seek(max(since, stderr_size() - 2**16))
            text = file.read().decode(errors="replace")
        if end in text or time.monotonic() > deadline:
            if after:
                text = text.rpartition(after)[2] if after in text else ""
            found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*$", text, re.MULTILINE)
            return found[-1][:300] if found else ""
        time.sleep(0.01)


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
        """Measure this machine. `shared_memory` is its `/dev/shm`."""
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


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the CPU quota of a container."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, _quota(_CGROUP)))


class CoreSeconds(NamedTuple):
    """Core-seconds of a machine, or of the container that limits this process."""

    cores: float
    """Available core-seconds: number of cores times wall time."""
    spare: float
    """Idle core-seconds of these."""
    cpu: float
    """Core-seconds of these used by this process and its descendants."""


class CoreClock:
    """Counts core-seconds since its creation."""

    EVERY_S = 1.0
    """Shortest interval between two listings of the machine's processes. In between, the last count is returned."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._cores = clock, clock(), cores()
        self._busy_before, self._cpu_before = _busy_seconds(), _own_seconds()
        self._last, self._counted_s = CoreSeconds(0.0, 0.0, 0.0), self._began_s

    def count(self) -> CoreSeconds:
        """Return the core-seconds so far. None of the three decreases."""
        now_s = self._clock()
        if now_s - self._counted_s >= self.EVERY_S:
            self._counted_s = now_s
            there = self._cores * (now_s - self._began_s)
            spare = there - (_busy_seconds() - self._busy_before)
            cpu = _own_seconds() - self._cpu_before
            self._last = CoreSeconds(there, max(spare, self._last.spare), max(cpu, self._last.cpu))
        return self._last


def _busy_seconds() -> float:
    """Return the busy core-seconds of the machine, or of the container if a quota limits it."""
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
    """Return the CPU seconds of this process and its descendants, ended ones included."""
    import psutil

    total = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:4])
    return total


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of the descendants of a process. psutil would read every process of the machine for them."""
    for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended
            for child in map(int, of_thread.read_text().split()):
                yield child
                yield from descendants(child)


def _quota(folder: Path) -> int:
    """Return the CPU quota of a cgroup in cores, rounded up; 65536 without a limit."""
    with contextlib.suppress(OSError, ValueError):  # version 2; `max` without a limit
        quota, period = (folder / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 without a limit
        quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return math.ceil(int(quota) / int(period))
    return 1 << 16
