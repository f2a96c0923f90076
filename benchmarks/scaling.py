"""How soon throughput follows when generators come and go during a run, and how many the autopilot settles on.

    python -m benchmarks.scaling --to 4 2 --phase-s 75
    python -m benchmarks.scaling --autopilot 1 6

A run of `asyncgrpo demo` with the `fake` engine, whose tokens take their time without a CPU, begins with one generator, which
sets the pace. `asyncgrpo scale` brings it to each number in turn. For each phase: groups trained a second in its last half, and
after how many seconds from the command a window of `WINDOW_S` first reached 90 % of that (or fell to 110 %).

With `--autopilot MIN MAX` nobody asks for anything, and the learner sleeps in each step, so that from some number of generators
on one more gains nothing. It ends when nothing has changed for `SETTLED_S`; a phase is what lies between two changes. Both runs
are drained and audited. One JSON line.
"""

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncgrpo.recording.adviser import Autopilot
from benchmarks.bottlenecks import Case, reward_of, slept
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


AUTOPILOT = [
    "buffer.prompts_per_step=8",
    "buffer.max_lag=4",
    "generators.extra={seconds_per_token: 0.4, median_tokens: 20, sigma: 0.3}",
    "generators.autopilot=true",
]
"""Beside `SETTINGS`. A completion has the demo's 4 tokens, so one generator samples 4 groups in 1.6 s: a step in 3.2 s."""
TRAIN_S = 0.9
"""What the learner sleeps in a step of these: with three generators it waits no more."""
SETTLED_S = 4 * Autopilot.LOOKS * Autopilot.EVERY_S
GIVE_UP_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", nargs="+", type=int, default=[4, 2], help="generators, one phase each")
    parser.add_argument("--phase-s", type=float, default=75.0)
    parser.add_argument("--autopilot", nargs=2, type=int, metavar=("MIN", "MAX"), help="generators that it may have")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.autopilot is None:
        found = by_hand(arguments.to, arguments.phase_s, arguments.seed)
    else:
        found = by_autopilot(*arguments.autopilot, arguments.seed)
    show({"benchmark": "scaling"} | found | {"seed": arguments.seed} | where())


def by_hand(to: Sequence[int], phase_s: float, seed: int) -> dict[str, Any]:
    """A run that is told how many generators to have, and what it made of each number."""
    with Fence() as fence:
        run, process = begun(fence, SETTINGS, seed)
        phases = [(1, time.time())]
        time.sleep(phase_s)
        for generators in to:
            phases.append((generators, time.time()))
            fence.run("scale", "generators", str(generators), "run")
            time.sleep(phase_s)
        ended, ends = time.time(), ended_in_order(fence, run, process)
        trained, times = step_times(run), [*(since for _, since in phases[1:]), ended]
        numbers = [None, *(generators for generators, _ in phases)]
        return {
            "phases": [
                _phase(trained, generators, since, until, before)
                for (generators, since), until, before in zip(phases, times, numbers, strict=False)
            ]
        } | ends


def by_autopilot(least: int, most: int, seed: int) -> dict[str, Any]:
    """A run whose autopilot decides, until it has been content for `SETTLED_S`."""
    with Fence() as fence, slept(fence.root, TRAIN_S):
        (fence.root / "reward.py").write_text(reward_of(Case(())))
        bounds = [f"generators.min={least}", f"generators.max={most}", f"generators.count={least}"]
        settings = [*SETTINGS, *AUTOPILOT, *bounds, f"reward.function={fence.root}/reward.py"]
        run, process = begun(fence, settings, seed)
        began = time.time()
        while time.time() - max([began, *(at for at, _ in _changes(run))]) < SETTLED_S:
            if time.time() - began > GIVE_UP_S:
                break
            time.sleep(1.0)
        ended, ends = time.time(), ended_in_order(fence, run, process)
        changes, trained = [(began, least), *_changes(run)], step_times(run)
        engines = [event["engines"] for event in events(run) if event["event"] == "sync"]
        return {
            "bounds": [least, most],
            "generators_seen": [min(engines), max(engines)],
            "phases": [
                {
                    "generators": generators,
                    "from_s": rounded(since - began, 3),
                    "step_s": rounded(statistics.fmean(_between(trained, since, until)), 3),
                    "advice": _advice_until(run, until),
                }
                for (since, generators), (until, _) in itertools.pairwise([*changes, (ended, 0)])
            ],
        } | ends


def begun(fence: Fence, settings: Sequence[str], seed: int) -> tuple[Path, subprocess.Popen[bytes]]:
    """A run of three steps that goes on."""
    run = fence.work / "run"
    command = ["demo", "--engine", "fake", "--steps", "1000000", "--seed", str(seed), "--out", "run"]
    process = fence.start(*command, *settings)
    deadline = time.monotonic() + START_WITHIN_S
    while len(step_times(run)) < 3:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run trained nothing:\n{fence.said()}")
        time.sleep(0.5)
    return run, process


def ended_in_order(fence: Fence, run: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Drain a run, and say how it ended."""
    fence.run("drain", "run")
    exit_code = process.wait(timeout=200)
    return {
        "exit": exit_code,
        "restarts": len([e for e in events(run) if e["event"] == "restart"]),
        "syncs_repeated": len([e for e in events(run) if e["event"] == "sync" and e["attempts"] > 1]),
        "audit": audited(fence, run),
    }


def _changes(run: Path) -> list[tuple[float, int]]:
    """When the autopilot asked for how many generators, Unix seconds."""
    asked = [event for event in events(run) if event["event"] == "command" and not event["refused"]]
    return [(event["time"], int(event["command"].split()[-1])) for event in asked if event["by"] == "autopilot"]


def _between(steps: list[float], since: float, until: float) -> list[float]:
    """The seconds of each step in the last half of a phase."""
    return [b - a for a, b in itertools.pairwise(steps) if (since + until) / 2 < a and b <= until]


def _advice_until(run: Path, until: float) -> str:
    """The last advice before a time."""
    told = [event["sentence"] for event in events(run) if event["event"] == "advice" and event["time"] <= until]
    return told[-1] if told else ""


def step_times(run: Path) -> list[float]:
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
