"""A group on its way through the buffer: its entry, its seed, and whether it has anything to teach."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncgrpo.types import Lease, PolicyVersion, Prompt
from asyncgrpo.wire.rollouts import Deliver

# -- seeds -------------------------------------------------------------------------------------------------------------


def group_seed(seed: int, prompt_index: int, attempt: int) -> int:
    """The sampling seed of a group: a fixed function of the run's seed and the group's place, below 2^48.

    splitmix64's finaliser, so that neighbouring groups get unrelated streams.
    """
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + prompt_index * 0xD1B54A32D192ED03 + attempt * 0x8CB92BA72F3D8DD7 + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 16


# -- signal ------------------------------------------------------------------------------------------------------------


LEAST = 32
"""Groups in a row without signal that are worth a word."""


def zero_signal(rewards: Sequence[float]) -> str | None:
    """Why no completion of a group is better than another; None if one is.

    Compares exactly, in float64: a standard deviation of equal rewards need not be 0.

    Args:
        rewards: of the scored completions, a greedy one included, as they were scored: the learner shapes them later.
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


# -- entries -----------------------------------------------------------------------------------------------------------


class State(enum.Enum):
    """Where a group is. A group that is trained, filtered, dropped or requeued is forgotten."""

    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass
class Entry:
    """One group on its way."""

    prompt_index: int
    prompt: Prompt
    attempt: int
    lease: Lease
    holder: str
    leased_at_s: float
    oldest: PolicyVersion
    """While leased: the version at the lease. Then: the oldest version that sampled in it."""
    newest: PolicyVersion = field(init=False)
    """The same with the newest version that sampled in it."""
    state: State = State.LEASED
    message: Deliver | None = None
    payload: bytes | memoryview = b""
    limit_s: float = 0.0
    """The lease is over so many seconds after `leased_at_s`."""
    masked: int = 0
    """Sampled tokens that have no weight in the step that took it."""

    def __post_init__(self) -> None:
        self.newest = self.oldest

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, once the group is here."""
        return sum(r.num_tokens for r in self.message.rollouts) if self.message is not None else 0
