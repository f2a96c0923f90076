"""How much the scheduler loses: the product's buffer, admission and dispatch against a plain event model of the same rule.

python -m benchmarks.scheduler --lags 0 1 4 --steps 40

`product` runs `BufferService`, `GeneratorService`, `LearnerService` and the codec on a virtual clock; its engines are fakes
of continuous batching: every running completion gets a token each 0.02 + 0.0001 * running seconds, and lengths are
lognormal. `model` knows none of these classes: a list of engines, a list of groups, and the rule in twenty lines. Both
meet the same lengths, training times and publications, so the ratio of rollouts/s is what messages, heartbeats and our
code lose. CPU microseconds are of one process that does everything; `buffer` is the share of the buffer's process.
"""

import argparse
import heapq
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncgrpo.planner import simulation
from asyncgrpo.planner.simulation import VirtualRun
from asyncgrpo.types import Group, PolicyVersion
from benchmarks.measuring import line, rounded, show


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(argv)
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    for max_lag in arguments.lags:
        ratios, cpu_us, buffer_us, rates, most, exact = [], [], [], [], 0, True
        for seed in arguments.seeds:
            case = Case(max_lag, arguments.steps, seed)
            product = Product(case, with_cpu=True).run()
            exact = exact and Product(case).run().trained_at == product.trained_at
            rates.append(product.rollouts_per_s)
            ratios.append(product.rollouts_per_s / model(case))
            cpu_us.append(product.cpu_s / product.rollouts * 1e6)
            buffer_us.append(product.buffer_s / product.rollouts * 1e6)
            most = max(most, product.largest_lag)
        show(
            line(
                "rollouts/s of the product / of the event model",
                ratios,
                "1",
                seed=arguments.seeds[0],
                max_lag=max_lag,
                largest_lag=most,
                same_run_twice=exact,
                rollouts_per_virtual_s=[rounded(rate) for rate in rates],
                cpu_us_per_rollout=[rounded(one, 3) for one in cpu_us],
                buffer_us_per_rollout=[rounded(one, 3) for one in buffer_us],
                **{k: v for k, v in asdict(case).items() if k not in ("max_lag", "seed")},
            )
        )


# -- the product -------------------------------------------------------------------------------------------------------


@dataclass
class Product(VirtualRun):
    """Runs the product on a case, and keeps what it trained."""

    case: Case
    with_cpu: bool = False
    """Whether the CPU time of the buffer's part is measured, which itself takes long."""
    cpu_s: float = 0.0
    buffer_s: float = 0.0
    trained_at: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When which prompt indices were trained."""
    groups: list[tuple[Group, PolicyVersion]] = field(default_factory=list)
    """What was trained, and the version at which its step started."""

    def run(self) -> "Product":
        started = time.process_time()
        super().run()
        self.cpu_s = time.process_time() - started
        return self

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

    def _turn(self, received: Any) -> None:
        started = time.process_time() if self.with_cpu else 0.0
        super()._turn(received)
        self.buffer_s += time.process_time() - started if self.with_cpu else 0.0


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


if __name__ == "__main__":
    main()
