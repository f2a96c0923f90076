"""Demo runs over engines, lags and seeds: how many steps and seconds to a reward of 0.9. One JSON line a run.

python -m benchmarks.demo_runs --engines torch --lags 0 1 2 4 8 --seeds 0 1 2
python -m benchmarks.demo_runs --engines torch sglang --seeds 0 1 2 3 4
python -m benchmarks.demo_runs --lags 0 2 8 32 auto

Runs of the same seed follow each other, so that what is compared meets the machine in the same state.
"""

import argparse
import itertools
from statistics import fmean
from typing import Any

from benchmarks.measuring import show, where
from benchmarks.trials import Fence, events

WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "sglang"])
    parser.add_argument("--lags", nargs="+", default=["2"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_args()
    for engine, seed, lag in itertools.product(given.engines, given.seeds, given.lags):
        typed = ["--engine", engine, "--max-lag", lag, "--seed", str(seed)]
        typed += [*given.overrides, *([] if given.steps is None else ["--steps", str(given.steps)])]
        about = {"engine": engine, "max_lag": lag, "seed": seed}
        show(about | measure(typed) | where())


def measure(typed: list[str]) -> dict[str, Any]:
    """Run the demo once, and return the figures of its events."""
    with Fence() as fence:
        ended = fence.run("demo", "--out", "run", *typed, limit_s=7200)
        if ended.exit:
            return {"error": ended.err.strip().splitlines()[-1:]}
        happened = events(fence.work / "run")
    taken = [event for event in happened if event["event"] == "step"]
    rewards = [step["reward_mean"] for step in taken]
    means = [fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    reached = next((i + WINDOW for i, mean in enumerate(means) if mean >= 0.9), None)
    began = taken[0]["time"] - sum(taken[0]["seconds"].values())
    lags = [int(lag) for step in taken for lag, groups in step["lags"].items() for _ in range(groups)]
    waited = sum(step["seconds"].get("wait_data", 0.0) for step in taken)
    return {
        "steps": len(taken),
        "reward_first": round(rewards[0], 3),
        "reward_last5": round(means[-1], 3) if means else None,
        "steps_to_0.9": reached,
        "seconds_to_0.9": None if reached is None else round(taken[reached - 1]["time"] - began, 1),
        "training_seconds": round(taken[-1]["time"] - began, 1),
        "lag_mean": round(fmean(lags), 2),
        "lag_max": max(lags),
        "max_lag_at_the_end": taken[-1].get("max_lag"),
        "syncs_ok": sum(event["event"] == "sync" and event["checksum"] == "ok" for event in happened),
        "logprob_gap_max": max((step["logprob_gap_max"] or 0.0 for step in taken), default=None),
        "wait_share": round(waited / sum(sum(step["seconds"].values()) for step in taken), 3),
    }


if __name__ == "__main__":
    main()
