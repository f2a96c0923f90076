"""Whether a group has anything to teach: whether one of its answers is better than another."""

import math
from collections.abc import Sequence

LEAST = 32
"""Groups in a row without signal that are worth a word."""


def zero_signal(rewards: Sequence[float]) -> str | None:
    """Why no answer of a group is better than another; None if one is.

    Compares exactly, in float64: a standard deviation of equal rewards need not be 0.

    Args:
        rewards: of the scored answers, a greedy one included, as they were scored: the learner shapes them later.
    Returns:
        `all_equal_high` (above 0), `all_equal_low` or `unscored` (fewer than two rewards).
    """
    if len(rewards) < 2:
        return "unscored"
    if max(rewards) > min(rewards):
        return None
    return "all_equal_high" if rewards[0] > 0 else "all_equal_low"


class WithoutSignal:
    """Groups that were filtered one after the other, none with signal among them."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """A group with signal came."""
        self._count, self._told = 0, 0
        self._least, self._most = math.inf, -math.inf

    def add(self, rewards: Sequence[float]) -> None:
        """Another one."""
        self._count += 1
        self._least, self._most = min([self._least, *rewards]), max([self._most, *rewards])

    def news(self) -> str | None:
        """A sentence when they have become many, or ten times as many as when it was said last; else None."""
        if self._count < max(LEAST, 10 * self._told):
            return None
        self._told = self._count
        if self._least > self._most:
            what = "no completion got a reward"
        elif self._least == self._most:
            what = f"every completion got reward {self._least:.4g}"
        else:
            what = f"in each all completions got the same reward, from {self._least:.4g} to {self._most:.4g}"
        return f"all of the last {self._count} groups were filtered as without signal: {what}"
