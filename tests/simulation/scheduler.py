"""The product's buffer, admission and dispatch beside a plain event model of the same rule.

`product` runs `BufferService`, `GeneratorService`, `LearnerService` and the codec on a virtual clock; its engines are fakes
of continuous batching: every running completion gets a token each 0.02 + 0.0001 * running seconds, and lengths are
lognormal. `model` knows none of these classes: a list of engines, a list of groups, and the rule in twenty lines. Both
meet the same lengths, training times and publications, so the ratio of rollouts/s is the loss to messages, heartbeats and
our code.
"""

import heapq
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
    """One setting of both programs. The event model knows only generators that are equal."""

    train_s: float = 12.0

    def lengths(self) -> np.ndarray:
        """[groups, completions] tokens: lognormal, median 600, at most 8192."""
        drawn = np.random.default_rng(self.seed).lognormal(math.log(600), 1.0, (self.num_groups, self.group_size))
        return np.clip(drawn, 1, 8192).astype(int)

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        return self._lengths[prompt_index]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths()

    def train_seconds(self, tokens: int) -> float:
        return self.train_s


# -- the product -------------------------------------------------------------------------------------------------------


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
    def rollouts_per_s(self) -> float:
        return self.rollouts / self.trained_at[-1][0]

    @property
    def largest_lag(self) -> int:
        return max(lag for step in self.seen for lag in step.lags)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass
class _Engine:
    tokens: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # (end in tokens, group)
    groups: int = 0


def model(case: Case) -> float:
    """Rollouts a second of the same rule with nothing around it."""
    lengths, goal = case.lengths(), case.num_groups
    engines = [_Engine() for _ in range(case.generators)]
    where: dict[int, int] = {}
    missing: dict[int, int] = {}
    born: dict[int, int] = {}  # version at which a group that is not taken began
    issued = version = trained = in_training = 0
    phase, phase_ends, now = "swap", case.transfer_s + case.swap_s, 0.0
    while trained < goal:
        if not (phase == "swap" and version == 0):  # before the first publication nobody may begin
            while issued < goal and len(born) + in_training < (case.max_lag + 1) * case.per_step:
                target = min(range(case.generators), key=lambda e: engines[e].groups)
                if engines[target].groups == case.window:
                    break
                engines[target].groups += 1
                where[issued], missing[issued], born[issued] = target, case.group_size, version
                for tokens in lengths[issued]:
                    heapq.heappush(engines[target].running, (engines[target].tokens + tokens, issued))
                issued += 1
        if phase == "wait" and (batch := _batch(case, born, missing, version, goal - trained)):
            for group in batch:
                del born[group]
            in_training, phase, phase_ends = len(batch), "train", now + case.train_s
        paused = phase == "swap"
        ends = [
            math.inf if paused or not e.running else (e.running[0][0] - e.tokens) * case.token_seconds(len(e.running))
            for e in engines
        ]
        passed = min(*ends, phase_ends - now)
        now += passed
        for engine in engines:
            engine.tokens += 0.0 if paused else passed / case.token_seconds(len(engine.running))
        for engine in engines:
            while not paused and engine.running and engine.running[0][0] <= engine.tokens + 1e-6:
                _, group = heapq.heappop(engine.running)
                missing[group] -= 1
                engines[where[group]].groups -= missing[group] == 0
        if now >= phase_ends - 1e-9:
            if phase == "train":
                trained += in_training
                phase, phase_ends = "transfer", now + case.transfer_s
            elif phase == "transfer":
                phase, phase_ends = "swap", now + case.swap_s
            elif phase == "swap":
                version, in_training = version + 1, 0
                phase, phase_ends = "wait", math.inf
    return trained * case.group_size / now


def _batch(case: Case, born: dict[int, int], missing: dict[int, int], version: int, left: int) -> list[int]:
    """The oldest complete groups, if all the others can still be trained in time."""
    complete = sorted((born[g], g) for g in born if not missing[g])[: case.per_step]
    if len(complete) < min(case.per_step, left):
        return []
    batch = [group for _, group in complete]
    others = [born[g] + case.max_lag - version for g in born if g not in batch]
    fits = all(sum(due <= k for due in others) <= k * case.per_step for k in range(case.max_lag + 1))
    return batch if fits and all(due >= 0 for due in others) else []
