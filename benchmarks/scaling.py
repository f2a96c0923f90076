"""How soon throughput follows when generators come and go during a run.

    python -m benchmarks.scaling --to 4 2 --phase-s 75

A run of `asyncgrpo demo` with the `fake` engine, whose tokens take their time without a CPU, begins with one generator, which
sets the pace. `asyncgrpo scale` brings it to each number in turn. For each phase: groups trained a second in its last half, and
after how many seconds from the command a window of `WINDOW_S` first reached 90 % of that (or fell to 110 %). The run is drained
and audited. One JSON line.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import rounded, show, where
from benchmarks.trials import Fence, audited, events

PER_STEP, GROUP_SIZE = 4, 4
WINDOW_S = 6.0
START_WITHIN_S = 300.0
SETTINGS = [
    f"buffer.prompts_per_step={PER_STEP}",
    f"algorithm.group_size={GROUP_SIZE}",
    "buffer.max_lag=8",
    "generators.groups_in_flight=4",
    "generators.extra={seconds_per_token: 0.1, median_tokens: 20, sigma: 0.3}",
    "generators.count=1",
    "run.eval_every=100000",
    "run.checkpoint_every=100000",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", nargs="+", type=int, default=[4, 2], help="generators, one phase each")
    parser.add_argument("--phase-s", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    phases: list[tuple[int, float]] = []
    with Fence() as fence:
        run = fence.work / "run"
        command = ["demo", "--engine", "fake", "--steps", "1000000", "--seed", str(arguments.seed), "--out", "run"]
        process = fence.start(*command, *SETTINGS)
        deadline = time.monotonic() + START_WITHIN_S
        while len(_steps(run)) < 3:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run trained nothing:\n{fence.said()}")
            time.sleep(0.5)
        phases.append((1, time.time()))
        time.sleep(arguments.phase_s)
        for generators in arguments.to:
            phases.append((generators, time.time()))
            fence.run("scale", "generators", str(generators), "run")
            time.sleep(arguments.phase_s)
        ended = time.time()
        fence.run("drain", "run")
        exit_code = process.wait(timeout=200)
        trained = _steps(run)
        result = {
            "benchmark": "scaling",
            "phases": [
                _phase(trained, generators, since, until, None if i == 0 else phases[i - 1][0])
                for i, ((generators, since), until) in enumerate(
                    zip(phases, [*(at for _, at in phases[1:]), ended], strict=True)
                )
            ],
            "exit": exit_code,
            "restarts": len([e for e in events(run) if e["event"] == "restart"]),
            "syncs_repeated": len([e for e in events(run) if e["event"] == "sync" and e["attempts"] > 1]),
            "audit": audited(fence, run),
            "seed": arguments.seed,
        }
    show(result | where())


def _steps(run: Path) -> list[float]:
    """When each step ended, Unix seconds."""
    return [event["time"] for event in events(run) if event["event"] == "step"]


def _phase(steps: list[float], generators: int, since: float, until: float, before: int | None) -> dict[str, Any]:
    middle = (since + until) / 2
    rate = _rate(steps, middle, until)
    found: dict[str, Any] = {"generators": generators, "groups_per_s": rounded(rate, 3)}
    if before is not None:
        at = since + WINDOW_S
        while at < until and not _is_there(_rate(steps, at - WINDOW_S, at), rate, grows=generators > before):
            at += 0.5
        found["follows_after_s"] = rounded(at - since, 1)
        longest = max((b - a for a, b in itertools.pairwise(steps) if since <= b <= until), default=0.0)
        found["longest_step_s"] = rounded(longest, 2)
    return found


def _is_there(rate: float, settled: float, *, grows: bool) -> bool:
    return rate >= 0.9 * settled if grows else rate <= 1.1 * settled


def _rate(steps: list[float], since: float, until: float) -> float:
    return PER_STEP * sum(since < at <= until for at in steps) / (until - since)


if __name__ == "__main__":
    main()
