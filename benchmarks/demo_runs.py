"""Demo runs over engines, lags, admissions and seeds: how many steps and seconds to a reward of 0.9. One JSON line a run.

python -m benchmarks.demo_runs --engines torch --lags 0 1 2 4 8 --seeds 0 1 2
python -m benchmarks.demo_runs --engines torch sglang --admissions eager fresh --seeds 0 1 2 3 4
python -m benchmarks.demo_runs --lags 0 2 8 32 auto --admissions eager fresh

Runs of the same seed follow each other, so that what is compared meets the machine in the same state.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "sglang"])
    parser.add_argument("--lags", nargs="+", default=["2"])
    parser.add_argument("--admissions", nargs="+", default=["fresh"], choices=["eager", "fresh"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    for engine, seed, lag, admission in itertools.product(
        arguments.engines, arguments.seeds, arguments.lags, arguments.admissions
    ):
        overrides = [f"buffer.admission={admission}", *arguments.overrides]
        found = measure(engine, lag, seed, arguments.steps, overrides)
        print(json.dumps({"admission": admission} | found), flush=True)


def measure(engine: str, lag: str, seed: int, steps: int | None, overrides: list[str]) -> dict:
    """Run the demo once, and return what its events say."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "asyncgrpo", "demo", "--engine", engine, "--max-lag", lag]
        command += ["--seed", str(seed), "--out", str(run), *overrides]
        if steps is not None:
            command += ["--steps", str(steps)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return {"engine": engine, "max_lag": lag, "seed": seed, "error": result.stderr.strip().splitlines()[-1:]}
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [event for event in events if event["event"] == "step"]
    rewards = [step["reward_mean"] for step in taken]
    means = [statistics.fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    reached = next((i + WINDOW for i, mean in enumerate(means) if mean >= 0.9), None)
    began = taken[0]["time"] - sum(taken[0]["seconds"].values())
    lags = [int(lag) for step in taken for lag, groups in step["lags"].items() for _ in range(groups)]
    gaps = [step["logprob_gap_max"] for step in taken if step["logprob_gap_max"] is not None]
    return {
        "engine": engine,
        "max_lag": lag,
        "seed": seed,
        "steps": len(taken),
        "reward_first": round(rewards[0], 3),
        "reward_last5": round(means[-1], 3),
        "steps_to_0.9": reached,
        "seconds_to_0.9": None if reached is None else round(taken[reached - 1]["time"] - began, 1),
        "training_seconds": round(taken[-1]["time"] - began, 1),
        "lag_mean": round(statistics.fmean(lags), 2),
        "lag_max": max(lags),
        "max_lag_at_the_end": taken[-1].get("max_lag"),
        "syncs_ok": sum(event["event"] == "sync" and event["checksum"] == "ok" for event in events),
        "logprob_gap_max": max(gaps, default=None),
        "wait_share": round(
            sum(s["seconds"].get("wait_data", 0.0) for s in taken) / sum(sum(s["seconds"].values()) for s in taken), 3
        ),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    main()
