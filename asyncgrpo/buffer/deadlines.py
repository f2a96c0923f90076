"""How long a lease may take, from how long groups took lately. Time enters as an argument.

A deadline at a multiple of the median follows the run, where one number for a whole run is too short for its end or too
long for its beginning. Only groups that came would make the median of the quick ones: the deadline would shrink with it,
cut more, and shrink again. So a lease that ran out counts too, with the time that it had. As long as the deadline is
above the median that is all the median needs to know of it, and where more than half run out, the deadline grows.
"""

import heapq
import math
import statistics
from collections import deque

DEADLINE_WINDOW = 101
"""Groups that the median is of."""
KNOWN_AFTER = 11
"""Before so many groups nothing is known of the median."""
FLOOR_S = 10.0
"""No deadline is shorter: below this a pause of the network or of a weight change would look like a straggler."""
CUT_AT = 0.9
"""Where in its deadline a generator does without missing answers, so that what there is can be scored and sent in time."""


class Deadlines:
    """The deadlines of all leases, and the running median that new ones are made of."""

    def __init__(self, factor: float, longest_s: float) -> None:
        """
        Args:
            factor: a deadline is so many times the median of what groups took; 0: it is always `longest_s`.
            longest_s: no deadline is longer.
        """
        self._factor = factor
        self._longest_s = longest_s
        self._recent_s: deque[float] = deque(maxlen=DEADLINE_WINDOW)
        self._running: list[tuple[float, str]] = []  # a heap of when each ends; also of leases that are over

    def seconds(self, *, is_last: bool) -> float:
        """What a lease that is granted now is given.

        Args:
            is_last: the prompt's last lease has all the time there is. No prompt is dropped for being slower than others.
        """
        if is_last or not self._factor or len(self._recent_s) < KNOWN_AFTER:
            return self._longest_s
        return min(self._longest_s, max(FLOOR_S, self._factor * statistics.median(self._recent_s)))

    def took(self, seconds: float) -> None:
        """A group came after so long, or its lease ran out. What cannot be a time is left out."""
        if 0 < seconds < math.inf:
            self._recent_s.append(seconds)

    def begin(self, lease_id: str, ends_s: float) -> None:
        """A lease is granted that may run until `ends_s`."""
        heapq.heappush(self._running, (ends_s, lease_id))

    def passed(self, now_s: float) -> list[str]:
        """Leases whose end has come since the last call, the first first; some may be over for other reasons."""
        found = []
        while self._running and self._running[0][0] < now_s:
            found.append(heapq.heappop(self._running)[1])
        return found
