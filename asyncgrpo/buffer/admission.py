"""The bound on staleness, the policies that keep it (`buffer.policy`), and how much of it is used (`buffer.admission`).

A group that is leased at version u, while the bound is L, may be trained at version u + L at the latest: that is its
*deadline*. L is `buffer.max_lag`; with `auto` it changes between steps (`auto_lag.py`), and a group keeps the L of its
lease. Each step trains P groups. Where the learner is at version v and the generator serves u,

    a group may begin      while fewer than (L + 1 - (v - u)) * P hold a slot, those in training included
    a batch may be taken   if for every k >= 0:   #{remaining groups with deadline <= v + k}  <=  k * P

This is earliest-deadline-first scheduling. It drops nothing. The proof: let D(k) be the number of groups with a slot whose
deadline is at most v + k. While nothing is held, D(k) <= (k + 1) P for every k. A group that begins has the deadline
u + L, so it counts only where k >= u + L - v; and there D(k) is at most what is held, (u + L - v + 1) P, so at most
(k + 1) P. After a batch that may be taken, the same holds at v + 1. And once every group is ready, the P earliest
deadlines may always be taken. So the learner waits only where going on would break the bound, no group is dropped for its
age, and long completions are not filtered away. Where L becomes smaller, new groups wait until fewer are held, and no older
deadline is touched.

A group that leaves untrained (dropped, or filtered for equal rewards) only lowers D. So a refill endangers no deadline.

A policy decides four things, with L for `max_lag` and P for `prompts_per_step`:

    admit           whether another group may begin: all policies say yes while fewer than (L + 1) * P hold a slot
    select          which groups make the next batch; None: the learner waits
    evict           which groups that are here are too old for every step to come
    should_abort    whether a lease can no longer become a group that is trained

    policy    a batch is                                    a group is too old when              so the learner gets
    wait      the P oldest, if the others can be in time    (never: it is waited for)            all, lag at most L
    window    the next P prompts of the run's order         (never: it is waited for)            all in order, lag at most L
    drop      the P oldest of those that are here           its oldest token's lag is above L    what is quick, lag at most L
    mask      the same                                      even its newest token's lag is       tokens of lag at most L
    train     the same                                      (never)                              all, at any lag

The proof above is that of `wait`. `window` keeps the same bound more simply: a group begins while fewer than (L + 1) * P
prompts that are not trained stand before its own, so it is trained at most L steps after its lease, whatever L becomes.
For these two, `evict` is a second check: it would catch a generator that sampled with older weights than it claimed.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import ClassVar, Literal, Protocol, TypeVar

from asyncgrpo.config.schema import BufferConfig
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import Deliver


def deadlines_are_kept(remaining: Iterable[int], version: int, groups_per_step: int) -> bool:
    """Whether the groups that a take at `version` leaves behind can all be trained in time.

    Args:
        remaining: the deadline of each group left, in flight or ready.
        version: the learner's policy version, optimizer steps.
        groups_per_step: P.
    """
    slack = sorted(deadline - version for deadline in remaining)
    return all(position < max(0, k) * groups_per_step for position, k in enumerate(slack))


# -- policies ----------------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """A group that is not taken yet, as a policy sees it."""

    @property
    def prompt_index(self) -> int:
        """The position of its prompt in the run."""

    @property
    def is_ready(self) -> bool:
        """Whether the group is here; else it is in flight."""

    @property
    def oldest(self) -> PolicyVersion:
        """The version of its oldest token; in flight, the version at the lease, than which no token is older."""

    @property
    def newest(self) -> PolicyVersion:
        """The version of its newest token, once the group is here."""

    @property
    def max_lag(self) -> int:
        """The bound in force at its lease."""

    @property
    def deadline(self) -> int:
        """`oldest` + `max_lag`: the number of the last version at which a step may take it."""


Some = TypeVar("Some", bound=Candidate)


class Policy:
    """Base of the policies: what a policy decides, as most of them do."""

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = "oldest"
    """The token whose lag is at most `max_lag`; None: no token's lag is bounded."""
    is_in_order: ClassVar[bool] = False
    """Whether a group waits for all prompts before it."""

    def __init__(self, config: BufferConfig) -> None:
        self._config, self._per_step = config, config.prompts_per_step

    def admit(self, held: int, max_lag: int) -> bool:
        """Whether another group may begin: the bound on slots that the proof above needs.

        Args:
            held: groups that hold a slot, taken ones included; for a policy `is_in_order` those that are before it, and
                those that will be.
            max_lag: the bound in force.
        """
        return held < (max_lag + 1) * self._per_step

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        """The batch of the step that starts at `version`, or None if it must wait.

        Only the last batch of a run is smaller than P: when nothing else is in flight and no prompt is left.

        Args:
            waiting: all groups that hold a slot and are not taken.
            next_prompt_index: that of the prompt that would be leased next; None: none is left.
        """
        ready = sorted((e for e in waiting if e.is_ready), key=lambda e: (e.deadline, e.prompt_index))
        if len(ready) < self._per_step and not (ready and len(ready) == len(waiting) and next_prompt_index is None):
            return None
        return ready[: self._per_step]

    def available(self, waiting: Sequence[Some]) -> int:
        """How many groups no other one keeps from being taken."""
        return sum(e.is_ready for e in waiting)

    def evict(self, waiting: Iterable[Some], version: int) -> list[Some]:
        """The groups that are here and too old for the step that starts at `version`, and so for every later step."""
        return [e for e in waiting if e.is_ready and self._lag(e, version) > e.max_lag]

    def should_abort(self, lease: Candidate, version: int) -> bool:
        """Whether the group of this lease would be too old for the step that starts at `version`."""
        return False

    def masked_tokens(self, message: Deliver, version: int) -> int:
        """Sampled tokens of a group that have no weight in the step that starts at `version`."""
        return 0

    def _lag(self, group: Candidate, version: int) -> int:
        return version - (group.newest if self.counts_from == "newest" else group.oldest).number


class Wait(Policy):
    """Trains the earliest deadline first; the learner waits where going on would make another group too old."""

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        batch = super().select(waiting, version, next_prompt_index)
        if batch is None:
            return None
        chosen = {e.prompt_index for e in batch}
        remaining = [e.deadline for e in waiting if e.prompt_index not in chosen]
        return batch if deadlines_are_kept(remaining, version, self._per_step) else None


class Window(Policy):
    """Trains strictly in prompt order: which prompts make a batch is known before anything is generated.

    A prompt that was given back begins before all that have overtaken it, so these do not count against it. It will be
    waited for, as an isolated one will, and counts against those behind it as if it held a slot already.
    """

    is_in_order: ClassVar[bool] = True

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        batch = sorted(waiting, key=lambda e: e.prompt_index)[: self._per_step]
        if not batch or not all(e.is_ready for e in batch):
            return None
        if next_prompt_index is not None and (
            len(batch) < self._per_step or next_prompt_index < batch[-1].prompt_index
        ):
            return None  # a prompt that was given back belongs to this batch
        return batch

    def available(self, waiting: Sequence[Some]) -> int:
        in_order = sorted(waiting, key=lambda e: e.prompt_index)
        return next((place for place, e in enumerate(in_order) if not e.is_ready), len(in_order))


class Drop(Policy):
    """Trains what comes first, drops groups that have become too old, and cancels leases whose groups would be."""

    def should_abort(self, lease: Candidate, version: int) -> bool:
        return version > lease.deadline


class Mask(Policy):
    """Works as `drop` does, but by token: tokens that are too old have no weight in the loss, the others count.

    A group that is still being sampled gets tokens of the newest weights, so no lease is cancelled.
    """

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = "newest"

    def masked_tokens(self, message: Deliver, version: int) -> int:
        max_lag = self._config.largest_max_lag  # rules.py lets it be a number only
        spans = (span for rollout in message.rollouts for span in rollout.spans)
        return sum(s.end - s.start for s in spans if version - s.version.number > max_lag)


class Train(Policy):
    """Trains whatever came; only the slots hold generators back. The lag is reported and has no bound."""

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = None

    def evict(self, waiting: Iterable[Some], version: int) -> list[Some]:
        return []


POLICIES: dict[str, type[Policy]] = {"wait": Wait, "window": Window, "drop": Drop, "mask": Mask, "train": Train}


# -- admission: how many groups are under way --------------------------------------------------------------------------


class Eager:
    """Begins a group whenever a slot is free. Where generators are the faster side, the lag climbs to the bound."""

    def __init__(self, config: BufferConfig) -> None:
        """Takes what every admission takes, and needs none of it."""

    @property
    def wanted(self) -> int | None:
        """Groups to have under way (leased or ready); None: as many as there are slots."""
        return None

    def batch_asked(self, in_flight: int, ready: int, now_s: float, slots: int) -> None:
        """Note that the learner asks for the batch of its next step.

        Args:
            in_flight: groups that are leased; with `window` those behind one that is leased too.
            ready: all others under way.
            slots: groups that may be under way or in training.
        """

    def batch_taken(self, now_s: float) -> None:
        """Note that the learner has its batch."""


class Fresh(Eager):
    """Begins a group just in time, so that the bound is insurance against the tail and not where the run operates.

    Each step shows how many groups under way would have been right for it. With F groups in flight when the learner asks
    and P or more ready, F + P would have been: any more wait ready and grow old. Where the learner waits, P groups for its
    share of the step would have been right in addition: by Little's law so many more are trained in that time. A wait
    counts by the clock, so an engine that delivers a batch at once, a moment too late, asks for little. No model of
    lengths, tails or speeds is needed.

    Idle time of the learner is traded for freshness: the fewest are kept under way with which the learner would have waited
    for `MAY_WAIT` of the last `STEPS` steps. That is the least w with Σ max(0, right - w) <= `MAY_WAIT` P `STEPS`. A short
    wait changes nothing. A step that begins with more under way is not counted: leases are held back then, and few in
    flight does not mean that few are needed.

    Where the generators cannot keep up, everything goes on as with `Eager`. So it does until the second request of a start,
    the first one before which a step was trained. The bound and its proof are untouched, for this only ever begins fewer
    groups than the slots allow. A batch always comes: at least P are always under way, and a prompt that others have
    overtaken begins however many there are.
    """

    STEPS = 12
    STEPS_IN_ORDER = 48
    """With `window`, where one group that takes long holds up all behind it: rarer ones must be foreseen."""
    MAY_WAIT = 0.05
    """Share of a step that the learner may wait, as a mean over these steps."""
    STARVES = 0.25
    """Where it waits for more, and all slots were taken, more groups would have been right than there are slots."""

    def __init__(self, config: BufferConfig) -> None:
        self._per_step = config.prompts_per_step
        in_order = POLICIES[config.policy].is_in_order
        self._right: deque[float] = deque(maxlen=self.STEPS_IN_ORDER if in_order else self.STEPS)
        """Groups under way that would have been right, at the last steps."""
        self._asked = 0, 0, 0.0, 0
        """Arguments of the last `batch_asked`."""
        self._taken_s: float | None = None
        """Time of the last `batch_taken`."""

    @property
    def wanted(self) -> int | None:
        if not self._right:
            return None
        most_first = accumulate(sorted(self._right, reverse=True))
        spare = self.MAY_WAIT * self._per_step * len(self._right)
        return max(self._per_step, math.ceil(max((total - spare) / n for n, total in enumerate(most_first, 1))))

    def batch_asked(self, in_flight: int, ready: int, now_s: float, slots: int) -> None:
        self._asked = in_flight, ready, now_s, slots

    def batch_taken(self, now_s: float) -> None:
        (in_flight, ready, asked_s, slots), before_s = self._asked, self._taken_s
        self._taken_s = now_s
        is_over = self.wanted is not None and in_flight + ready > self.wanted
        if before_s is None or is_over:
            return
        waited = (now_s - asked_s) / max(now_s - before_s, 1e-9)
        right = in_flight + min(ready, self._per_step) + self._per_step * waited
        is_full = in_flight + ready + self._per_step >= slots
        self._right.append(slots if is_full and waited > self.STARVES else right)


ADMISSIONS: dict[str, type[Eager]] = {"eager": Eager, "fresh": Fresh}
