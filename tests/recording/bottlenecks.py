"""Six bottlenecks made on purpose, as runs of the product's services on the virtual clock (`asyncgrpo/planner/simulation.py`).

Rewards and the learner take as long as the case says.
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.learner.record import figures
from asyncgrpo.learner.report import PhaseClock
from asyncgrpo.planner import simulation
from asyncgrpo.planner.simulation import VirtualRun
from asyncgrpo.planner.stand_ins import Silent
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import pace_of
from asyncgrpo.types import Group, PolicyVersion

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
        self.steps: list[Event] = [{"event": "start", "time": now()}]

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
        self.steps.append(
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
    return run.recorder.steps
