"""What the generators say of their rewards, put together: who is paused, what fails, and whether anything ever worked.

Each generator breaks its own circuit (`rewards/breaker.py`). Here is what follows for the run: no lease for who is
paused, nothing charged to the prompts there, and an end where no call ever worked. No sockets, no clock.
"""

from collections.abc import Callable

from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import RewardHealth
from asyncgrpo.wire.rollouts import RewardFailed

NEVER_WORKED_S = 30.0
"""For which every call must have failed, the first included, before a reward is said never to have worked."""
NEVER_WORKED_CALLS = 3
"""That must have failed by then."""

MAX_COUNTED = 1024
"""Kinds of failures by generator. What is beyond it is not counted: whatever is said, this does not grow."""

Tell = Callable[..., object]
"""Writes an event: its kind, then its fields."""


class Scoring:
    """The rewards of all generators in touch."""

    def __init__(self, name: str, *, has_worked: bool, tell: Tell) -> None:
        """
        Args:
            name: of the reward, for messages.
            has_worked: in an earlier start under the same command, so that it may be waited for.
        """
        self._name = name
        self._has_worked = has_worked
        self._tell = tell
        self._health: dict[str, RewardHealth] = {}
        self._paused_since_s: dict[str, float] = {}
        self._tally = Tally()
        self._counted: dict[tuple[str, str], int] = {}

    def hear(self, generator: str, health: RewardHealth, now_s: float) -> None:
        """A generator says how its calls went."""
        before = self._health.get(generator, RewardHealth()).probe_in_s
        self._health[generator] = health
        self._has_worked |= health.worked > 0
        if health.probe_in_s is None:
            self._resumed(generator, now_s)
        elif before is None or health.probe_in_s > before:  # paused, or another probe failed
            self._paused_since_s.setdefault(generator, now_s)
            self._tell("rewards_paused", actor=generator, reason=health.last, probe_in_s=health.probe_in_s)

    def failed(self, message: RewardFailed) -> None:
        """A generator has news of a kind of failure."""
        key = message.generator_id, message.failure
        if key not in self._counted and len(self._counted) >= MAX_COUNTED:
            return
        new = message.count - self._counted.get(key, 0)
        self._counted[key] = message.count
        # A generator that started again counts from the beginning.
        count = self._tally.add(message.failure, new if new > 0 else message.count)
        if count is not None:
            detail = message.detail[:500]
            self._tell("reward_failed", actor=message.generator_id, failure=message.failure, detail=detail, count=count)

    def forget(self, generator: str, now_s: float) -> None:
        """It is gone."""
        self._health.pop(generator, None)
        self._resumed(generator, now_s)

    def is_paused(self, generator: str) -> bool:
        return generator in self._paused_since_s

    def in_words(self) -> str | None:
        """Who is paused, until when, and why; None: nobody is."""
        if not self._paused_since_s:
            return None
        probe_in_s, last = min(
            (health.probe_in_s or 0.0, health.last) for health in map(self._health.__getitem__, self._paused_since_s)
        )
        return (
            f"rewards (paused at {', '.join(sorted(self._paused_since_s))}, probing again in {probe_in_s:.0f} s; "
            f"the last call failed with {last})"
        )

    @property
    def verdict(self) -> str:
        """Why nothing will ever be scored; empty: it may be."""
        failed = sum(health.failed for health in self._health.values())
        longest = max(self._health.values(), key=lambda health: health.failing_s, default=RewardHealth())
        if self._has_worked or longest.failing_s < NEVER_WORKED_S or failed < NEVER_WORKED_CALLS:
            return ""
        return f"{self._name} never worked: {failed} of {failed} calls failed, the last with {longest.last}"

    def _resumed(self, generator: str, now_s: float) -> None:
        if (since_s := self._paused_since_s.pop(generator, None)) is not None:
            self._tell("rewards_resumed", actor=generator, seconds=now_s - since_s)
