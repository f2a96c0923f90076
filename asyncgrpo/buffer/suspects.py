"""Which prompts may be what ends generators, and how that is found out without losing one that is innocent.

When a generator ends, every prompt in flight there may have ended it, or none: machines fail too. So this costs a prompt
nothing the first time. One that was in flight at `SUSPECT_AFTER` such ends since an answer of it last came is a suspect: it
is leased alone, to a generator that has finished everything else. If that generator ends as well, the prompt is charged
with a failed attempt, and nothing else is lost with it; if it answers, it is cleared.

One suspect is under way at a time, so that one prompt never ends two generators at once.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

SUSPECT_AFTER = 2


POISON = "poison"
"""The reason of a failed attempt of a prompt that was alone on a generator when that ended."""
BLAMED = frozenset({POISON, "failed"})
"""Reasons that lie with the prompt. One that used up all its attempts for them is not tried again in the next epoch."""


class Past(NamedTuple):
    """What prompts have behind them, by their place in the prompt order."""

    attempts: Counter[int]
    """Leases that failed."""
    blamed: Counter[int]
    """Those of them that failed for a reason of `BLAMED`."""
    interruptions: Counter[int]
    """Ends of generators at which a prompt was in flight, since its last answer."""


NOTHING = Past(Counter(), Counter(), Counter())


class Suspects:
    """What is held against prompts, by their place in the prompt order."""

    def __init__(self) -> None:
        self._ends: Counter[int] = Counter()
        """Ends of generators at which a prompt was in flight, since its last answer."""
        self._holder: str | None = None
        """The generator that is kept free of others for a suspect."""
        self._alone: int | None = None
        """The suspect that is leased there; None: the generator still works on others."""

    def remember(self, ends: Counter[int]) -> None:
        """Of earlier starts. Before the first lease."""
        self._ends.update(ends)

    def in_flight_at_an_end(self, orders: Iterable[int]) -> None:
        """A generator ended while it worked on these."""
        self._ends.update(orders)

    def is_suspect(self, order: int) -> bool:
        return self._ends[order] >= SUSPECT_AFTER

    def clear(self, order: int) -> None:
        """An answer came, or the prompt is dropped: nothing is held against it."""
        self._ends.pop(order, None)

    def may_lease(self, holder: str, num_held: int, *, is_waiting: bool) -> tuple[bool, bool]:
        """Whether `holder` may get an ordinary prompt, and whether it may get a suspect.

        Args:
            num_held: leases that it works on.
            is_waiting: a suspect waits for a generator.
        """
        if self._alone is None:
            self._holder = (self._holder or holder) if is_waiting else None
        if holder != self._holder:
            return True, False
        return False, is_waiting and self._alone is None and num_held == 0

    def leased(self, order: int) -> None:
        """This suspect goes to the generator that was kept free."""
        self._alone = order

    def is_alone(self, order: int) -> bool:
        """Whether this prompt is under way as the only one of its generator."""
        return self._alone == order

    def ended(self, order: int) -> None:
        """A lease of this prompt is over, however it ended."""
        if self._alone == order:
            self._holder = self._alone = None

    def gone(self, holder: str) -> None:
        """This generator will not work on anything any more."""
        if self._holder == holder:
            self._holder = self._alone = None
