"""Stand-ins for what a run on the virtual clock has beside the scheduler: they take their time, or nothing."""

from collections.abc import Callable
from typing import Any


class Receiver:
    """Stands for `weights.Receiver`: its only message is that it wants weights."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._join = join
        self.failure: BaseException | None = None
        self.is_alive = False

    def start(self) -> None:
        self._join()

    def stop(self) -> None:
        """Nothing runs."""


class Silent:
    """Stands for `learner.Recorder`: takes everything and says nothing."""

    def last(self, counters: dict[str, float]) -> dict[str, float]:
        """The totals for a checkpoint."""
        return counters

    def __getattr__(self, name: str) -> "Silent":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Whatever it is."""
