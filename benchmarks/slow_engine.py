"""What one slow, then frozen generator of four costs the learner.

    python -m benchmarks.slow_engine --phase-s 60

A run of `asyncgrpo demo` with four `fake` engines, whose tokens take their time without a CPU, and a learner that sleeps before
each step, so that it sets the pace and the generators have some to spare. After a phase in which all is well one generator is
stopped for nine tenths of every second, then for good (SIGSTOP). For each phase: steps a second, the longest step, the learner's
share of waiting. The run is drained and audited. One JSON line.
"""

import argparse
import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

import psutil

from asyncgrpo.recording.events import Event
from benchmarks.bottlenecks import GROUP_SIZE, PER_STEP, SHARED, Case, slept
from benchmarks.measuring import rounded, show, where
from benchmarks.trials import Fence, audited, events

START_WITHIN_S = 300.0
SETTLE_S = 10.0
CASE = Case((), generators=4, max_lag=4, train_s=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=60.0)
    parser.add_argument("--train-s", type=float, default=CASE.train_s, help="that the learner sleeps before each step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    engine = f"{{vocab_size: 261, seconds_per_token: {CASE.token_s}, median_tokens: {CASE.median_tokens}, sigma: {CASE.sigma}}}"
    settings = [
        *SHARED,
        *CASE.settings,
        f"generators.extra={engine}",
        "buffer.keep_journal=true",
        "buffer.durability=written",
    ]
    with Fence() as fence, slept(fence.root, Case((), train_s=arguments.train_s)):
        run = fence.work / "run"
        command = ["demo", "--engine", "fake", "--steps", "1000000", "--seed", str(arguments.seed), "--out", "run"]
        process = fence.start(*command, *settings)
        deadline = time.monotonic() + START_WITHIN_S
        while len(_steps(run)) < 5:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run trained nothing:\n{fence.said()}")
            time.sleep(0.5)
        time.sleep(SETTLE_S)
        phases = {"well": _lasts(arguments.phase_s)}
        one = _generator(fence)
        with _slowed(one):
            phases["a tenth of the speed"] = _lasts(arguments.phase_s)
        one.suspend()
        phases["frozen"] = _lasts(arguments.phase_s)
        process.terminate()  # drains
        exit_code = process.wait(timeout=200)
        result = {
            "benchmark": "slow_engine",
            "phases": {name: _phase(_steps(run), *span) for name, span in phases.items()},
            "train_s": arguments.train_s,
            "generators": CASE.generators,
            "max_lag": CASE.max_lag,
            "prompts_per_step": PER_STEP,
            "group_size": GROUP_SIZE,
            "exit": exit_code,
            "audit": audited(fence, run),
            "seed": arguments.seed,
        }
    show(result | where())


def _lasts(seconds: float) -> tuple[float, float]:
    """Wait. Returns when that began and ended, Unix seconds."""
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


def _generator(fence: Fence) -> psutil.Process:
    return next(process for process in fence.processes() if "GeneratorActor" in " ".join(process.cmdline()))


@contextmanager
def _slowed(process: psutil.Process) -> Iterator[None]:
    """Stop it for nine tenths of every second."""
    over = Flag()

    def work() -> None:
        while not over.is_set():
            process.send_signal(signal.SIGSTOP)
            over.wait(0.9)
            process.send_signal(signal.SIGCONT)
            over.wait(0.1)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _steps(run: Path) -> list[Event]:
    return [event for event in events(run) if event["event"] == "step"]


def _phase(steps: list[Event], since: float, until: float) -> dict[str, Any]:
    within = [step for step in steps if since < step["time"] <= until]
    times = [step["time"] for step in within]
    return {
        "steps_per_s": rounded((len(times) - 1) / (times[-1] - times[0]), 3),
        "longest_step_s": rounded(max(b - a for a, b in itertools.pairwise(times)), 2),
        "wait_share": rounded(sum(step["seconds"]["wait_data"] for step in within[1:]) / (times[-1] - times[0]), 3),
    }


if __name__ == "__main__":
    main()
