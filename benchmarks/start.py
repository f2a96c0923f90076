"""The time from Enter to the first step of the demo.

python -m benchmarks.start --engines torch sglang --runs 3
python -m benchmarks.start --engines torch sglang --kills 10

A demo in a new folder makes its model and its task too. The line has the wall seconds to each mark of the start, and the CPU
seconds of each kind of process up to the first step.

With `--kills`, one process of a start is killed so many times, each time later: the driver, the warm process, the learner, a
generator. A driver must leave nothing after 10 s, and its command go on. Any other run must end well by itself.
"""

import argparse
import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measuring import line, show, where
from benchmarks.trials import Fence, audited, events

LIMIT_S = 300.0
LOOK_EVERY_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "sglang", "fake"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for engine in arguments.engines:
        if arguments.kills:
            moments = [round(LAST_KILL_S * i / arguments.kills, 2) for i in range(arguments.kills)]
            show_kills(engine, [kill(engine, who, at_s) for who in VICTIMS for at_s in moments])
        else:
            show_starts(engine, [first_step(engine, arguments.seed) for _ in range(arguments.runs)], arguments.seed)


# -- a demo ------------------------------------------------------------------------------------------------------------


def show_starts(engine: str, starts: list[dict], seed: int) -> None:
    marks = {name: [start["marks"][name] for start in starts] for name in starts[0]["marks"]}
    cpu = {name: [start["cpu_s"].get(name, 0.0) for start in starts] for name in starts[0]["cpu_s"]}
    show(line("first step", marks.pop("first_step"), "s", seed=seed, engine=engine, marks=marks, cpu_s=cpu))


def first_step(engine: str, seed: int) -> dict:
    """Start the demo and end it after its first step: seconds to each mark, and CPU seconds by kind of process."""
    with Fence() as fence:
        run, cpu = fence.work / "run", {}
        began, began_s = time.time(), time.monotonic()
        command = fence.start("demo", "--engine", engine, "--seed", str(seed), "--out", str(run), "--steps", "2")
        while not (step := _first(run, "step")) and command.poll() is None and time.monotonic() < began_s + LIMIT_S:
            cpu |= dict(_cpu_seconds(fence))
            time.sleep(LOOK_EVERY_S)
        if step is None:
            raise RuntimeError(f"no step: {fence.output()}")
        marks = {"training": _first(run, "start")["time"] - began, "first_step": step["time"] - began}
        totals = Counter[str]()
        for name, seconds in cpu.values():
            totals[name] += seconds
        command.wait(timeout=LIMIT_S)
        return {"marks": marks, "cpu_s": dict(totals) | {"all": totals.total()}}


def _first(run: Path, kind: str) -> dict | None:
    return next((event for event in events(run) if event["event"] == kind), None)


def _cpu_seconds(fence: Fence) -> Iterator[tuple[int, tuple[str, float]]]:
    """The kind of each living process of the fence, and its CPU seconds."""
    for process in fence.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            yield process.pid, (_kind(" ".join(process.cmdline())), times.user + times.system)


def _kind(command: str) -> str:
    if named := re.match(r"ray::(\w+?)(Actor|\b)", command):
        return named[1]
    if "-m asyncgrpo" in command:
        return "driver"
    if "forkserver" in command:
        return "warm and its forks"
    if "sglang" in command or "multiprocessing" in command:
        return "engine"
    return "ray"


# -- kills -------------------------------------------------------------------------------------------------------------

VICTIMS = ("driver", "warm", "Learner", "Generator")
LAST_KILL_S = 6.0
"""After the process was seen."""


def kill(engine: str, who: str, at_s: float) -> dict:
    """Start a demo, kill one of its processes so long after it was seen, and say how the run ended and what it left."""
    with Fence() as fence:
        run = fence.work / "run"
        typed = ["demo", "--engine", engine, "--out", str(run), "--steps", "4"]
        command = fence.start(*typed)
        while not (victims := [process for process in fence.processes() if _is(who, process)]):
            time.sleep(0.05)
        time.sleep(at_s)
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            victims[0].kill()
        code = command.wait(timeout=LIMIT_S)
        left = fence.left(within_s=10.0, clear=False) if who == "driver" else {}
        if who == "driver":
            code = fence.run(*typed).exit
        found = {"engine": engine, "killed": who, "at_s": at_s, "exit": code}
        found["differences"] = audited(fence, run)["differences"]
        found["restarts"] = [event["actor"] for event in events(run) if event["event"] == "restart"]
        found["left"] = [names for at_end in (left, fence.left(10.0)) for names in at_end.values() if names]
        return found


def _is(who: str, process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return "forkserver" in command if who == "warm" else _kind(command) == who
    return False


def show_kills(engine: str, found: list[dict]) -> None:
    bad = [one for one in found if one["exit"] != 0 or one["left"] or one["differences"]]
    for one in bad:
        show(one)
    show({"benchmark": "kills of a start", "engine": engine, "kills": len(found), "bad": len(bad)} | where())


if __name__ == "__main__":
    main()
