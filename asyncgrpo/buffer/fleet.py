"""The generators in touch: how long each is silent, which would finish one more group soonest, and which are too slow.

No clock: times are arguments.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import GeneratorSeconds, PolicyVersion, RewardHealth
from asyncgrpo.wire.rollouts import RewardFailed

# -- silences ----------------------------------------------------------------------------------------------------------

QUIET_AFTER_S = 2.0
"""A generator that has sent nothing for so long gets no lease until it does, and others go on with those that it has. It
sends a heartbeat every second."""
FORGOTTEN_S = 600.0
"""Half of a silence that was broken is forgotten after so long."""


@dataclass
class Session:
    """A generator in touch."""

    peer: str
    incarnation: str
    window: int
    heard_s: float
    version: PolicyVersion | None = None
    seconds: GeneratorSeconds | None = None
    """What its process had done by the last heartbeat; None before the first, as it may have worked for another buffer."""
    longest_silence_s: float = 0.0
    """Of those that it broke, each less by half after `FORGOTTEN_S`."""

    def speaks(self, now_s: float) -> bool:
        """Whether it has said something just now."""
        return now_s - self.heard_s <= QUIET_AFTER_S


class Listener:
    """Knows which generators have been silent for longer than is usual with them.

    Some engines keep their process from speaking for seconds: in a long prefill, or while weights are loaded. So a
    generator that has broken a silence may be silent for twice as long the next time. And what arrived while this process
    stood still is not read yet, so silences count from the end of that.
    """

    def __init__(self) -> None:
        self._listened_s = self._since_s = 0.0

    def listen(self, now_s: float) -> None:
        """Note that this process reads what it is sent. Call it at least every second."""
        if now_s - self._listened_s > QUIET_AFTER_S / 2:
            self._since_s = now_s
        self._listened_s = now_s

    def heard(self, session: Session, now_s: float) -> None:
        """Note that a generator said something."""
        self.listen(now_s)
        silence_s = self._silence_s(session, now_s)
        session.longest_silence_s = max(silence_s, session.longest_silence_s * 0.5 ** (silence_s / FORGOTTEN_S))
        session.heard_s = now_s

    def is_silent(self, session: Session, now_s: float) -> bool:
        """Whether a generator may be gone, by its silence."""
        return self._silence_s(session, now_s) > max(QUIET_AFTER_S, 2 * session.longest_silence_s)

    def _silence_s(self, session: Session, now_s: float) -> float:
        return now_s - max(session.heard_s, self._since_s)


# -- speeds ------------------------------------------------------------------------------------------------------------

MEMORY = 64
"""Groups of a generator that its speed is judged by, about: each counts a 64th less than the one after it."""
TOLERANCE = 1.1
"""Equal generators, each measured by its own groups, look as different as this."""
LATE = 1e6
"""How many times longer a token is taken to last at a generator that is late: it gets only what no other has room for."""


@dataclass
class _Past:
    """What a generator delivered."""

    seconds: float = 0.0
    work: float = 0.0
    """Tokens of the longest completion of each group, times what the load makes of one token."""
    newest: int = 0
    """Which of all groups was its last, or was the last when it became late."""
    is_late: bool = False
    """Whether one of its leases ran out, and it has delivered nothing since."""

    @property
    def seconds_per_token(self) -> float:
        """The time of a token at an empty window; 0 where nothing is known."""
        return self.seconds / self.work if self.work else 0.0


class Speeds:
    """The speed of each generator, and how long a token would take at each. Generators measure the seconds.

    An engine with continuous batching samples a token of every running completion at once, and the more run, the longer
    that takes. A token at a full window is counted as taking twice as long as one at an empty window, so that generators
    can be compared at different loads. A group is complete with its longest completion, so a token took the group's seconds
    over the tokens of that. Among generators that differ by no more than `TOLERANCE` only the load decides.

    A generator of which nothing is known counts as the quickest, and so does one of which nothing was heard while `MEMORY`
    groups came for each generator: it is tried again. Where nothing is known of any, the emptiest window is the quickest.
    """

    def __init__(self) -> None:
        self._pasts: defaultdict[str, _Past] = defaultdict(_Past)  # by generator
        self._counted = 0
        self._quickest = 1.0
        """Seconds of a token at an empty window of the quickest one. Any number does where none is known."""

    def delivered(self, generator: str, seconds: float, longest: int, held: int, window: int) -> None:
        """Count a group. What is no time, or has no token, says nothing of the speed.

        Args:
            seconds: from the start of its sampling to the end.
            longest: tokens of its longest completion.
            held: leases of the generator then, this one included.
            window: leases that it may hold.
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
        """Note that a lease ran out: until `generator` delivers, what is too slow on it goes to another."""
        past = self._pasts[generator]
        past.newest, past.is_late = self._counted, True

    def forget(self, generator: str) -> None:
        """Forget a generator that is gone: the next of its name may run elsewhere."""
        self._pasts.pop(generator, None)
        self._compare()

    def seconds_per_token(self, generator: str, held: int, window: int) -> float:
        """How long a token would take at `generator` with one lease more than `held`, to be compared with that of others."""
        past = self._pasts.get(generator, _Past())
        unloaded = max(self._quickest, past.seconds_per_token / TOLERANCE)
        return unloaded * _load(held + 1, window) * (LATE if past.is_late else 1.0)

    def _compare(self) -> None:
        known = [one.seconds_per_token for one in self._pasts.values() if one.work]
        self._quickest = min(known, default=1.0)


def _load(held: int, window: int) -> float:
    """The time of a token with `held` groups over that with none, by the rule above."""
    return 1 + held / window


# -- generators that become slow ---------------------------------------------------------------------------------------

SLOW = 4.0
"""A token that takes so many times as long as at the other generators is slow."""
SLOW_IF_AWAITED = 2.0
"""The same at a generator whose group is what the learner waits for, and at one that was slow before."""
SHORTEST_S = 0.02
"""No token is slow that takes less: a process of a few quick tokens is disturbed by anything."""
CONFIRMED_BY = 2
"""Heartbeats in a row that must say so."""
IN_A_ROW_S = 10.0
"""Slow heartbeats further apart are not in a row: nothing ran between them. While a generator samples it sends one a
second, after a change of weights the next one with its first token."""
FIRST_REST_S = 30.0
LONGEST_REST_S = 1800.0


@dataclass
class _Rest:
    """A generator that was slow gets nothing until `ends_s`, and then one lease, until it is known to be as quick as others."""

    ends_s: float
    seconds: float


class SlowGenerators:
    """Which generators sample so slowly that others do better to go on with their leases, and when one is tried again.

    It goes by the time of a token at present, which heartbeats say, and not by how long a group takes: so it is known within
    seconds, and long completions are no reason to take a lease away. What is compared is the time of a token with the median
    of the others', each at its last word. A generator at which more completions run may take longer in proportion. A slower
    one that keeps up is of use, so less is called slow while the learner waits for it. Each time that one is found slow again it
    rests for twice as long.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # by generator: seconds of a token, completions that were running
        self._slow_words: dict[
            str, tuple[int, float]
        ] = {}  # by generator: how many in a row, and when the last one came
        self._rests: dict[str, _Rest] = {}

    def heard(
        self, generator: str, token_s: float | None, running: int, now_s: float, *, is_awaited: bool = False
    ) -> bool:
        """Note a heartbeat. Returns whether the generator has just become one that is to rest.

        Args:
            token_s: how long a token takes, seconds; None: it is not known, or nothing runs.
            running: completions that are sampled at once.
            is_awaited: the learner waits for a group of this generator, and could go on otherwise.
        """
        if not token_s or self.rests(generator, now_s):
            return False
        self._last[generator] = token_s, running
        slowness = self._slowness(generator)
        if slowness <= SLOW_IF_AWAITED:
            self._rests.pop(generator, None)
        is_slow = slowness > (SLOW_IF_AWAITED if is_awaited else SLOW)
        count, last_s = self._slow_words.pop(generator, (0, -math.inf))
        if not is_slow:
            return False
        count = count + 1 if now_s - last_s <= IN_A_ROW_S else 1
        if count < CONFIRMED_BY:
            self._slow_words[generator] = count, now_s
            return False
        before = self._rests.get(generator)
        seconds = FIRST_REST_S if before is None else min(2 * before.seconds, LONGEST_REST_S)
        self._rests[generator] = _Rest(now_s + seconds, seconds)
        return True

    def rests(self, generator: str, now_s: float) -> bool:
        """Whether it gets no lease, as long as any other may get one."""
        rest = self._rests.get(generator)
        return rest is not None and now_s < rest.ends_s

    def is_tried(self, generator: str) -> bool:
        """Whether one lease is all that it gets, for it was slow and is not known to be quick again."""
        return generator in self._rests

    def forget(self, generator: str) -> None:
        """Forget a generator that is gone: the next of its name may run elsewhere."""
        self._last.pop(generator, None)
        self._rests.pop(generator, None)
        self._slow_words.pop(generator, None)

    def _slowness(self, generator: str) -> float:
        """How many times longer a token takes than at the others; 0: none is known, or it is quick in any case."""
        token_s, running = self._last[generator]
        others = [
            each_s * max(1.0, running / max(count, 1))
            for name, (each_s, count) in self._last.items()
            if name != generator and name not in self._rests
        ]
        return token_s / statistics.median_low(others) if others and token_s > SHORTEST_S else 0.0


# -- rewards -----------------------------------------------------------------------------------------------------------

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
