"""Predicted against measured: `asyncgrpo plan` on real runs of this machine, whose engines and learner sleep.

python -m benchmarks.predictions --out runs/predictions

Everything of a run is real (Ray, ZeroMQ, journal, buffer, a learner with a tiny model, publications), but for two things that a
machine of two cores cannot do at several splits at once. Engines are `fake`: a token of each of b completions takes a + c b
seconds, and lengths are log-normal. And the learner of N ranks is one rank that sleeps until a step has taken what N would have.
So "GPUs" are shared between generators and ranks that cost no CPU.

The profile comes from one run alone, the first case (`plan --from`). All others are predicted from it, in closed form and on
the virtual clock, and then run. Step times are means over the steps after the third, lags over their groups. A short run is still
under the impression of its eager start, which `buffer.admission=fresh` remembers for twelve steps, so the simulation is looked at
in the same steps; the formulas are of a long run.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.cluster import core
from asyncgrpo.cluster.wiring import LearnerActor
from asyncgrpo.planner.from_run import FIRST as LEFT_OUT
from asyncgrpo.planner.from_run import profile_of_run, timed_steps
from asyncgrpo.planner.model import Split, predict
from asyncgrpo.planner.presets import lognormal
from asyncgrpo.planner.profile import Profile
from asyncgrpo.planner.simulate import simulate
from benchmarks.measuring import show, where

PACE = "ASYNCGRPO_LEARNER_PACE"
"""Seconds of a step of a learner: of itself, and of each sampled token."""
BASE_S, RANK_S_PER_TOKEN = 0.5, 0.012
TOKEN_S, TOKEN_S_PER_COMPLETION = 0.15, 0.004
PER_STEP, GROUP_SIZE, MAX_TOKENS = 16, 4, 200
SIMULATED = 5
"""Seeds of which the simulation is the mean."""


@dataclass(frozen=True)
class Setting:
    """One run."""

    generators: int
    ranks: int
    max_lag: int = 4
    groups_in_flight: int = 6
    median: float = 20.0
    sigma: float = 0.6

    @property
    def name(self) -> str:
        return "-".join(f"{value:g}" for value in asdict(self).values())

    @property
    def split(self) -> Split:
        return Split(self.generators, self.ranks, self.groups_in_flight, self.max_lag)


FIRST = Setting(3, 3)
SETTINGS = [
    FIRST,
    *(Setting(generators, 6 - generators) for generators in (2, 4, 5)),  # the other splits of six
    Setting(3, 3, max_lag=0),
    Setting(2, 4, max_lag=1),
    Setting(4, 2, groups_in_flight=3),
    Setting(3, 3, median=40.0),
]


class PacedLearner(LearnerActor):
    """A learner whose steps take as long as those of several ranks."""

    def run(self, *arguments: Any) -> str:
        from asyncgrpo.learner.learner import Learner

        step, (base_s, token_s) = Learner.step, map(float, os.environ[PACE].split())

        def paced(learner: Learner, groups: Any, version: Any) -> Any:
            started = time.monotonic()
            report = step(learner, groups, version)
            wanted = base_s + token_s * sum(group.num_tokens for group in groups)
            time.sleep(max(0.0, started + wanted - time.monotonic()))
            return report

        Learner.step = paced  # type: ignore[method-assign]
        return super().run(*arguments)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", type=int, help="places in the list of settings")
    arguments = parser.parse_args(argv)
    if arguments.one:
        return run_here(msgspec.json.decode(arguments.one))
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    first = run(FIRST, arguments.out, arguments.steps, arguments.seeds[0])
    profile = profile_of_run(first)
    # What the run was told, and not what it cost beside it, is the paced learner's number of ranks.
    profile = msgspec.structs.replace(profile, ranks=FIRST.ranks, learner=_for_ranks(profile, FIRST.ranks))
    for place, setting in enumerate(SETTINGS):
        if arguments.only is None or place in arguments.only:
            for seed in arguments.seeds:
                folder = run(setting, arguments.out, arguments.steps, seed)
                show(compare(setting, folder, profile, seed) | where())


def _for_ranks(profile: Profile, ranks: int) -> Any:
    learner = profile.learner
    return msgspec.structs.replace(learner, rank_s_per_token=learner.rank_s_per_token * ranks / profile.ranks)


def run(setting: Setting, out: Path, steps: int, seed: int) -> Path:
    """The folder of its run, which is made if it is not there."""
    folder = out / f"{setting.name}-{seed}"
    if not (folder / "final").exists():
        one = msgspec.json.encode([asdict(setting), str(folder), steps, seed]).decode()
        command = [sys.executable, "-m", "benchmarks.predictions", "--one", one]
        environment = os.environ | {PACE: f"{BASE_S} {RANK_S_PER_TOKEN / setting.ranks}"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder


def run_here(one: Any) -> None:
    """One run in this process, which has the pace in its environment."""
    from asyncgrpo.cli import app
    from benchmarks.predictions import PacedLearner  # by a name that Ray's processes can import

    fields, folder, steps, seed = one
    setting = Setting(**fields)
    core.LearnerActor = PacedLearner  # type: ignore[misc]
    engine = {
        "vocab_size": 261,
        "seconds_per_token": TOKEN_S,
        "seconds_per_completion": TOKEN_S_PER_COMPLETION,
        "median_tokens": setting.median,
        "sigma": setting.sigma,
    }
    settings = {
        "generators.count": setting.generators,
        "generators.groups_in_flight": setting.groups_in_flight,
        "generators.extra": json.dumps(engine),
        "buffer.prompts_per_step": PER_STEP,
        "algorithm.group_size": GROUP_SIZE,
        "sampling.max_tokens": MAX_TOKENS,
        "learner.ranks": 1,
        "run.eval_every": 100_000,
        "run.checkpoint_every": 100_000,
        "run.epochs": "null",
    }
    arguments = ["demo", "--engine", "fake", "--out", folder, "--seed", str(seed), "--steps", str(steps)]
    arguments += ["--max-lag", str(setting.max_lag), *(f"{key}={value}" for key, value in settings.items())]
    app(arguments, standalone_mode=False)


def compare(setting: Setting, folder: Path, profile: Profile, seed: int) -> dict[str, Any]:
    """Step time and mean lag as measured, in closed form and simulated."""
    steps = timed_steps(folder)
    seconds = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    lags = [int(lag) for step in steps for lag, count in step["lags"].items() for _ in range(count)]
    lag = statistics.fmean(lags)
    lengths = profile.lengths
    if (setting.median, setting.sigma) != (FIRST.median, FIRST.sigma):
        lengths = lognormal(setting.median, setting.sigma, MAX_TOKENS)
    known = msgspec.structs.replace(profile, lengths=lengths)
    formula = predict(known, setting.split)
    runs = [simulate(known, setting.split, start=LEFT_OUT, steps=len(steps), seed=seed) for seed in range(SIMULATED)]
    simulated = {name: statistics.fmean(getattr(run, name) for run in runs) for name in ("step_s", "lag_mean")}
    return {
        "what": "predicted against measured",
        **asdict(setting),
        "steps": len(steps),
        "seed": seed,
        "step_s": {"measured": seconds, "formula": formula.step_s, "simulated": simulated["step_s"]},
        "lag": {"measured": lag, "formula": formula.lag_mean, "simulated": simulated["lag_mean"]},
        "error": {
            "step_s": round(simulated["step_s"] / seconds - 1, 3),
            "lag": round(simulated["lag_mean"] / lag - 1, 3) if lag else simulated["lag_mean"],
            "formula_step_s": round(formula.step_s / seconds - 1, 3),
            "formula_lag": round(formula.lag_mean / lag - 1, 3) if lag else formula.lag_mean,
        },
        "publish_s": statistics.median(step["seconds"]["publish"] for step in steps),
        "tokens_per_step": statistics.fmean(step["tokens_trained"] for step in steps),
    }


if __name__ == "__main__":
    main()
