"""The time from Enter to the first step of the demo.

python -m benchmarks.start --engines torch sglang --runs 3

A demo in a new folder makes its model and its task too. The line has the wall seconds to each mark of the start, and the CPU
seconds of each kind of process up to the first step.
"""

import argparse
import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measuring import line, show
from benchmarks.trials import Fence, events

LIMIT_S = 300.0
LOOK_EVERY_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "sglang", "fake"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for engine in arguments.engines:
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


if __name__ == "__main__":
    main()
