"""Whole runs for tests: the demo's model and task, and a way to run and read them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from asyncgrpo.recording.events import KINDS

if TYPE_CHECKING:
    from asyncgrpo.tools.audit import Audit

REPOSITORY = Path(__file__).parent.parent
MARK = "ASYNCGRPO_TEST_RUN"
_STARTED: list[subprocess.Popen[str]] = []


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncgrpo", *map(str, arguments)]


def environment(mark: Path | str = "") -> dict[str, str]:
    """Of a run: our checkout, one thread, and a mark by which all its processes can be found."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return os.environ | settings | {MARK: str(mark)}


def asyncgrpo(*arguments: str, cwd: Path, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end. All its processes are marked with `cwd`."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=timeout_s
    )


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the command line and go on. All its processes are marked with `cwd`."""
    with open(cwd / "output.txt", "a") as output:
        process = subprocess.Popen(
            command(*arguments), cwd=cwd, env=environment(cwd), stdout=output, stderr=subprocess.STDOUT, text=True
        )
    _STARTED.append(process)
    return process


def kill_started() -> None:
    """Whatever `start` started and nobody waited for: a test that failed must not slow down those after it."""
    for process in _STARTED:
        if process.poll() is None:
            process.kill()
            process.wait()
    _STARTED.clear()


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float) -> None:
    """Wait for `condition`. `what` is named if it does not come; a function says it as it is then."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what if isinstance(what, str) else what()} within {timeout_s:.0f} s")
        time.sleep(0.2)


def events(run: Path, kind: str) -> list[dict]:
    """Those of `kind`, each as it is declared; none while there is no file. A line that is being written is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [event for event in map(json.loads, lines) if event["event"] == kind]
    for event in found:
        assert_declared(event)
    return found


def assert_declared(event: dict) -> None:
    fields = KINDS[event["event"]].fields
    for name in event.keys() - {"event", "time"}:
        msgspec.convert(event[name], fields[name].type)  # raises what does not fit


def marked(mark: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(mark):
                found.append(process)
    return found


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def left_behind(mark: Path) -> list[str]:
    return [f"{process.pid} {command_of(process)[:150]}" for process in marked(mark)]


def shared_memory(processes: Iterable[psutil.Process]) -> list[Path]:
    """The files in /dev/shm that these processes have mapped, by their inodes: a semaphore is mapped before it has its name."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            inodes |= {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/" in line}
    return [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes]


def replay(folder: Path, *arguments: str) -> tuple[int, dict]:
    """Train the run in `folder` again: the exit code, and what `--json` says."""
    result = asyncgrpo("replay", "run", *arguments, "--json", cwd=folder)
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    assert_nothing_left(folder)
    return result.returncode, json.loads(result.stdout)


def audited(run: Path) -> "Audit":
    """The audit of a run, which finds no difference."""
    from asyncgrpo.tools.audit import audit

    found = audit(run)
    assert found.differences == []
    return found


def assert_nothing_left(mark: Path) -> None:
    """Every process of the run is gone, at most a few seconds after it ended."""
    wait_until(lambda: not left_behind(mark), lambda: f"end of {left_behind(mark)}", 120.0)
