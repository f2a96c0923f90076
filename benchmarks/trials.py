"""A fenced place for commands of asyncgrpo, and a look at what they leave behind there.

A fence has a HOME and a TMPDIR of its own, so that what a command writes beside its run folder is found, Ray's sessions
included. Every process inherits a mark in the environment, so that those that stay are found beside other runs.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import psutil

from asyncgrpo.recording.events import read_events
from benchmarks.measuring import ROOT

MARK = "ASYNCGRPO_TRIAL"
SHM = Path("/dev/shm")
EXPECTED = ("session_", "ray", ".ray", ".cache", ".config", "torchinductor_")
"""How the names of folders begin that Ray, torch and matplotlib keep, and of Ray's sessions (counted apart)."""
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    exit: int | None
    """The exit code. None: it was killed at its deadline, with all its processes."""
    seconds: float
    said_s: float
    """Seconds until the first byte on stderr; `seconds` if nothing was written there."""
    cpu_s: float
    """CPU seconds of the command and of the children that it waited for."""
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.text


class Fence:
    """A place for commands, for the length of a `with` block."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        # Short: a path of a socket has 107 bytes, and Ray puts 70 of its own after this.
        self.root = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))
        self.work = self.root / "work"
        for name in ("home", "tmp", "work"):
            (self.root / name).mkdir()
        self._shared: set[str] = set()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look_at_shared_memory, daemon=True)

    def __enter__(self) -> "Fence":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self._over.set()
        self._watch.join()
        self._clear(tuple(self._shared))
        shutil.rmtree(self.root, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        fenced = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), MARK: self.mark}
        quiet = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return os.environ | fenced | quiet | {"PYTHONPATH": path}

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command. `output` returns what it prints, errors included."""
        with open(self.root / "output", "wb") as output:
            return self._popen(arguments, cwd, output, subprocess.STDOUT, NONE)

    def output(self) -> str:
        """What the command that was started last has printed."""
        return (self.root / "output").read_text(encoding="utf-8", errors="replace")

    def run(
        self, *arguments: str, cwd: Path | None = None, limit_s: float = 600.0, extra: Mapping[str, str] = NONE
    ) -> Ended:
        """Run a command to its end, or to its deadline, with these variables in its environment."""
        out, err = self.root / "run.out", self.root / "run.err"
        before, began, said_s = os.times(), time.monotonic(), None
        with open(out, "wb") as to_out, open(err, "wb") as to_err:
            process = self._popen(arguments, cwd, to_out, to_err, extra)
            while (exit_ := process.poll()) is None and time.monotonic() < began + limit_s:
                time.sleep(0.05)
                if said_s is None and err.stat().st_size:
                    said_s = time.monotonic() - began
            if exit_ is None:
                self.kill_all()
                process.wait()
        seconds, after = time.monotonic() - began, os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        return Ended(exit_, seconds, seconds if said_s is None else said_s, cpu_s, *texts)

    def _popen(
        self, arguments: Iterable[str], cwd: Path | None, out: IO[bytes], err: IO[bytes] | int, extra: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command, environment = [sys.executable, "-m", "asyncgrpo", *arguments], self.environment() | dict(extra)
        return subprocess.Popen(command, cwd=cwd or self.work, env=environment, stdout=out, stderr=err)

    def processes(self) -> list[psutil.Process]:
        """The living processes of commands in this fence."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """Kill every process that still lives in the fence."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def left(self, within_s: float = 15.0) -> dict[str, list[str]]:
        """End and remove what the commands left: processes (given so long to end), Ray sessions, shared memory, files."""
        deadline = time.monotonic() + within_s
        while ((processes := self.processes()) or self._is_tidied()) and time.monotonic() < deadline:
            time.sleep(0.3)
        found = {"processes": _command_lines(processes)}
        found["sessions"] = [path.name for path in sorted((self.root / "tmp").glob("**/session_2*")) if path.is_dir()]
        found["shm"] = sorted(name for name in self._shared if (SHM / name).exists())
        found["files"] = self._files()
        self.kill_all()
        self._clear(found["shm"])
        return found

    def _is_tidied(self) -> bool:
        """True while a command's janitor is at work here. It has no environment, so no mark."""
        tmp = str(self.root / "tmp")
        return any(
            word.startswith(tmp)
            for process in psutil.process_iter(["cmdline"])
            if "scratch.py" in " ".join(process.info["cmdline"] or ())
            for word in process.info["cmdline"]
        )

    def _files(self) -> list[str]:
        """Files beside the work and beside what is Ray's, by their place in the fence, two folders deep."""
        paths = [path.relative_to(self.root) for top in ("home", "tmp") for path in (self.root / top).rglob("*")]
        # The lock of our temporary folders stays: to remove it while others wait for it would give two of them the lock.
        files = [path for path in paths if not (self.root / path).is_dir() and path.name != ".lock"]
        places = {Path(*path.parts[:3]) for path in files if not any(part.startswith(EXPECTED) for part in path.parts)}
        return sorted(map(str, places))

    def _clear(self, shared: Iterable[str]) -> None:
        for path in (self.root / "tmp").glob("*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for name in shared:
            (SHM / name).unlink(missing_ok=True)
        self._shared.clear()

    def _look_at_shared_memory(self) -> None:
        """Which names in /dev/shm our processes map: other runs have theirs beside them."""
        while not self._over.wait(1.0):
            for process in self.processes():
                with contextlib.suppress(psutil.Error, OSError):
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    paths = [row.partition(f"{SHM}/")[2] for row in maps.splitlines() if f"{SHM}/" in row]
                    self._shared |= {path for path in paths if not path.endswith(" (deleted)")}


def _command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return lines


def events(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return list(read_events(path)) if path.exists() else []
