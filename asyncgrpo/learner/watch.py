"""Warnings about the curves of a run: a pure function of its events, in order.

docs/small-tasks.md explains the condition and the remedy of each warning.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from msgspec import Struct

from asyncgrpo.recording.health import limit_of

Event = dict[str, Any]

WINDOW = 20
"""Number of steps in the window."""
LITTLE, ENOUGH = 1 - limit_of("LittleSignal"), 0.5
"""Mean shares of groups with a signal: the warning starts below the first and ends above the second."""
FALL = 0.05
"""Share of the best evaluation's gain over the first: two consecutive evaluations that lost more than this are a fall."""
NARROW = 0.05
"""Share of the first step's entropy below which the policy hardly explores."""
SHORT = 0.1
"""Remaining share of the way from the first mean reward to the best completion's reward above which a task is unsolved."""
RISES = 0.01
"""Rise from the first to the second half of the window, as a share of that way, above which the reward still improves."""
FAR = 0.5
"""Mean KL of the behaviour policy to the trained one, nats per token, above which most ratios are uninformative."""


_LOOKED_AT = ("zero_signal_groups", "lags", "reward_mean", "reward_max", "entropy", "diagnostics")


class Watched(Struct, frozen=True, kw_only=True):
    """State of a `TrainingWatch`."""

    steps: list[Event] = []
    """The newest `WINDOW` steps, reduced to the watched fields."""
    start: Event | None = None
    """The first step."""
    is_on: dict[str, bool] = {}
    """By warning, True while its condition lasts."""
    first: float | None = None
    """Mean reward of the first evaluation."""
    best: tuple[int, float] | None = None
    """Step and mean reward of the best evaluation."""
    before: tuple[int, float] | None = None
    """Step and mean reward of the newest evaluation."""


class TrainingWatch:
    """Emits each warning once per occurrence of its condition."""

    def __init__(self, state: Watched | None = None) -> None:
        """
        Args:
            state: state after the events so far; None: there were none.
        """
        state = state or Watched()
        self._steps: deque[Event] = deque(state.steps, maxlen=WINDOW)
        self._start = state.start
        self._is_on = dict(state.is_on)
        self._first = state.first
        nothing = (0, -math.inf)
        self._best, self._before = state.best or nothing, state.before or nothing  # evaluations: step, mean reward

    def state(self) -> Watched:
        """Return the state from which another watch can continue."""
        evaluated = self._first is not None
        return Watched(
            steps=list(self._steps),
            start=self._start,
            is_on=self._is_on,
            first=self._first,
            best=self._best if evaluated else None,
            before=self._before if evaluated else None,
        )

    def see(self, event: Event) -> tuple[str, str] | None:
        """Process one event. Return the topic (`signal`, `entropy`, `steps` or `evaluation`) and the text of a new warning,
        or None."""
        if event["event"] == "step" and event.get("zero_signal_groups") is not None:
            event = {name: event.get(name) for name in _LOOKED_AT}
            self._steps.append(event)
            self._start = self._start or event
            watched = {"signal": self._signal, "entropy": self._entropy, "steps": self._far}
            return next(filter(None, (self._new(about, look) for about, look in watched.items())), None)
        if event["event"] == "eval" and event.get("reward_mean") is not None:
            return self._new("evaluation", lambda: self._fall(event["step"], event["reward_mean"]))
        return None

    def _new(self, about: str, look: Callable[[], str | bool]) -> tuple[str, str] | None:
        """Return the warning if it is new. `look` returns its text, False if the condition is over, True to keep the state."""
        if about != "evaluation" and len(self._steps) < WINDOW:
            return None
        found, was_on = look(), self._is_on.get(about, False)
        if found is not True:
            self._is_on[about] = bool(found)
        return (about, found) if isinstance(found, str) and not was_on else None

    def _signal(self) -> str | bool:
        share = fmean(1 - step["zero_signal_groups"] / max(sum(step["lags"].values()), 1) for step in self._steps)
        if share >= LITTLE:
            return share <= ENOUGH
        reward = self._steps[-1]["reward_mean"]
        if all(step.get("reward_max") == step["reward_mean"] for step in self._steps) and reward <= 0:
            return (
                f"no completion of the last {WINDOW} steps has earned more than another (all have {reward:.4g}), so there "
                "is no signal: reward parts of a right answer, start with easier prompts, or give the model examples "
                "first; a larger algorithm.group_size helps if one completion in some hundreds is right"
            )
        return (
            f"only {share:.0%} of the groups of the last {WINDOW} steps have two different rewards (mean reward "
            f"{reward:.4g}): the others are solved or hopeless and have no signal; "
            "choose other prompts, or set algorithm.filter_zero_signal=true"
        )

    def _entropy(self) -> str | bool:
        """Detect entropy collapse: the policy hardly explores and does not improve, although better completions exist."""
        assert self._start is not None
        entropies, rewards, best = (self._numbers(name) for name in ("entropy", "reward_mean", "reward_max"))
        before, first = self._start.get("entropy"), self._start["reward_mean"]
        if not (entropies and rewards and best and before) or fmean(entropies) >= 2 * NARROW * before:
            return False
        way, half = max(best) - first, WINDOW // 2
        if max(best) - fmean(rewards) < SHORT * way:
            return False
        if fmean(entropies) >= NARROW * before or fmean(rewards[half:]) - fmean(rewards[:half]) > RISES * way:
            return True
        return (
            f"the policy has settled at a mean reward of {fmean(rewards):.4g}, where the best completion has {max(best):.4g}: "
            f"its entropy is {fmean(entropies):.2g} nats, from {before:.2g}, so it no longer explores; return to an earlier "
            "checkpoint or restart, with a smaller learner.lr or a larger algorithm.entropy_coef, and check whether the "
            "reward favours its present behaviour: asyncgrpo samples RUN --worst"
        )

    def _far(self) -> str | bool:
        distances = [(step.get("diagnostics") or {}).get("kl_k3") for step in self._steps]
        known = [distance for distance in distances if distance is not None]
        if not known or fmean(known) <= FAR:
            return bool(known) and fmean(known) > FAR / 2
        return (
            f"the updates are large: in the last {WINDOW} steps the policy had moved {fmean(known):.2g} nats per token from "
            "the weights that sampled, so training is unstable; lower learner.lr or buffer.max_lag"
        )

    def _numbers(self, name: str) -> Sequence[float]:
        """Return one field of every step of the window; empty if a step lacks it."""
        found = [step.get(name) for step in self._steps]
        return [] if None in found else [number for number in found if number is not None]

    def _fall(self, step: int, reward: float) -> str | bool:
        self._first = reward if self._first is None else self._first
        before, self._before = self._before, (step, reward)
        best_step, best = self._best = max(self._best, self._before, key=lambda seen: seen[1])
        if max(before[1], reward) >= best - FALL * (best - self._first):
            return False
        return (
            f"the evaluation has fallen to {reward:.4g} at step {step}, from {best:.4g} at step {best_step}: "
            "the policy is getting worse; see docs/stability.md"
        )
