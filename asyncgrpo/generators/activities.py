"""What a generator does with its time: it changes weights, samples, scores, or has nothing to do."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from asyncgrpo import metrics
from asyncgrpo.cores import CoreClock
from asyncgrpo.engines.base import EngineOccupancy
from asyncgrpo.types import GeneratorSeconds

Activity = Literal["weights", "generate", "reward"]
FIRST_COUNTS: tuple[Activity, ...] = ("weights", "generate", "reward")
"""Several go on at once. Then the time is that of the first of these."""


class Activities:
    """Adds up a generator's time by what goes on in it, and the time of every completion that is sampled or scored.

    So a reward that is slow shows as time in which there is nothing to do but score, and not as a busy engine; and the
    seconds of the completions, as a rate, are how many are sampled and scored at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cores: CoreClock | None = None) -> None:
        """
        Args:
            cores: of this machine; None: cores are not counted.
        """
        self._clock, self._cores = clock, cores
        self._at_s = clock()
        self._going_on: Counter[str] = Counter()
        self._seconds = dict.fromkeys((*FIRST_COUNTS, "idle"), 0.0)
        self._of_completions = {"generate": 0.0, "reward": 0.0}
        self._shown: dict[tuple[Any, str], float] = defaultdict(float)

    def begin(self, activity: Activity, count: int = 1) -> None:
        """Note that `count` completions begin to be sampled or scored, or a change of weights begins."""
        self._add_up()
        self._going_on[activity] += count

    def end(self, activity: Activity, count: int = 1) -> None:
        """Note that so many of those are over."""
        self._add_up()
        self._going_on[activity] -= count

    @contextmanager
    def during(self, activity: Activity, count: int = 1) -> Iterator[None]:
        """`count` of `activity` go on while the block runs."""
        self.begin(activity, count)
        try:
            yield
        finally:
            self.end(activity, count)

    def seconds(self) -> GeneratorSeconds:
        """The seconds by activity until now. The metrics of this process are brought up to them."""
        self._add_up()
        self._show(metrics.generator_seconds_total, self._seconds)
        self._show(metrics.completion_seconds_total, self._of_completions)
        of_completions = self._of_completions
        return GeneratorSeconds(
            **self._seconds,
            sampling=of_completions["generate"],
            scoring=of_completions["reward"],
            **(self._cores.count()._asdict() if self._cores is not None else {}),
        )

    def _show(self, metric: Any, totals: Mapping[str, float]) -> None:
        for activity, total in totals.items():
            metric.labels(activity=activity).inc(total - self._shown[metric, activity])
            self._shown[metric, activity] = total

    def _add_up(self) -> None:
        now_s = self._clock()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        self._seconds[next((one for one in FIRST_COUNTS if self._going_on[one]), "idle")] += elapsed_s
        for activity in self._of_completions:
            self._of_completions[activity] += self._going_on[activity] * elapsed_s

    def goes_on(self, activity: Activity) -> bool:
        """Whether any of it does."""
        return self._going_on[activity] > 0


class TokenTime:
    """How long a token of a running completion takes, by the steps of the engine since the last look.

    A step that is under way says that it takes at least so long. So a generator that becomes slow shows before the token is
    there. Steps from before the start, an idle time or a change of weights say nothing of the present: the time is known
    again with the first step after it.
    """

    def __init__(self) -> None:
        self._steps = self._step_s = math.inf
        self._mean_s: float | None = None

    def look(self, use: EngineOccupancy) -> float | None:
        """Seconds of a token; None: nothing runs, or nothing is known yet."""
        steps, step_s = use.steps - self._steps, use.step_s - self._step_s
        self._steps, self._step_s = use.steps, use.step_s
        if steps > 0:
            self._mean_s = step_s / steps
        if not use.running:
            self._mean_s = None
        return None if self._mean_s is None else max(self._mean_s, use.present_s)

    def begin_anew(self, use: EngineOccupancy) -> None:
        """Forget the steps until now."""
        self._steps, self._step_s, self._mean_s = use.steps, use.step_s, None
