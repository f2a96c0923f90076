"""The product's buffer, admission and dispatch on a virtual clock, with fake engines of continuous batching.

`Product` runs `BufferService`, `GeneratorService`, `LearnerService` and the codec. In its engines every running completion
gets a token each 0.02 + 0.0001 * running seconds, and lengths are lognormal.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace

import numpy as np

from asyncgrpo.planner import simulation
from asyncgrpo.planner.simulation import VirtualRun
from asyncgrpo.types import Group, PolicyVersion


@dataclass(frozen=True)
class Case(simulation.Case):
    """One setting."""

    train_s: float = 12.0

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        return self._lengths[prompt_index]

    @cached_property
    def _lengths(self) -> np.ndarray:
        """[groups, completions] tokens: lognormal, median 600, at most 8192."""
        drawn = np.random.default_rng(self.seed).lognormal(math.log(600), 1.0, (self.num_groups, self.group_size))
        return np.clip(drawn, 1, 8192).astype(int)

    def train_seconds(self, tokens: int) -> float:
        return self.train_s


@dataclass
class Product(VirtualRun):
    """Runs the product on a case, and keeps what it trained."""

    case: Case
    trained_at: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When which prompt indices were trained."""
    groups: list[tuple[Group, PolicyVersion]] = field(default_factory=list)
    """What was trained, and the version at which its step started."""

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        report = super().step(groups, version)
        self.groups += [(group, version) for group in groups]
        self.trained_at.append((self._loop.time(), tuple(group.prompt_index for group in groups)))
        return report

    @property
    def rollouts(self) -> int:
        return sum(len(group.rollouts) for group, _ in self.groups)

    @property
    def largest_lag(self) -> int:
        return max(lag for step in self.seen for lag in step.lags)
