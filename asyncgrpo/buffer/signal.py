"""Whether a group has anything to teach: whether one of its answers is better than another."""

from collections.abc import Sequence


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
