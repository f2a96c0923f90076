"""How the rewards of all generators do: who is paused, what fails, and whether any call ever worked.

Each generator has its own circuit breaker (`rewards/breaker.py`). This file says what follows for the run: a paused
generator gets no lease, its prompts are charged nothing, and a run whose reward never worked ends. It knows no sockets
and no clock.
"""

from collections.abc import Callable

from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import RewardHealth
from asyncgrpo.wire.rollouts import RewardFailed

NEVER_WORKED_S = 30.0
"""Every call must have failed for this long, the first call included, before a reward is said never to have worked."""
NEVER_WORKED_CALLS = 3
"""At least this many calls must have failed by then."""

MAX_COUNTED = 1024
"""Kinds of failures by generator that are counted; further kinds are not, so that messages cannot fill the memory."""

Tell = Callable[..., object]
"""Writes an event: its kind, then its fields."""


class RewardMonitor:
    """The health of the rewards of all generators in touch."""

    def __init__(self, name: str, *, has_worked: bool, tell: Tell) -> None:
        """
        Args:
            name: of the reward, for messages.
            has_worked: whether the reward worked in an earlier start under the same command; then it is waited for.
        """
        self._name = name
        self._has_worked = has_worked
        self._tell = tell
        self._health: dict[str, RewardHealth] = {}
        self._paused_since_s: dict[str, float] = {}
        self._tally = Tally()
        self._counted: dict[tuple[str, str], int] = {}

    def update(self, generator: str, health: RewardHealth, now_s: float) -> None:
        """Note how a generator's reward calls went."""
        before = self._health.get(generator, RewardHealth()).probe_in_s
        self._health[generator] = health
        self._has_worked |= health.worked > 0
        if health.probe_in_s is None:
            self._resumed(generator, now_s)
        elif before is None or health.probe_in_s > before:  # paused, or another probe failed
            self._paused_since_s.setdefault(generator, now_s)
            self._tell("rewards_paused", actor=generator, reason=health.last, probe_in_s=health.probe_in_s)

    def failed(self, message: RewardFailed) -> None:
        """Count what a generator reports of a kind of failure."""
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
        """Forget a generator that is gone."""
        self._health.pop(generator, None)
        self._resumed(generator, now_s)

    def is_paused(self, generator: str) -> bool:
        """Whether no completion can be scored at this generator now."""
        return generator in self._paused_since_s

    def describe_pause(self) -> str | None:
        """A phrase that says who is paused, until when, and why; None: no generator is."""
        if not self._paused_since_s:
            return None
        paused = [self._health[generator] for generator in self._paused_since_s]
        probe_in_s, last = min((health.probe_in_s or 0.0, health.last) for health in paused)
        return (
            f"rewards (paused at {', '.join(sorted(self._paused_since_s))}, probing again in {probe_in_s:.0f} s; "
            f"the last call failed with {last})"
        )

    @property
    def hopeless_reason(self) -> str:
        """Why no completion will ever be scored; empty: one may be."""
        failed = sum(health.failed for health in self._health.values())
        longest = max(self._health.values(), key=lambda health: health.failing_s, default=RewardHealth())
        if self._has_worked or longest.failing_s < NEVER_WORKED_S or failed < NEVER_WORKED_CALLS:
            return ""
        return f"{self._name} never worked: {failed} of {failed} calls failed, the last with {longest.last}"

    def _resumed(self, generator: str, now_s: float) -> None:
        if (since_s := self._paused_since_s.pop(generator, None)) is not None:
            self._tell("rewards_resumed", actor=generator, seconds=now_s - since_s)
