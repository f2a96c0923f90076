"""What a person should be told of a run's curves: that its steps have little signal left, and that it unlearns.

A pure function of the events of a run, in order; a start that resumes feeds it the events so far.
"""

import math
from collections import deque

from asyncgrpo.recording.events import Event

WINDOW = 20
"""Steps that the share of groups with signal is averaged over."""
LITTLE, ENOUGH = 0.25, 0.5
"""Mean shares below which it is little, and above which it is enough again."""
FALL = 0.05
"""Of what the best evaluation had gained over the first: two evaluations in a row that lie further below it than this."""


class TrainingWatch:
    """Says each warning once, and again when what it warned of was over in between."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._has_little = False
        self._first: float | None = None
        self._best = self._before = (0, -math.inf)  # evaluations: step, mean reward
        self._has_fallen = False

    def see(self, event: Event) -> tuple[str, str] | None:
        """Take one event in. Returns what it is about, `signal` or `evaluation`, and the warning, if there is one."""
        if event["event"] == "step" and event.get("zero_signal_groups") is not None:
            return self._see_step(event)
        if event["event"] == "eval" and event.get("reward_mean") is not None:
            return self._see_evaluation(event["step"], event["reward_mean"])
        return None

    def _see_step(self, step: Event) -> tuple[str, str] | None:
        self._shares.append(1 - step["zero_signal_groups"] / max(sum(step["lags"].values()), 1))
        mean = sum(self._shares) / len(self._shares)
        if len(self._shares) < WINDOW or LITTLE <= mean <= ENOUGH:
            return None
        had_little, self._has_little = self._has_little, mean < LITTLE
        if had_little or not self._has_little:
            return None
        return "signal", (
            f"only {mean:.0%} of the groups of the last {WINDOW} steps have two different rewards (mean reward "
            f"{step['reward_mean']:.4g}): the others are solved, or hopeless, and teach nothing; "
            "give other prompts, or set algorithm.filter_zero_signal=true"
        )

    def _see_evaluation(self, step: int, reward: float) -> tuple[str, str] | None:
        self._first = reward if self._first is None else self._first
        before, self._before = self._before, (step, reward)
        best_step, best = self._best = max(self._best, self._before, key=lambda seen: seen[1])
        floor = best - FALL * (best - self._first)
        had_fallen, self._has_fallen = self._has_fallen, max(before[1], reward) < floor
        if had_fallen or not self._has_fallen:
            return None
        return "evaluation", (
            f"the evaluation has fallen to {reward:.4g} at step {step}, from {best:.4g} at step {best_step}: "
            "the run unlearns; docs/stability.md says what to look at"
        )
