"""What one slow, then frozen generator of four costs the learner.

    python -m benchmarks.slow_engine --phase-s 60
    python -m benchmarks.slow_engine --phase-s 120 --train-s 5 --token-s 0.3 buffer.straggler_factor=2

A run of `asyncgrpo demo` with four `fake` engines, whose tokens take their time without a CPU, and a learner that sleeps
before each step, so that it sets the pace and the generators have some to spare. After a phase in which all is well each
token of one generator takes `--factor` times as long; then it is frozen (SIGSTOP). For each phase: steps a second, the
learner's share of waiting, both also without its first `SETTLE_S`, in which groups end that the generator had begun before,
the longest step, and after how many seconds others went on with its leases. The run is drained and audited. One JSON line.
"""

import argparse
import itertools
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from asyncgrpo.recording.events import Event
from benchmarks.bottlenecks import GROUP_SIZE, PER_STEP, SHARED, SLEEPING_LEARNER, Case, changed
from benchmarks.measuring import rounded, show, where
from benchmarks.scaling import begun, ended_in_order
from benchmarks.trials import Fence, events

SETTLE_S = 20.0
CASE = Case((), generators=4, max_lag=4, train_s=1.0)
SLOW_ENGINE = """
import os
import pathlib

def seconds(self):
    file = pathlib.Path(FILE)
    is_slow = file.exists() and file.read_text() == str(os.getpid())
    return self._seconds * (FACTOR if is_slow else 1)

module.FakeEngine.seconds_per_token = property(seconds, lambda self, value: setattr(self, "_seconds", value))
"""
"""Makes the tokens of the fake engine take longer in the process that a file names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=60.0)
    parser.add_argument("--train-s", type=float, default=CASE.train_s, help="that the learner sleeps before each step")
    parser.add_argument("--token-s", type=float, default=CASE.token_s, help="of a token")
    parser.add_argument("--factor", type=float, default=10.0, help="by which tokens of the slow one take longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings")
    arguments = parser.parse_args()
    lengths = f"median_tokens: {CASE.median_tokens}, sigma: {CASE.sigma}"
    settings = [
        *SHARED,
        *CASE.settings,
        f"generators.extra={{vocab_size: 261, seconds_per_token: {arguments.token_s}, {lengths}}}",
        "buffer.keep_journal=true",
        "buffer.durability=written",
        "control.port=0",
        *arguments.settings,
    ]
    with Fence() as fence:
        slow = fence.root / "slow"
        changes = {
            "asyncgrpo.learner.learner": SLEEPING_LEARNER.replace("SECONDS", repr(arguments.train_s)),
            "asyncgrpo.engines.fake": SLOW_ENGINE.replace("FILE", repr(str(slow))).replace(
                "FACTOR", repr(arguments.factor)
            ),
        }
        with changed(fence.root, changes):
            run, process = begun(fence, settings, arguments.seed)
        time.sleep(SETTLE_S)
        phases = {"well": _lasts(arguments.phase_s)}
        one = _generator(fence)
        slow.write_text(str(one.pid))
        phases["slow"] = _lasts(arguments.phase_s)
        one.suspend()
        phases["frozen"] = _lasts(arguments.phase_s)
        ends = ended_in_order(fence, run, process)
        result = {
            "benchmark": "slow_engine",
            "phases": {name: _phase(_steps(run), *span) for name, span in phases.items()},
            "elsewhere_after_s": [rounded(_elsewhere(run, *phases[name]), 1) for name in list(phases)[1:]],
            "factor": arguments.factor,
            "train_s": arguments.train_s,
            "token_s": arguments.token_s,
            "settings": arguments.settings,
            "generators": CASE.generators,
            "max_lag": CASE.max_lag,
            "prompts_per_step": PER_STEP,
            "group_size": GROUP_SIZE,
            "seed": arguments.seed,
        }
    show(result | ends | where())


def _lasts(seconds: float) -> tuple[float, float]:
    """Wait. Returns when that began and ended, Unix seconds."""
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


def _generator(fence: Fence) -> psutil.Process:
    return next(process for process in fence.processes() if "GeneratorActor" in " ".join(process.cmdline()))


def _steps(run: Path) -> list[Event]:
    return [event for event in events(run) if event["event"] == "step"]


def _phase(steps: list[Event], since: float, until: float) -> dict[str, Any]:
    times = [step["time"] for step in steps if since < step["time"] <= until]
    longest = max(b - a for a, b in itertools.pairwise(times))
    settled = _rates(steps, since + SETTLE_S, until)
    return _rates(steps, since, until) | {"longest_step_s": rounded(longest, 2), "settled": settled}


def _elsewhere(run: Path, since: float, until: float) -> float:
    """Seconds until others went on with the leases of a generator, by the logs; NaN: they did not."""
    line = re.compile(r"^(\S+)Z .*: reassigned ", re.MULTILINE)
    texts = (path.read_text() for path in sorted((run / "logs").glob("*.log")))
    times = [datetime.fromisoformat(f"{when}+00:00").timestamp() for text in texts for when in line.findall(text)]
    return min((when - since for when in times if since < when <= until), default=float("nan"))


def _rates(steps: list[Event], since: float, until: float) -> dict[str, Any]:
    within = [step for step in steps if since < step["time"] <= until]
    seconds = within[-1]["time"] - within[0]["time"]
    waited = sum(step["seconds"]["wait_data"] for step in within[1:])
    return {"steps_per_s": rounded((len(within) - 1) / seconds, 3), "wait_share": rounded(waited / seconds, 3)}


if __name__ == "__main__":
    main()
