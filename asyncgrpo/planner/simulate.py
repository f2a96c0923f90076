"""A profile and a split on the virtual clock: what `plan` and `simulate` show of the product's own scheduler."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncgrpo.planner.model import Prediction, Split, predict
from asyncgrpo.planner.profile import Profile
from asyncgrpo.planner.simulation import Case, VirtualRun

MOST_STEPS, FEWEST_STEPS = 36, 10
"""Steps that count, after those of the start."""
ROLLOUTS = 40_000
"""So many are enough: a large batch needs fewer steps."""
START = 12
"""Steps of the start, beside those of the bound: as many as `fresh` looks at."""
UNITS = 200
"""A mean completion has so many tokens: there are many, and one is like the next."""
LONGEST_STEP_S = 20.0
"""A step takes no longer: heartbeats come each second, and say nothing new."""


@dataclass(frozen=True)
class PlannedCase(Case):
    """A profile and a split as a case. Its tokens stand for `unit` tokens each, its seconds for `slowdown` seconds."""

    profile: Profile | None = None
    ranks: int = 1
    slowdown: float = 1.0

    @property
    def num_prompts(self) -> int:
        return 3 * self.num_groups + 2 * self.generators * self.window

    @cached_property
    def unit(self) -> float:
        """Tokens of a unit."""
        return max(1.0, self._profile.lengths.mean / UNITS)

    @cached_property
    def _profile(self) -> Profile:
        assert self.profile is not None
        return self.profile

    @cached_property
    def _drawn(self) -> dict[int, np.ndarray]:
        """[prompts, completions] tokens of each attempt that was made."""
        return {}

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        if attempt not in self._drawn:
            sampled = self._profile.lengths.sample(self.num_prompts, self.group_size, [self.seed, attempt])
            self._drawn[attempt] = np.maximum(np.rint(sampled / self.unit), 1).astype(int)
        return self._drawn[attempt][prompt_index]

    def reward(self, prompt_index: int, completion: int) -> float:
        """Equal for all completions of a prompt without signal, else of two kinds."""
        if not self._profile.filtered:
            return float(completion % 2)
        has_signal = np.random.default_rng([self.seed, prompt_index]).random() >= self._profile.filtered
        return float(completion % 2) if has_signal else 1.0

    def train_seconds(self, tokens: int) -> float:
        mean = tokens * self.unit / (self.per_step * self.group_size)
        return self._profile.learner.seconds(self._profile.learner_tokens(mean), self.ranks) / self.slowdown

    def token_seconds(self, running: int) -> float:
        return self.unit * self._profile.decode.token_seconds(running) / self.slowdown

    transfer_s = 0.0

    @property
    def stall_s(self) -> float:  # type: ignore[override]
        return self._profile.publish_s / self.slowdown

    @property
    def swap_s(self) -> float:  # type: ignore[override]
        return self._profile.pause_s / self.slowdown

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        return self._profile.kv_completions

    @property
    def reward_s(self) -> float:  # type: ignore[override]
        return self._profile.reward_s / self.slowdown

    @property
    def reward_workers(self) -> int:  # type: ignore[override]
        return self._profile.reward_workers


def simulate(
    profile: Profile, split: Split, *, start: int | None = None, steps: int | None = None, seed: int = 0
) -> Prediction:
    """Run the product on the virtual clock, and look at the steps after the start.

    Args:
        start: steps that do not count; none: as many as `fresh` remembers of an eager start.
        steps: that are looked at; none: enough, by the size of a batch.
    """
    begin = min(split.max_lag, START) + START if start is None else start
    if steps is None:
        enough = ROLLOUTS // (profile.prompts_per_step * profile.group_size)
        steps = max(FEWEST_STEPS, min(MOST_STEPS, enough))
    case = PlannedCase(
        max_lag=split.max_lag,
        steps=begin + steps,
        seed=seed,
        generators=split.generators,
        window=split.groups_in_flight,
        group_size=profile.group_size,
        per_step=profile.prompts_per_step,
        policy=split.policy,
        admission=split.admission,
        filters=profile.filtered > 0,
        profile=profile,
        ranks=split.ranks,
        slowdown=max(1.0, predict(profile, split).step_s / LONGEST_STEP_S),
    )
    run = VirtualRun(case)
    with _quiet():
        run.run()
    seen = run.seen[begin:]
    first = run.seen[begin - 1]
    elapsed_s = (seen[-1].start_s - first.start_s) * case.slowdown
    lags = np.array([lag for step in seen for lag in step.lags])
    waited_s = sum(step.waited_s for step in seen) * case.slowdown
    busy_s = sum(engine.use.busy_s for engine in run.engines) / len(run.engines)
    completion_s = sum(engine.use.completion_s for engine in run.engines) / len(run.engines)
    running = completion_s / max(busy_s, 1e-9)
    step_s = elapsed_s / len(seen)
    tokens = sum(step.tokens for step in seen) * case.unit
    return Prediction(
        step_s=step_s,
        lag_mean=float(lags.mean()),
        lag_p99=float(np.quantile(lags, 0.99, method="inverted_cdf")),
        tokens_per_s=tokens / elapsed_s,
        learner_idle=waited_s / elapsed_s,
        generator_idle=1 - busy_s / run.end_s,
        saturation=running / profile.decode.knee,
        running=running,
        publish_share=profile.publish_s / step_s,
        bottleneck=predict(profile, split).bottleneck,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of a run that is not there."""
    log = logging.getLogger("asyncgrpo")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
