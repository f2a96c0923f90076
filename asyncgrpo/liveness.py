"""Whether a loop still comes round."""

import time


class Turns:
    """Of one loop: it says when it came round, and whoever watches, from any thread, sees how long ago that was."""

    def __init__(self) -> None:
        self._turned_s: float | None = None

    def again(self) -> None:
        """Now."""
        self._turned_s = time.monotonic()

    @property
    def age_s(self) -> float | None:
        """Since the last time, seconds; None before the first."""
        return None if self._turned_s is None else time.monotonic() - self._turned_s
