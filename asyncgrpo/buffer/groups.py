"""One group in the buffer: its entry and state, its sampling seed, and whether its rewards differ."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncgrpo.types import Lease, PolicyVersion, Prompt
from asyncgrpo.wire.rollouts import Deliver

# -- entries -----------------------------------------------------------------------------------------------------------


class State(enum.Enum):
    """Where a group is. A group that is trained, filtered, dropped or requeued has no entry any more."""

    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass
class GroupEntry:
    """One group that holds a slot, from its lease until it is trained, filtered, dropped or requeued."""

    prompt_index: int
    prompt: Prompt
    attempt: int
    lease: Lease
    holder: str
    leased_at_s: float
    oldest: PolicyVersion
    """The oldest version that sampled in it; while leased, the version at the lease."""
    max_lag: int
    """The bound in force at the lease, optimizer steps."""
    newest: PolicyVersion = field(init=False)
    """The newest version that sampled in it; while leased, the version at the lease."""
    state: State = State.LEASED
    is_sampled: bool = False
    """While leased: only scores are missing."""
    message: Deliver | None = None
    payload: bytes | memoryview = b""
    limit_s: float = 0.0
    """The lease expires this many seconds after `leased_at_s`."""
    num_tokens: int = field(init=False, default=0)
    """Sampled tokens, once the group is here."""
    ready_at_s: float | None = None
    """When the group came; None: it has not, or an earlier start left it."""
    masked: int = 0
    """Sampled tokens that have no weight in the step that took it."""

    def __post_init__(self) -> None:
        self.newest = self.oldest

    @property
    def deadline(self) -> int:
        """The number of the last version at which a step may take it."""
        return self.oldest.number + self.max_lag

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def arrived(self, message: Deliver, payload: bytes | memoryview, now_s: float | None = None) -> None:
        """Keep the group that came for this lease. `message` has at least one version span."""
        self.message, self.payload, self.ready_at_s = message, payload, now_s
        self.num_tokens = message.num_tokens
        self.oldest, self.newest = min(message.versions), max(message.versions)


# -- seeds -------------------------------------------------------------------------------------------------------------


def group_seed(seed: int, prompt_index: int, attempt: int) -> int:
    """The sampling seed of a group, below 2^48: a fixed function of the run's seed, the prompt index and the attempt.

    It is splitmix64's finaliser, so that neighbouring groups get unrelated streams.
    """
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + prompt_index * 0xD1B54A32D192ED03 + attempt * 0x8CB92BA72F3D8DD7 + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 16


# -- signal ------------------------------------------------------------------------------------------------------------


REPORTED_STREAK = 32
"""Groups in a row without signal after which a warning is given."""


def rewards_of(message: Deliver) -> list[float]:
    """The rewards of the completions that have one, a greedy one included."""
    return [r.score.value for r in message.rollouts if r.score.value is not None]


def zero_signal(rewards: Sequence[float]) -> str | None:
    """Why a group has no signal; None if its rewards differ.

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


class ZeroSignalStreak:
    """Counts groups that were filtered one after the other, with no group with signal between them."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """A group with signal came: begin at 0."""
        self._count, self._reported = 0, 0
        self._least, self._most = math.inf, -math.inf

    def add(self, rewards: Sequence[float]) -> None:
        """Count a filtered group with these rewards."""
        self._count += 1
        self._least, self._most = min([self._least, *rewards]), max([self._most, *rewards])

    def news(self) -> str | None:
        """A warning at `REPORTED_STREAK` groups, and whenever they are ten times as many as at the last warning."""
        if self._count < max(REPORTED_STREAK, 10 * self._reported):
            return None
        self._reported = self._count
        if self._least > self._most:
            what = "no completion got a reward"
        elif self._least == self._most:
            what = f"every completion got reward {self._least:.4g}"
        else:
            what = f"in each all completions got the same reward, from {self._least:.4g} to {self._most:.4g}"
        return f"all of the last {self._count} groups were filtered as without signal: {what}"
