"""State of the connected generators: sessions, speed, load and the health of their rewards.

Times are arguments: nothing here reads a clock.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from asyncgrpo import metrics
from asyncgrpo.types import GeneratorSeconds, PolicyVersion, RewardHealth

# -- sessions ----------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """A connected generator."""

    peer: str
    incarnation: str
    window: int
    heard_s: float
    version: PolicyVersion | None = None
    seconds: GeneratorSeconds | None = None
    """Activity of its process at the last heartbeat; None before the first, as it may have served another buffer."""


# -- speeds ------------------------------------------------------------------------------------------------------------

TOLERANCE = 1.25
"""Ratio by which the measured speeds of equal generators differ."""
SLOW = 4.0
"""Ratio to the median of the other generators above which the time of a token is slow."""
SHORTEST_S = 0.02
"""Shorter tokens are never slow: any disturbance of the process dominates so short a time."""
CONFIRMED_BY = 2
"""Consecutive slow heartbeats before a generator is benched."""
LATE = 1e6
"""Factor on the time of a token at a generator whose lease expired."""
BENCH_S = 60.0
"""Time for which a generator gets no lease while others may get one."""


@dataclass
class _Speed:
    """Speed of one generator."""

    token_s: float = 0.0
    """Present time of a token, seconds; 0: unknown."""
    running: int = 0
    """Completions that were sampled at once."""
    unloaded_s: float = 0.0
    """Time of a token at an empty window, seconds, averaged over the last heartbeats; 0: unknown."""
    num_slow: int = 0
    """Consecutive slow heartbeats."""
    bench_ends_s: float = -math.inf
    is_late: bool = False
    """True if one of its leases expired and it has delivered nothing since."""


class Speeds:
    """Compares the time of a token at each generator, as heartbeats report it.

    A token at a full window counts as twice as long as one at an empty window, so that generators at different loads
    compare. Among generators within `TOLERANCE` of each other only the load decides. An unknown generator counts as the
    fastest.

    A generator that is far slower than the others is benched. After `BENCH_S` it counts as unknown and is tried again. A
    generator that runs more completions may take longer in proportion. One whose lease expired gets only leases that no
    other generator has room for, until it delivers.
    """

    def __init__(self) -> None:
        self._speeds: defaultdict[str, _Speed] = defaultdict(_Speed)  # by generator
        self._sorted_s: list[float] = []  # all that is known of `token_s`

    def heard(self, generator: str, token_s: float | None, running: int, load: float, now_s: float) -> bool:
        """Note a heartbeat. Return True if it benches the generator.

        Args:
            token_s: time of a token, seconds; None: unknown, or nothing runs.
            running: completions that are sampled at once.
            load: share of the window in use.
        """
        if not token_s or self.is_benched(generator, now_s):
            return False
        speed = self._set(generator, token_s)
        speed.running = running
        unloaded_s = token_s / (1 + load)
        speed.unloaded_s = (speed.unloaded_s + unloaded_s) / 2 if speed.unloaded_s else unloaded_s
        # Above the lower median: above at least half of the others. With as many completions the search decides.
        num_others = len(self._sorted_s) - 1
        is_slow = token_s > SHORTEST_S and 0 < num_others <= 2 * bisect_left(self._sorted_s, token_s / SLOW)
        if is_slow:
            num_quicker = sum(
                token_s > SLOW * other.token_s * max(1.0, running / max(other.running, 1))
                for name, other in self._speeds.items()
                if name != generator and other.token_s
            )
            is_slow = num_others <= 2 * num_quicker
        speed.num_slow = speed.num_slow + 1 if is_slow else 0
        if speed.num_slow < CONFIRMED_BY:
            return False
        self.forget(generator)
        self._speeds[generator].bench_ends_s = now_s + BENCH_S
        return True

    def _set(self, generator: str, token_s: float) -> _Speed:
        speed = self._speeds[generator]
        if speed.token_s:
            self._sorted_s.pop(bisect_left(self._sorted_s, speed.token_s))
        if token_s:
            insort(self._sorted_s, token_s)
        speed.token_s = token_s
        return speed

    def note(self, generator: str, *, is_late: bool) -> None:
        """Note that a lease of this generator expired, or that it delivered a group."""
        self._speeds[generator].is_late = is_late

    def is_benched(self, generator: str, now_s: float) -> bool:
        """Return True if it gets no lease while another generator may get one."""
        return now_s < self._speeds[generator].bench_ends_s

    @property
    def fastest_s(self) -> float:
        """Time of a token at an empty window of the fastest generator, seconds."""
        return min((speed.unloaded_s for speed in self._speeds.values() if speed.unloaded_s), default=1.0)

    def seconds_per_token(self, generator: str, load: float, fastest_s: float) -> float:
        """Return the time of a token at `generator` at this load; comparable across generators.

        Args:
            fastest_s: the present `fastest_s`, which a caller with many generators reads once.
        """
        speed = self._speeds[generator]
        return max(fastest_s, speed.unloaded_s / TOLERANCE) * (1 + load) * (LATE if speed.is_late else 1.0)

    def forget(self, generator: str) -> None:
        """Forget a lost generator. The next one of this name may run elsewhere."""
        self._set(generator, 0.0)
        del self._speeds[generator]


# -- load --------------------------------------------------------------------------------------------------------------


class Load:
    """Load of the generators since the last batch: groups, places, and seconds by activity."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._seconds = {"in_flight": 0.0, "places": 0.0, "in_touch": 0.0}
        self._load = dict.fromkeys(self._seconds, 0.0)
        self._elapsed_s = 0.0
        self._at_s: float | None = None

    def note(self, now_s: float, *, in_flight: int, places: int, in_touch: int) -> None:
        """Set the load from `now_s` on. The load before it counts for the time since the last call."""
        elapsed_s = now_s - self._at_s if self._at_s is not None else 0.0
        for name, load in self._load.items():
            self._seconds[name] += load * elapsed_s
        self._elapsed_s += elapsed_s
        self._load = {"in_flight": in_flight, "places": places, "in_touch": in_touch}
        self._at_s = now_s
        metrics.generator_places.set(places)

    def spent(self, before: GeneratorSeconds, now: GeneratorSeconds) -> None:
        """Add the activity of one generator's process between two of its reports."""
        for activity, seconds in msgspec.structs.asdict(now).items():
            self._spent[activity] += max(0.0, seconds - getattr(before, activity))

    def since_batch(self) -> dict[str, float]:
        """Return mean loads and the seconds of all generators by activity since the last call.

        If no time has passed, the means are the current load.
        """
        means = self._load
        if self._elapsed_s > 0:
            means = {name: seconds / self._elapsed_s for name, seconds in self._seconds.items()}
        figures = {**means, **self._spent}
        self._seconds, self._elapsed_s, self._spent = dict.fromkeys(self._seconds, 0.0), 0.0, Counter()
        return figures


# -- rewards -----------------------------------------------------------------------------------------------------------

NEVER_WORKED_S = 10.0
"""Seconds for which every call must have failed before a reward counts as one that never worked."""
NEVER_WORKED_CALLS = 3
"""Minimum number of failed calls by then."""

Emit = Callable[..., object]
"""Writes an event: its kind, then its fields."""


class RewardMonitor:
    """Health of the rewards of all connected generators.

    Each generator has its own circuit breaker (`rewards/breaker.py`). A paused generator gets no lease and its prompts are
    not charged. A run whose reward never worked ends.
    """

    def __init__(self, name: str, *, has_worked: bool, emit: Emit) -> None:
        """
        Args:
            name: of the reward, for messages.
            has_worked: True if the reward worked in an earlier start under the same command; then the run waits for it.
        """
        self._name = name
        self._has_worked = has_worked
        self._emit = emit
        self._health: dict[str, RewardHealth] = {}
        self._paused_since_s: dict[str, float] = {}

    def update(self, generator: str, health: RewardHealth, now_s: float) -> None:
        """Update the health of a generator's rewards from its heartbeat."""
        before = self._health.get(generator, RewardHealth()).probe_in_s
        self._health[generator] = health
        self._has_worked |= health.worked > 0
        if health.probe_in_s is None:
            self._resumed(generator, now_s)
        elif before is None or health.probe_in_s > before:  # paused, or another probe failed
            self._paused_since_s.setdefault(generator, now_s)
            self._emit("rewards_paused", actor=generator, reason=health.last, probe_in_s=health.probe_in_s)

    def forget(self, generator: str, now_s: float) -> None:
        """Forget a lost generator."""
        self._health.pop(generator, None)
        self._resumed(generator, now_s)

    def is_paused(self, generator: str) -> bool:
        """Return True if this generator cannot score completions now."""
        return generator in self._paused_since_s

    def describe_pause(self) -> str | None:
        """Describe the paused generators, the next probe and the reason; None: none is paused."""
        if not self._paused_since_s:
            return None
        paused = [self._health[generator] for generator in self._paused_since_s]
        probe_in_s, last = min((health.probe_in_s or 0.0, health.last) for health in paused)
        at = ", ".join(sorted(self._paused_since_s))
        return f"rewards (paused at {at}, probing again in {probe_in_s:.0f} s; the last call failed with {last})"

    @property
    def fatal_reason(self) -> str:
        """The reason why no completion can ever be scored; empty: one may be."""
        failed = sum(health.failed for health in self._health.values())
        longest = max(self._health.values(), key=lambda health: health.failing_s, default=RewardHealth())
        if self._has_worked or longest.failing_s < NEVER_WORKED_S or failed < NEVER_WORKED_CALLS:
            return ""
        return f"{self._name} never worked: {failed} of {failed} calls failed, the last with {longest.last}"

    def _resumed(self, generator: str, now_s: float) -> None:
        if (since_s := self._paused_since_s.pop(generator, None)) is not None:
            self._emit("rewards_resumed", actor=generator, seconds=now_s - since_s)
