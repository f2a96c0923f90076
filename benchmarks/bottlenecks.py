"""Six bottlenecks made on purpose: whether the advice names each, and what following it does to the time of a step.

python -m benchmarks.bottlenecks                              all six on the virtual clock, one JSON line each
python -m benchmarks.bottlenecks --real --cases few reward    real runs of `asyncgrpo demo`
python -m benchmarks.bottlenecks --real --keep FOLDER         keep the events of each run
python -m benchmarks.bottlenecks --random 70                  settings drawn at random, on the virtual clock: one line for all

A case is run, the advice of its events is followed as its command or its sentence says, and it is run again. On the virtual
clock are the product's services (`asyncgrpo/planner/simulation.py`); a real run has all processes, and the `fake` engine,
whose tokens take their time without a CPU. In both, rewards and the learner take as long as the case says: in a real run they
sleep, so that the cores are not what is measured. The learner's sleep is shared by its ranks.
"""

import argparse
import atexit
import logging
import os
import random
import re
import shutil
import statistics
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.learner.record import figures
from asyncgrpo.learner.report import PhaseClock
from asyncgrpo.planner import simulation
from asyncgrpo.planner.simulation import VirtualRun
from asyncgrpo.planner.stand_ins import Silent
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import pace_of
from asyncgrpo.types import Group, PolicyVersion
from benchmarks.measuring import rounded, show, where
from benchmarks.trials import Fence, events

PER_STEP, GROUP_SIZE = 8, 4
KNOBS = {
    "generators.count": "generators",
    "generators.groups_in_flight": "in_flight",
    "buffer.max_lag": "max_lag",
    "learner.ranks": "ranks",
    "reward.workers": "reward_workers",
    "algorithm.filter_zero_signal": "filters",
}
"""Settings that advice may ask for, and the field of a case."""


@dataclass(frozen=True)
class Case:
    """A run with a bottleneck. Times in seconds."""

    bottlenecks: tuple[str, ...]
    """What the advice may call it."""
    generators: int = 2
    in_flight: int = 8
    """Groups that one generator works on at once."""
    max_lag: int = 4
    ranks: int = 1
    reward_workers: int = 1
    filters: bool = False
    token_s: float = 0.04
    median_tokens: int = 25
    sigma: float = 0.3
    """Spread of the lengths, which are log-normal; half of the variance is the prompt's."""
    train_s: float = 0.5
    """Of a step, with one rank."""
    reward_s: float = 0.0
    """Of one completion."""
    zero_signal: float = 0.1
    """The share of the prompts whose completions all have one reward."""

    @property
    def settings(self) -> list[str]:
        """It as `key=value`."""
        return [f"{key}={str(getattr(self, name)).lower()}" for key, name in KNOBS.items()]

    def with_setting(self, setting: str) -> "Case":
        """The case with `key=value` in place of what it has."""
        key, _, value = setting.partition("=")
        return replace(self, **{KNOBS[key]: value == "true" if key.endswith("signal") else int(value)})


CASES = {
    "few": Case(("generators",), generators=1, in_flight=4),
    "many": Case(("generators",), generators=4, train_s=2.0),
    "long": Case(("lengths", "bound"), in_flight=16, max_lag=1, sigma=1.2),
    "reward": Case(("reward",), generators=1, reward_s=0.1),
    "learner": Case(("learner",), generators=1, train_s=2.5),
    "signal": Case(("signal",), zero_signal=0.8),
}


@dataclass(frozen=True)
class Found:
    """What the events of a run say."""

    step_s: float
    signal: float
    """The share of the groups with signal."""
    advice: tuple[Advice, ...]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--real", action="store_true", help="real runs instead of the virtual clock")
    parser.add_argument("--keep", type=Path, help="folder for the events of each run")
    parser.add_argument("--random", type=int, metavar="N", help="so many random cases instead, on the virtual clock")
    arguments = parser.parse_args(argv)
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    if arguments.random is not None:
        return show(at_random(arguments.random, arguments.steps))
    for name in arguments.cases:
        show(measure(name, arguments.steps, arguments.real, arguments.keep))


def measure(name: str, steps: int, is_real: bool, keep: Path | None) -> dict[str, object]:
    """Run the case, follow the advice, and run it again."""

    def found(case: Case, when: str) -> Found:
        happened = real_events(case, steps) if is_real else virtual_events(case, steps)
        if keep is not None:
            write(happened, keep / f"{name}-{when}.jsonl")
        return found_in(happened, case)

    case = CASES[name]
    before = found(case, "before")
    advice = before.advice[0]
    after = found(case.with_setting(followed(advice)), "after")
    return {
        "case": name,
        "where": "whole run" if is_real else "virtual clock",
        "is_right": advice.bottleneck in case.bottlenecks,
        "advice": advice.sentence,
        "evidence": advice.evidence,
        "followed": followed(advice),
        "step_s": [rounded(run.step_s, 3) for run in (before, after)],
        "shorter": rounded(1 - after.step_s / before.step_s, 2),
        "predicted": rounded(advice.gain, 2),
        "signal": [rounded(run.signal, 2) for run in (before, after)],
        "then": after.advice[0].sentence,
        "steps": steps,
        **where(),
    }


def at_random(count: int, steps: int) -> dict[str, object]:
    """Follow the advice on so many random cases, and compare what it predicts with what comes of it."""
    draw = random.Random(0)
    gains, named = [], Counter[str]()
    for _ in range(count):
        case = Case(
            (),
            generators=draw.choice((1, 2, 3, 4, 6)),
            in_flight=draw.choice((2, 4, 8, 16)),
            max_lag=draw.choice((0, 1, 2, 4, 8)),
            token_s=draw.choice((0.02, 0.04, 0.08)),
            sigma=draw.choice((0.2, 0.5, 1.0)),
            train_s=draw.choice((0.3, 1.0, 2.0, 4.0)),
            reward_s=draw.choice((0.0, 0.0, 0.0, 0.02, 0.1)),
        )
        before = found_in(virtual_events(case, steps), case)
        advice = before.advice[0]
        named[advice.bottleneck] += 1
        if advice.bottleneck != "none":
            case = case.with_setting(followed(advice))
            after = found_in(virtual_events(case, steps), case)
            gains.append((advice.gain, 1 - after.step_s / before.step_s))
    worth = [(predicted, measured) for predicted, measured in gains if predicted > 0]
    return {
        "cases": count,
        "named": dict(named),
        "shorter": sum(measured > 0.02 for _, measured in worth),
        "of": len(worth),
        "as_long_without_generators": sum(measured > -0.02 for predicted, measured in gains if predicted == 0),
        "of_these": len(gains) - len(worth),
        "median_error": rounded(statistics.median(abs(predicted - measured) for predicted, measured in worth), 2),
        "within_0.15": sum(abs(predicted - measured) <= 0.15 for predicted, measured in worth),
        "steps": steps,
        **where(),
    }


def followed(advice: Advice) -> str:
    """The setting that the advice asks for: of its command, or else the first of its sentence."""
    if found := re.fullmatch(r"scale generators (\d+)", advice.command):
        return f"generators.count={found[1]}"
    found = re.search(r"\b\w+(?:\.\w+)+=\w+", advice.command or advice.sentence)
    assert found, f"nothing to follow: {advice}"
    return found[0]


def found_in(happened: Sequence[Event], case: Case) -> Found:
    config = config_of(case)
    pace, advice = pace_of(happened, config), advise(happened, config)
    assert pace is not None and advice, "the run was too short"
    return Found(pace.step_s, 1 - pace.no_signal, advice)


def config_of(case: Case) -> Config:
    shared = [f"buffer.prompts_per_step={PER_STEP}", f"algorithm.group_size={GROUP_SIZE}"]
    return load_config("quickstart", ["model.path=m", "data.train=t", *shared, *case.settings])


def write(happened: Sequence[Event], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in happened))


# -- on the virtual clock ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnTheClock(simulation.Case):
    """A case as the simulation takes it."""

    of: Case = field(default_factory=lambda: CASES["few"])
    token_s_per_completion = 0.0
    transfer_s, swap_s = 0.05, 0.02

    @property
    def token_s(self) -> float:  # type: ignore[override]
        return self.of.token_s

    @property
    def reward_s(self) -> float:  # type: ignore[override]
        return self.of.reward_s

    @property
    def reward_workers(self) -> int:  # type: ignore[override]
        return self.of.reward_workers

    @property
    def num_prompts(self) -> int:
        return 20 * self.num_groups

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        drawn = [
            _normal(f"{prompt_index}"),
            *(_normal(f"{prompt_index} {attempt} {i}") for i in range(self.group_size)),
        ]
        deviations = (drawn[0] + np.array(drawn[1:])) / np.sqrt(2)
        return np.maximum(1, np.rint(self.of.median_tokens * np.exp(self.of.sigma * deviations))).astype(int)

    def reward(self, prompt_index: int, completion: int) -> float:
        has_signal = _uniform(f"signal {prompt_index}") >= self.of.zero_signal
        return float(has_signal and completion % 2)

    def train_seconds(self, tokens: int) -> float:
        return self.of.train_s / self.of.ranks


def _uniform(text: str) -> float:
    return (zlib.crc32(text.encode()) + 0.5) / 2**32


def _normal(text: str) -> float:
    return NormalDist().inv_cdf(_uniform(text))


class Recorder(Silent):
    """Makes the fields of a `step` event that say where time goes."""

    def __init__(self, now: Any) -> None:
        self._now = now
        self._filtered: Counter[str] = Counter()
        self.told: list[Event] = [{"event": "start", "time": now()}]

    def step(
        self,
        step: int,
        version: PolicyVersion,
        groups: list[Group],
        report: Any,
        counters: dict[str, float],
        seconds: Any,
    ) -> None:
        filtered = Counter({name: int(n) for name, n in counters.items() if name.startswith("filtered_")})
        rewards = [{rollout.score.value for rollout in group.rollouts} for group in groups]
        self.told.append(
            {
                "event": "step",
                "time": self._now(),
                "step": step,
                "lags": dict(Counter(str(version.number - group.versions[0].number) for group in groups)),
                "tokens_trained": sum(group.num_tokens for group in groups),
                "zero_signal_groups": sum(len(of_group) == 1 for of_group in rewards),
                "filtered": dict(filtered - self._filtered),
                "completions": sum(len(group.rollouts) for group in groups),
                "seconds": seconds,
                **figures(counters),
            }
        )
        self._filtered = filtered


class Recorded(VirtualRun):
    """A run on the virtual clock with a recorder."""

    def _build(self) -> None:
        super()._build()
        self._learner._clock = PhaseClock(now=self._loop.time)
        self._learner._recorder = self.recorder = Recorder(self._loop.time)  # type: ignore[assignment]


def virtual_events(case: Case, steps: int) -> list[Event]:
    sizes = {
        "group_size": GROUP_SIZE,
        "per_step": PER_STEP,
        "steps": steps,
        "seed": 0,
        "admission": "fresh",
        "of": case,
    }
    knobs = {"max_lag": case.max_lag, "generators": case.generators, "window": case.in_flight, "filters": case.filters}
    run = Recorded(OnTheClock(**sizes, **knobs))
    run.run()
    return run.recorder.told


# -- real runs ---------------------------------------------------------------------------------------------------------

SHARED = (
    f"buffer.prompts_per_step={PER_STEP}", f"algorithm.group_size={GROUP_SIZE}", "sampling.max_tokens=400",
    "run.eval_every=100000", "run.checkpoint_every=100000", "run.epochs=null", "control.port=null",
    "buffer.durability=memory", "buffer.keep_journal=false",
)  # fmt: skip

SITE = '''"""Changes modules when they are imported. Python imports this one when it starts."""

import importlib.abc
import importlib.machinery
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            exec(CHANGES[name], {"module": module})

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''
"""A `sitecustomize.py`."""

SLEEPING_LEARNER = """
import time

step = module.Learner.step

def slow(self, *arguments):
    time.sleep(SECONDS / self.world)
    return step(self, *arguments)

module.Learner.step = slow
"""

REWARD = '''"""A reward for random completions."""

import time
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(SECONDS)
    has_signal = zlib.crc32(ground_truth.encode()) % 100 >= 100 * ZERO_SIGNAL
    return float(has_signal and zlib.crc32(solution_str.encode()) % 2)
'''


def reward_of(case: Case) -> str:
    """The file of its reward."""
    return REWARD.replace("SECONDS", repr(case.reward_s)).replace("ZERO_SIGNAL", repr(case.zero_signal))


def real_events(case: Case, steps: int) -> list[Event]:
    """The events of a run of the demo in a fence of its own."""
    with Fence() as fence, slept(fence.root, case.train_s):
        (fence.root / "reward.py").write_text(reward_of(case))
        engine = {
            "vocab_size": 261,
            "seconds_per_token": case.token_s,
            "median_tokens": case.median_tokens,
            "sigma": case.sigma,
        }
        extra = ", ".join(f"{name}: {value}" for name, value in engine.items())
        settings = [*SHARED, f"reward.function={fence.root}/reward.py", f"generators.extra={{{extra}}}", *case.settings]
        shutil.copytree(made(), fence.work / "run")
        ended = fence.run("demo", "--engine", "fake", "--out", "run", "--steps", str(steps), *settings, limit_s=900.0)
        assert ended.exit == 0, ended.text[-2000:]
        return [event for event in events(fence.work / "run") if event["event"] != "advice"]


@cache
def made() -> Path:
    """A folder with the demo's model and task, made once."""
    folder = Path(tempfile.mkdtemp(prefix="ag-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_demo_model(folder / "model", seed=0)
    (folder / "data").mkdir()
    write_demo_task(folder / "data" / "train.jsonl", folder / "data" / "eval.jsonl", seed=0)
    return folder


def slept(folder: Path, train_s: float) -> AbstractContextManager[None]:
    """Processes that begin in the block have a learner that sleeps for so long before each step."""
    return changed(folder, {"asyncgrpo.learner.learner": SLEEPING_LEARNER.replace("SECONDS", repr(train_s))})


@contextmanager
def changed(folder: Path, changes: Mapping[str, str]) -> Iterator[None]:
    """In processes that begin in the block, code has changed each of these modules when it is imported; it sees `module`."""
    (folder / "sitecustomize.py").write_text(SITE.replace("CHANGES", repr(dict(changes))))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    main()
