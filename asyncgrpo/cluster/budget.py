"""How often something may be started again before the run gives up: a run of weeks may see many faults, an hour few."""

import time
from collections import deque
from collections.abc import Callable

from asyncgrpo.errors import AsyncGRPOError

WINDOW_S = 3600.0


class Budget:
    """Restarts of one thing."""

    def __init__(self, name: str, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            allowed: restarts within any hour.
        """
        self._name = name
        self._allowed = allowed
        self._clock = clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Of all times."""

    def spend(self, reason: str) -> int:
        """One more restart; returns their count. Raises AsyncGRPOError when that is one too many."""
        now = self._clock()
        while self._recent and now - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._allowed:
            raise AsyncGRPOError(
                f"{self._name} ended {len(self._recent) + 1} times within an hour "
                f"({self._allowed} restarts are allowed); the last time: {reason}"
            )
        self._recent.append(now)
        self.count += 1
        return self.count
