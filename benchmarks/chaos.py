"""Runs of the demo with and without faults: goodput, times to recovery, and what the audit finds.

    python -m benchmarks.chaos --engine torch --max-lag 1 --per-hour 0 60 --minutes 10   without faults and with
    python -m benchmarks.chaos --engine fake --kills 20                                  the run killed and resumed

One JSON line for each run. A run is ended with SIGTERM `--minutes` after its first step. Its goodput is the number of
prompts done in its newest checkpoint, for each second from the first step to the end.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncgrpo.recording.events import read_events
from asyncgrpo.recording.text import quantile
from benchmarks.measuring import show, where

STEPS = "1000000"
START_WITHIN_S = 300.0
END_WITHIN_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="torch", choices=["sglang", "torch", "fake"])
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--per-hour", type=float, nargs="+", default=[0.0, 60.0], help="faults, a run each")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run, from its first step")
    parser.add_argument("--rounds", type=int, default=1, help="of these runs, every second one in reverse order")
    parser.add_argument("--kills", type=int, help="instead: SIGKILL to the whole run, so often, resumed each time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.kills is not None:
            show(kills(options, Path(folder)))
            return
        for number in range(options.rounds):
            for per_hour in options.per_hour if number % 2 == 0 else reversed(options.per_hour):
                show(under_faults(options, per_hour, options.seed + number, Path(folder) / f"{number}-{per_hour:g}"))


def under_faults(options: argparse.Namespace, per_hour: float, seed: int, run: Path) -> dict[str, Any]:
    """Measure one run with so many faults an hour."""
    process = start(options, run, seed, *(["--chaos", str(per_hour)] if per_hour else []))
    wait_for_step(process, run, 1)
    time.sleep(60.0 * options.minutes)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=END_WITHIN_S)
    events = list(read_events(run / "metrics.jsonl"))
    found = audit(run)
    first = next(e["time"] for e in events if e["event"] == "step")
    last = max(e["time"] for e in events if e["event"] == "step")
    recoveries: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["event"] == "recovered":
            recoveries[event["actor"].partition("-")[0]].append(event["seconds"])
            recoveries["all"].append(event["seconds"])
    return {
        "benchmark": "chaos",
        "engine": options.engine,
        "max_lag": options.max_lag,
        "seed": seed,
        "faults_per_hour": per_hour,
        "minutes": options.minutes,
        "exit": process.returncode,
        "faults": sum(e["event"] == "fault" for e in events),
        "recovered": len(recoveries["all"]),
        "prompts_per_s": found["prompts_done"] / (last - first),
        "groups_delivered": sum(found["groups"].values()),
        "largest_lag": max(map(int, found["lags"])),
        "seconds_to_recovery": {
            role: {"n": len(s), "p50": quantile(s, 0.5), "p99": quantile(s, 0.99)}
            for role, s in recoveries.items()
            if s
        },
        "starts_of_the_core": found["starts"],
        "audit_differences": found["differences"],
    } | where()


def kills(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one run that is killed and resumed again and again."""
    rng, run, differences, steps = random.Random(options.seed), folder / "run", [], []
    for _ in range(options.kills):
        process = start(options, run, options.seed)
        done = last_step(run)
        wait_for_step(process, run, done + 1)
        time.sleep(rng.uniform(0.0, 10.0))
        process.kill()
        process.communicate()
        steps.append(last_step(run))
        differences += audit(run)["differences"]
    found = audit(run)
    return {
        "benchmark": "kills of the whole run",
        "engine": options.engine,
        "max_lag": options.max_lag,
        "seed": options.seed,
        "kills": options.kills,
        "steps_at_each": steps,
        "prompts_done": found["prompts_done"],
        "groups": found["groups"],
        "largest_lag": max(map(int, found["lags"])),
        "audit_differences_after_any": differences,
    } | where()


def start(options: argparse.Namespace, run: Path, seed: int, *more: str) -> subprocess.Popen[str]:
    arguments = ["demo", "--engine", options.engine, "--max-lag", str(options.max_lag), "--steps", STEPS]
    arguments += ["--seed", str(seed), "--out", str(run), *more, "run.checkpoint_every=5", "run.eval_every=50"]
    return subprocess.Popen(
        [sys.executable, "-m", "asyncgrpo", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )


def last_step(run: Path) -> int:
    """The newest step in the events of the run; 0 before the first."""
    path = run / "metrics.jsonl"
    events = list(read_events(path)) if path.exists() else []
    return max((e["step"] for e in events if e["event"] == "step"), default=0)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """A resume takes lost steps out of the events, so this is a step of the present start, or one it will come to."""
    deadline = time.monotonic() + START_WITHIN_S
    while last_step(run) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before step {step}")
        if time.monotonic() > deadline:
            raise SystemExit(f"no step {step} within {START_WITHIN_S:.0f} s")
        time.sleep(0.2)


def audit(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "asyncgrpo", "audit", str(run), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
