"""The staleness policies side by side: who waits, what is dropped, and which groups the learner trains.

python -m benchmarks.policies --policies wait drop --lags 1 4 --sigmas 1.0

The product's services run on a virtual clock, with fake engines of continuous batching, in which every running completion
gets a token each 0.02 + 0.0001 * running seconds. Lengths are
log-normal with median 600 tokens; half of the variance is the prompt's, so a prompt that was slow once is likely to be slow
again, and long completions have lower rewards. The learner stops after `--steps`, and prompts do not run out.

`length_distance` and `reward_distance` look at what a policy cannot see: the groups that were trained against the first
groups to the first prompts, as many as were trained. `monitor` is what the product's own bias monitor says at the end.
`idle` is the learner's share of time without a batch, `given_up` the share of leases that were dropped or cancelled for
their age, `wasted` the share of tokens that had no part in training.
"""

import argparse
import itertools
import logging
import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncgrpo.buffer.group_health import ks_distance
from asyncgrpo.planner.simulation import Case, VirtualRun
from asyncgrpo.types import Group, PolicyVersion
from benchmarks.measuring import line, rounded, show

MEDIAN, LONGEST = 600, 16384
SLOWEST = "how many times as long as the others one generator takes for a token"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["wait", "drop", "train"])
    parser.add_argument("--lags", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.5, 1.0, 1.5])
    parser.add_argument("--train-s", nargs="+", type=float, default=[12.0], help="seconds of a step")
    parser.add_argument("--slowest", nargs="+", type=float, default=[1.0], help=SLOWEST)
    parser.add_argument("--generators", nargs="+", type=int, default=[4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(argv)
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    swept = {
        "sigma": arguments.sigmas, "train_s": arguments.train_s, "slowest": arguments.slowest,
        "generators": arguments.generators, "max_lag": arguments.lags, "policy": arguments.policies,
    }  # fmt: skip
    for values in itertools.product(*swept.values()):
        report(dict(zip(swept, values, strict=True)), arguments.steps, arguments.seeds)


def report(case: dict[str, Any], steps: int, seeds: list[int]) -> None:
    """Print one line: groups trained per second, and the medians of the other figures."""
    found = [virtual_run(LongTail(steps=steps, seed=seed, **case)) for seed in seeds]
    medians = {name: rounded(statistics.median(one[name] for one in found), 3) for name in found[0] if name != "rate"}
    rates = [one["rate"] for one in found]
    show(line("groups trained per second", rates, "1/s", seed=seeds[0], where="virtual clock", **case, **medians))


@dataclass(frozen=True)
class LongTail(Case):
    """A case whose prompts differ in the length of their completions, and in how often these are right."""

    sigma: float = 1.0
    train_s: float = 12.0

    def train_seconds(self, tokens: int) -> float:
        return self.train_s

    @property
    def num_prompts(self) -> int:
        return 20 * self.num_groups

    @cached_property
    def _hardness(self) -> np.ndarray:
        """[prompts] standard normal."""
        return np.random.default_rng([self.seed, 0]).standard_normal(self.num_prompts)

    @lru_cache  # noqa: B019  lives as long as the case
    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        own = np.random.default_rng([self.seed, 1, prompt_index, attempt]).standard_normal(self.group_size)
        deviation = (self._hardness[prompt_index] + own) / math.sqrt(2)
        return np.clip(MEDIAN * np.exp(self.sigma * deviation), 1, LONGEST).astype(int)

    def reward(self, prompt_index: int, completion: int) -> float:
        drawn = np.random.default_rng([self.seed, 2, prompt_index, completion]).standard_normal()
        return float(drawn > self._hardness[prompt_index])


@dataclass
class Product(VirtualRun):
    """Runs the product's buffer, generators and learner loop on a case, and keeps what it trained."""

    groups: list[tuple[Group, PolicyVersion]] = field(default_factory=list)
    """What was trained, and the version at which its step started."""
    ended_s: float = 0.0

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        report = super().step(groups, version)
        self.groups += [(group, version) for group in groups]
        self.ended_s = self._loop.time()
        return report


def virtual_run(case: LongTail) -> dict[str, float]:
    """The figures of one run on the virtual clock."""
    product = Product(case).run()
    elapsed_s = product.ended_s
    outcomes, tokens = product.buffer.outcomes, product.buffer.tokens
    aborted = sum(engine.aborted_tokens for engine in product.engines)
    first = range(len(product.groups))
    lags = [version.number - group.versions[0].number for group, version in product.groups]
    lengths = [group.num_tokens / len(group.rollouts) for group, _ in product.groups]
    rewards = [statistics.fmean(r.score.value or 0.0 for r in group.rollouts) for group, _ in product.groups]
    completions = range(1, case.group_size + 1)
    monitor = product.buffer.bias.distances()
    return {
        "rate": len(product.groups) / elapsed_s,
        "idle": 1 - case.steps * (case.train_s + case.stall_s) / elapsed_s,
        "given_up": given_up(outcomes) / outcomes["leased"],
        "prompts_given_up": outcomes["dropped_always_stale"] / outcomes["leased"],
        "wasted": (tokens["stale"] + aborted) / (tokens["generated"] + aborted),
        "length_distance": ks_distance(
            lengths, [float(case.lengths_of(prompt_index, 0).mean()) for prompt_index in first]
        ),
        "reward_distance": ks_distance(
            rewards, [statistics.fmean(case.reward(prompt_index, a) for a in completions) for prompt_index in first]
        ),
        "monitor_length": monitor.get("length", math.nan),
        "monitor_reward": monitor.get("reward", math.nan),
        "lag_mean": statistics.fmean(lags),
        "lag_p90": float(np.quantile(lags, 0.9, method="inverted_cdf")),
        "lag_above_8": sum(lag > 8 for lag in lags) / len(lags),
        "lag_max": max(lags),
    }


def given_up(outcomes: dict[str, int]) -> int:
    return sum(outcomes.get(f"dropped_{why}", 0) for why in ("stale", "cancelled", "always_stale"))


if __name__ == "__main__":
    main()
