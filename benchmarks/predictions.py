"""Predicted against measured steps: the formulas of `asyncgrpo plan` and real runs whose engines and learner sleep.

    python -m benchmarks.predictions --out runs/predictions

Everything of a run is real (Ray, ZeroMQ, journal, buffer, a learner with a tiny model, publications), but for two things that a
machine of two cores cannot do at several splits at once. Engines are `fake`: a token of each of b completions takes a + c b
seconds, and lengths are log-normal. The learner of N ranks is one rank that sleeps until a step has taken what N would take.
Lengths, publications and pauses of the prediction are those of the run, the rest is what the run was told.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.cluster.wiring import LearnerActor
from asyncgrpo.planner.plan import DecodeCurve, LearnerTimes, Split, predict
from benchmarks.measuring import rounded, show, where

PACE = "ASYNCGRPO_LEARNER_PACE"
"""Seconds of a step of the learner: of itself, and of each token."""
BASE_S, RANK_S_PER_TOKEN = 0.5, 0.004
CURVE = DecodeCurve(base_s=0.05, each_s=0.001)
PER_STEP, GROUP_SIZE, MEDIAN, MAX_TOKENS = 16, 4, 20, 400


@dataclass(frozen=True)
class Setting:
    """One run."""

    generators: int
    ranks: int
    max_lag: int = 4
    groups_in_flight: int = 8
    sigma: float = 0.5


SETTINGS = [
    *(Setting(generators, 6 - generators) for generators in (1, 2, 3, 4)),
    *(Setting(3, 3, max_lag=lag, sigma=1.0) for lag in (1, 4, 8)),
    Setting(2, 4, max_lag=4, sigma=1.0),
    Setting(3, 3, max_lag=0),
]


class PacedLearner(LearnerActor):
    """A learner whose steps take as long as those of several ranks."""

    def run(self, *arguments: Any) -> str:
        from asyncgrpo.learner.learner import Learner

        step, (base_s, token_s) = Learner.step, map(float, os.environ[PACE].split())

        def paced(learner: Learner, groups: Any, version: Any) -> Any:
            until_s = time.monotonic() + base_s
            until_s += token_s * sum(group.num_tokens + len(group.prompt.token_ids) for group in groups)
            report = step(learner, groups, version)
            time.sleep(max(0.0, until_s - time.monotonic()))
            return report

        Learner.step = paced  # type: ignore[method-assign]
        return super().run(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=10, help="steps of the start, which do not count")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run(arguments)
    for number, setting in enumerate(SETTINGS):
        folder = arguments.out / f"{number}-{arguments.seed}"
        one = ["--one", msgspec.json.encode(asdict(setting)).decode(), "--out", str(folder)]
        command = [sys.executable, "-m", "benchmarks.predictions", *sys.argv[1:], *one]
        pace = {PACE: f"{BASE_S} {RANK_S_PER_TOKEN / setting.ranks}"}
        subprocess.run(command, check=True, env=os.environ | pace, stdout=subprocess.DEVNULL)
        show(compare(setting, folder, arguments.first) | {"seed": arguments.seed} | where())


def run(arguments: argparse.Namespace) -> None:
    """Run a setting in this process, which has the pace in its environment."""
    from asyncgrpo.cli import app
    from asyncgrpo.cluster import processes
    from benchmarks.predictions import PacedLearner  # by a name that Ray's processes can import

    setting = msgspec.json.decode(arguments.one, type=Setting)
    processes.LearnerActor = PacedLearner  # type: ignore[misc]
    engine = {
        "vocab_size": 261, "seconds_per_token": CURVE.base_s, "seconds_per_completion": CURVE.each_s,
        "median_tokens": MEDIAN, "sigma": setting.sigma,
    }  # fmt: skip
    settings = {
        "generators.count": setting.generators, "generators.groups_in_flight": setting.groups_in_flight,
        "generators.extra": json.dumps(engine), "buffer.prompts_per_step": PER_STEP, "algorithm.group_size": GROUP_SIZE,
        "sampling.max_tokens": MAX_TOKENS, "learner.ranks": 1, "run.eval_every": 10**6, "run.checkpoint_every": 10**6,
        "run.epochs": "null",
    }  # fmt: skip
    words = ["demo", "--engine", "fake", "--out", str(arguments.out), "--seed", str(arguments.seed)]
    words += ["--steps", str(arguments.steps), "--max-lag", str(setting.max_lag)]
    app([*words, *(f"{key}={value}" for key, value in settings.items())], standalone_mode=False)


def compare(setting: Setting, folder: Path, first: int) -> dict[str, Any]:
    """Return step time and mean lag as measured and as predicted."""
    import pyarrow.parquet as pq

    from asyncgrpo.config.load import load_config
    from asyncgrpo.data.tokenizer import load_tokenizer
    from asyncgrpo.planner.tune import COLUMNS, profile_of
    from asyncgrpo.recording.events import read_events

    config = load_config(str(folder / "config.yaml"), [])
    steps = [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"][first:]
    files = sorted((folder / "samples").rglob("step_*.parquet"))[first:]
    rows = [row for file in files for row in pq.read_table(file, columns=COLUMNS).to_pylist()]
    profile = profile_of(config, steps, rows, load_tokenizer(config.model.path), CURVE)
    learner = LearnerTimes(base_s=BASE_S, each_s=RANK_S_PER_TOKEN)
    split = Split(setting.generators, setting.ranks, setting.groups_in_flight, setting.max_lag)
    found = predict(msgspec.structs.replace(profile, learner=learner), split)
    step_s = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    lag = statistics.fmean(int(lag) for step in steps for lag, count in step["lags"].items() for _ in range(count))
    lengths = {"steps": len(steps), "mean_tokens": rounded(profile.lengths.mean)}
    return {"what": "predicted against measured", **asdict(setting), **lengths} | {
        "step_s": rounded(step_s), "predicted_step_s": rounded(found.step_s), "error": rounded(found.step_s / step_s - 1, 2),
        "lag": rounded(lag), "predicted_lag": rounded(found.lag_mean), "limited_by": found.bottleneck,
    }  # fmt: skip


if __name__ == "__main__":
    main()
