"""State of the connected generators: silences, speed, slow generators, load and the health of their rewards.

Times are arguments: nothing here reads a clock.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from asyncgrpo import liveness, metrics
from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import GeneratorSeconds, PolicyVersion, RewardHealth
from asyncgrpo.wire.rollouts import OF_ONE_BATCH, RewardFailed

# -- silences ----------------------------------------------------------------------------------------------------------


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
    longest_silence_s: float = 0.0
    """Longest silence that it has ended, decaying with half-life `liveness.SILENCE_HALF_LIFE_S`."""

    def is_live(self, now_s: float) -> bool:
        """Return True if its last message is recent."""
        return now_s - self.heard_s <= liveness.QUIET_S


class SilenceMonitor:
    """Finds generators that are silent for longer than they usually are.

    Some engines block their process for seconds, in a long prefill or while they load weights. So a generator that ended a
    silence may be silent for twice as long the next time. Messages that arrived while this process was blocked are still
    unread, so a silence counts from the end of the block.
    """

    def __init__(self) -> None:
        self._listened_s = self._since_s = 0.0

    def note_reading(self, now_s: float) -> None:
        """Note that this process reads its socket. Call it at least every second."""
        if now_s - self._listened_s > liveness.QUIET_S / 2:
            self._since_s = now_s
        self._listened_s = now_s

    def heard(self, session: Session, now_s: float) -> None:
        """Note a message of a generator."""
        self.note_reading(now_s)
        silence_s = self._silence_s(session, now_s)
        decay = 0.5 ** (silence_s / liveness.SILENCE_HALF_LIFE_S)
        session.longest_silence_s = max(silence_s, session.longest_silence_s * decay)
        session.heard_s = now_s

    def is_silent(self, session: Session, now_s: float) -> bool:
        """Return True if a generator may be dead, judged by its silence."""
        return self._silence_s(session, now_s) > max(liveness.QUIET_S, 2 * session.longest_silence_s)

    def _silence_s(self, session: Session, now_s: float) -> float:
        return now_s - max(session.heard_s, self._since_s)


# -- speeds ------------------------------------------------------------------------------------------------------------

MEMORY = 64
"""Time constant of the speed estimate, groups: the weight of each group decays by 1/64 with each later one."""
TOLERANCE = 1.1
"""Ratio by which the measured speeds of equal generators differ."""
LATE = 1e6
"""Factor on the time of a token at a late generator: it gets only leases that no other generator has room for."""


@dataclass
class _Past:
    """Groups that a generator delivered."""

    seconds: float = 0.0
    work: float = 0.0
    """Tokens of the longest completion of each group, times the load factor of a token."""
    newest: int = 0
    """Number of its last group among all groups, or the count of all groups when it became late."""
    is_late: bool = False
    """True if one of its leases expired and it has delivered nothing since."""

    @property
    def seconds_per_token(self) -> float:
        """Time of a token at an empty window, seconds; 0 if unknown."""
        return self.seconds / self.work if self.work else 0.0


class Speeds:
    """Estimates the time of a token at each generator, from the seconds that generators measure.

    An engine with continuous batching samples one token of every running completion per step, and a step takes longer the
    more completions run. A token at a full window counts as twice as long as one at an empty window, so that generators at
    different loads compare. A group ends with its longest completion, so the time of a token is the group's seconds
    divided by the tokens of that completion. Among generators within `TOLERANCE` of each other only the load decides.

    An unknown generator counts as the fastest. So does one that delivered nothing while `MEMORY` groups per generator
    arrived, so that it gets another lease. If all are unknown, the emptiest window is the fastest.
    """

    def __init__(self) -> None:
        self._pasts: defaultdict[str, _Past] = defaultdict(_Past)  # by generator
        self._counted = 0
        self._quickest = 1.0
        """Seconds of a token at an empty window of the fastest generator; any positive number while none is known."""

    def delivered(self, generator: str, seconds: float, longest: int, held: int, window: int) -> None:
        """Add a group. One without a positive time or without tokens does not change the speed.

        Args:
            seconds: from the start of its sampling to the end.
            longest: tokens of its longest completion.
            held: leases of the generator at that time, this one included.
            window: maximum number of leases of the generator.
        """
        past, keep = self._pasts[generator], 1 - 1 / MEMORY
        if 0 < seconds < math.inf and longest > 0:
            past.seconds = keep * past.seconds + seconds
            past.work = keep * past.work + longest * _load(held, window)
        self._counted += 1
        past.newest, past.is_late = self._counted, False
        oldest = self._counted - MEMORY * len(self._pasts)
        for name in [name for name, one in self._pasts.items() if one.newest <= oldest]:
            del self._pasts[name]
        self._compare()

    def late(self, generator: str) -> None:
        """Note that a lease expired. Until `generator` delivers, it gets only leases that fit nowhere else."""
        past = self._pasts[generator]
        past.newest, past.is_late = self._counted, True

    def forget(self, generator: str) -> None:
        """Forget a lost generator. The next one of this name may run elsewhere."""
        self._pasts.pop(generator, None)
        self._compare()

    def seconds_per_token(self, generator: str, held: int, window: int) -> float:
        """Return the time of a token at `generator` with one more lease than `held`; comparable across generators."""
        past = self._pasts.get(generator, _Past())
        unloaded = max(self._quickest, past.seconds_per_token / TOLERANCE)
        return unloaded * _load(held + 1, window) * (LATE if past.is_late else 1.0)

    def _compare(self) -> None:
        known = [one.seconds_per_token for one in self._pasts.values() if one.work]
        self._quickest = min(known, default=1.0)


def _load(held: int, window: int) -> float:
    """Return the time of a token with `held` groups relative to that with none."""
    return 1 + held / window


# -- generators that become slow ---------------------------------------------------------------------------------------

SLOW = 4.0
"""Ratio to the median of the other generators above which the time of a token is slow."""
SLOW_IF_AWAITED = 2.0
"""The same for a generator whose group the learner waits for, and for one that is on probation."""
SHORTEST_S = 0.02
"""Shorter tokens are never slow: any disturbance of the process dominates so short a time."""
CONFIRMED_BY = 2
"""Consecutive slow heartbeats before a generator is benched."""
IN_A_ROW_S = 10.0
"""Maximum gap between consecutive slow heartbeats: nothing ran in a longer one. A generator that samples sends one a
second, and after a weight change the next one with its first token."""
FIRST_BENCH_S = 30.0
MAX_BENCH_S = 1800.0


@dataclass
class _Bench:
    """A slow generator gets no lease until `ends_s`, then one lease at a time until it keeps up with the others."""

    ends_s: float
    seconds: float


class SlowGenerators:
    """Benches generators that sample so slowly that others finish their leases sooner, and retries them later.

    It compares the present time of a token, which heartbeats report, with the median of the other generators' last
    reports. The time of a whole group would show a slow generator only after minutes, and long completions are not
    slow. A generator that runs more completions may take longer in proportion. A slower one that keeps up is still
    useful, so the threshold is lower while the learner waits for it. Each time a generator is found slow again, it is
    benched for twice as long.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # by generator: seconds of a token, running completions
        self._slow_heartbeats: dict[str, tuple[int, float]] = {}  # by generator: consecutive ones, time of the last
        self._benched: dict[str, _Bench] = {}

    def heard(
        self, generator: str, token_s: float | None, running: int, now_s: float, *, is_awaited: bool = False
    ) -> bool:
        """Note a heartbeat. Return True if it benches the generator.

        Args:
            token_s: time of a token, seconds; None: unknown, or nothing runs.
            running: completions that are sampled at once.
            is_awaited: the learner waits for a group of this generator and could continue otherwise.
        """
        if not token_s or self.is_benched(generator, now_s):
            return False
        self._last[generator] = token_s, running
        slowness = self._slowness(generator)
        if slowness <= SLOW_IF_AWAITED:
            self._benched.pop(generator, None)
        is_slow = slowness > (SLOW_IF_AWAITED if is_awaited else SLOW)
        count, last_s = self._slow_heartbeats.pop(generator, (0, -math.inf))
        if not is_slow:
            return False
        count = count + 1 if now_s - last_s <= IN_A_ROW_S else 1
        if count < CONFIRMED_BY:
            self._slow_heartbeats[generator] = count, now_s
            return False
        before = self._benched.get(generator)
        seconds = FIRST_BENCH_S if before is None else min(2 * before.seconds, MAX_BENCH_S)
        self._benched[generator] = _Bench(now_s + seconds, seconds)
        return True

    def is_benched(self, generator: str, now_s: float) -> bool:
        """Return True if it gets no lease while another generator may get one."""
        bench = self._benched.get(generator)
        return bench is not None and now_s < bench.ends_s

    def on_probation(self, generator: str) -> bool:
        """Return True if it may hold one lease only: it was slow and has not kept up since."""
        return generator in self._benched

    def forget(self, generator: str) -> None:
        """Forget a lost generator. The next one of this name may run elsewhere."""
        self._last.pop(generator, None)
        self._benched.pop(generator, None)
        self._slow_heartbeats.pop(generator, None)

    def _slowness(self, generator: str) -> float:
        """Return the ratio of its time of a token to that of the others; 0 if unknown, or if it is fast in any case."""
        token_s, running = self._last[generator]
        others = [
            each_s * max(1.0, running / max(count, 1))
            for name, (each_s, count) in self._last.items()
            if name != generator and name not in self._benched
        ]
        return token_s / statistics.median_low(others) if others and token_s > SHORTEST_S else 0.0


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
        """Set the load at `now_s`. The load before it counts for the time since the last call."""
        self._load = {"in_flight": in_flight, "places": places, "in_touch": in_touch}
        elapsed_s = now_s - self._at_s if self._at_s is not None else 0.0
        for name, load in self._load.items():
            self._seconds[name] += load * elapsed_s
        self._elapsed_s += elapsed_s
        self._at_s = now_s
        metrics.generator_places.set(places)

    def spent(self, before: GeneratorSeconds, now: GeneratorSeconds) -> None:
        """Add the activity of one generator's process between two of its reports."""
        for activity, seconds in msgspec.structs.asdict(now).items():
            self._spent[activity] += max(0.0, seconds - getattr(before, activity))

    def since_batch(self) -> dict[str, float]:
        """Return mean loads and the seconds of all generators by activity since the last call, named as in `batch_figures`.

        If no time has passed, the means are the current load.
        """
        means = self._load
        if self._elapsed_s > 0:
            means = {name: seconds / self._elapsed_s for name, seconds in self._seconds.items()}
        figures = {OF_ONE_BATCH + name: float(figure) for name, figure in {**means, **self._spent}.items()}
        self._seconds, self._elapsed_s, self._spent = dict.fromkeys(self._seconds, 0.0), 0.0, Counter()
        return figures


# -- rewards -----------------------------------------------------------------------------------------------------------

NEVER_WORKED_S = 10.0
"""Seconds for which every call must have failed before a reward counts as one that never worked."""
NEVER_WORKED_CALLS = 3
"""Minimum number of failed calls by then."""

MAX_COUNTED = 1024
"""Maximum number of (generator, failure) pairs that are counted, so that messages cannot fill the memory."""

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
        self._tally = Tally()
        self._counted: dict[tuple[str, str], int] = {}

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

    def failed(self, message: RewardFailed) -> None:
        """Count failures of one kind, as a generator reports them."""
        key = message.generator_id, message.failure
        if key not in self._counted and len(self._counted) >= MAX_COUNTED:
            return
        new = message.count - self._counted.get(key, 0)
        self._counted[key] = message.count
        # A restarted generator counts from zero.
        count = self._tally.add(message.failure, new if new > 0 else message.count)
        if count is not None:
            detail = message.detail[:500]
            self._emit("reward_failed", actor=message.generator_id, failure=message.failure, detail=detail, count=count)

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
        return (
            f"rewards (paused at {', '.join(sorted(self._paused_since_s))}, probing again in {probe_in_s:.0f} s; "
            f"the last call failed with {last})"
        )

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
