"""Who may start, who is waited for, who is trained and who is let go because of age: the bound on lag, and `buffer.policy`.

A group leased at version u may be trained at version u + max_lag at the latest: that is its *deadline*. At most
`(max_lag + 1) * P` groups are under way (admission), and each step trains P of them. A batch may be taken at version v
only if what remains, ready or not, can still meet its deadlines at P groups a step:

    for every k >= 0:   #{remaining groups with deadline <= v + k}  <=  k * P

This is earliest-deadline-first scheduling, and it loses nothing. Let D(k) be that count before the take. Admission
gives D(max_lag) <= (max_lag + 1) P; if D(k) <= (k + 1) P for all k at v, and the batch is feasible, then the same holds
at v + 1. And once every group is ready, taking the P oldest is always feasible. So the learner waits only when going on
would break a promise, no group is dropped for its age, and long completions are not filtered away.

A group that leaves untrained (dropped, or filtered for equal rewards) only lowers D; what is leased in its place at v
has the deadline v + max_lag, the last there is, and the slots bound those. So a refill endangers nobody's deadline.

A policy completions four questions, with L for `max_lag` and P for `prompts_per_step`:

    admit           may another group begin?               all of them: while fewer than (L + 1) * P hold a slot
    select          which groups make the next batch?      None: the learner waits
    evict           which groups that are here are too old for every step to come?
    should_abort    can this lease no longer become a group that is trained?

    policy    a batch is                                    a group is too old when              so the learner gets
    wait      the P oldest, if the others can be in time    (never: it is waited for)            all, lag at most L
    window    the next P prompts of the run's order         (never: it is waited for)            all in order, lag at most L
    drop      the P oldest of those that are here           its oldest token's lag is above L    what is quick, lag at most L
    mask      the same                                      even its newest token's lag is       tokens of lag at most L
    train     the same                                      (never)                              all, at any lag

`wait` is proved in `staleness.py`. `window` keeps the same bound for the same reason: slots go to prompts in their
order, so at most (L + 1) * P prompts that are not trained stand before the end of what is leased, and a group is trained
at most L steps after its lease. `evict` is a second check for these two, which would catch a generator that
sampled with older weights than it claimed.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, Protocol, TypeVar

from asyncgrpo.config.schema import BufferConfig
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import Deliver

# -- the bound on lag, and the proof that it holds ---------------------------------------------------------------------


def lag_is_kept(remaining: Iterable[int], version: int, max_lag: int, groups_per_step: int) -> bool:
    """Whether the groups that a take at `version` leaves behind can all be trained in time.

    Args:
        remaining: for each group left, under way or ready, the oldest weight version in it (or that it was leased at).
        version: the learner's weight version, optimizer steps.
        max_lag: the bound, optimizer steps.
        groups_per_step: P.
    """
    slack = sorted(oldest + max_lag - version for oldest in remaining)
    return all(position < max(0, k) * groups_per_step for position, k in enumerate(slack))


# -- policies ----------------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """A group that is not taken yet, as a policy sees it."""

    @property
    def prompt_index(self) -> int:
        """Its prompt's place in the run."""

    @property
    def is_ready(self) -> bool:
        """Here; else under way."""

    @property
    def oldest(self) -> PolicyVersion:
        """Under way: the version at the lease, than which no token is older. Then: of the oldest token."""

    @property
    def newest(self) -> PolicyVersion:
        """Of the newest token, once the group is here."""


Some = TypeVar("Some", bound=Candidate)


class Policy:
    """The questions, and the completions that most policies share."""

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = "oldest"
    """Which token's lag is bounded by `max_lag`; None: no token's."""
    is_in_order: ClassVar[bool] = False
    """Whether a group waits for all prompts that stand before it."""

    def __init__(self, config: BufferConfig) -> None:
        self._max_lag, self._per_step, self._slots = config.max_lag, config.prompts_per_step, config.num_slots

    def admit(self, held: int, aside: int) -> bool:
        """Whether the next prompt of the order may begin.

        Args:
            held: groups that hold a slot, taken ones included.
            aside: prompts that stand before it and wait for a generator of their own (`suspects.py`).
        """
        return held < self._slots

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        """The batch of the step that starts at `version`, or None if it must wait.

        Only the last batch of a run is smaller than P: when nothing else is under way and no prompt is left.

        Args:
            waiting: all groups that hold a slot and are not taken.
            next_order: of the prompt that would be leased next; None: none is left.
        """
        ready = sorted((e for e in waiting if e.is_ready), key=lambda e: (e.oldest, e.prompt_index))
        if len(ready) < self._per_step and not (ready and len(ready) == len(waiting) and next_prompt_index is None):
            return None
        return ready[: self._per_step]

    def evict(self, waiting: Iterable[Some], version: int) -> list[Some]:
        """The groups that are here and too old for the step that starts at `version`, and so for every later one."""
        return [e for e in waiting if e.is_ready and self._lag(e, version) > self._max_lag]

    def should_abort(self, lease: Candidate, version: int) -> bool:
        """Whether what comes of a lease would be too old for the step that starts at `version`."""
        return False

    def masked_tokens(self, message: Deliver, version: int) -> int:
        """Sampled tokens of a group that have no weight in the step that starts at `version`."""
        return 0

    def _lag(self, group: Candidate, version: int) -> int:
        return version - (group.newest if self.counts_from == "newest" else group.oldest).number


class Wait(Policy):
    """Earliest deadline first: the learner waits where going on would make another group too old."""

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        batch = super().select(waiting, version, next_prompt_index)
        if batch is None:
            return None
        chosen = {e.prompt_index for e in batch}
        remaining = [e.oldest.number for e in waiting if e.prompt_index not in chosen]
        return batch if lag_is_kept(remaining, version, self._max_lag, self._per_step) else None


class Window(Policy):
    """Strictly in prompt order: what makes a batch is settled before anything is generated."""

    is_in_order: ClassVar[bool] = True

    def admit(self, held: int, aside: int) -> bool:
        # One that is set aside will be waited for: what begins meanwhile may not be further from its turn for it.
        return held + aside < self._slots

    def select(self, waiting: Sequence[Some], version: int, next_prompt_index: int | None) -> list[Some] | None:
        batch = sorted(waiting, key=lambda e: e.prompt_index)[: self._per_step]
        if not batch or not all(e.is_ready for e in batch):
            return None
        if next_prompt_index is not None and (
            len(batch) < self._per_step or next_prompt_index < batch[-1].prompt_index
        ):
            return None  # a prompt that was given back belongs into it
        return batch


class Drop(Policy):
    """What comes first is trained, what has become too old is dropped, and what can only become so is cancelled."""

    def should_abort(self, lease: Candidate, version: int) -> bool:
        return version - lease.oldest.number > self._max_lag


class Mask(Policy):
    """As `drop`, but by token: those that are too old have no weight in the loss, the others of the group count.

    A group that is still being sampled gets tokens of the newest weights, so no lease is hopeless.
    """

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = "newest"

    def masked_tokens(self, message: Deliver, version: int) -> int:
        spans = (span for rollout in message.rollouts for span in rollout.spans)
        return sum(s.end - s.start for s in spans if version - s.version.number > self._max_lag)


class Train(Policy):
    """Whatever came is trained; only the slots hold generators back. The lag is reported and has no bound."""

    counts_from: ClassVar[Literal["oldest", "newest"] | None] = None

    def evict(self, waiting: Iterable[Some], version: int) -> list[Some]:
        return []


POLICIES: dict[str, type[Policy]] = {"wait": Wait, "window": Window, "drop": Drop, "mask": Mask, "train": Train}
