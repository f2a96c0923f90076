"""The adviser of a running run, and the autopilot that scales its generators by the advice.

adviser = Adviser(events, config)                  in the driver
advice = adviser.look(now)                         every LOOK_S
generators = autopilot.decide(advice, there, now)  None: unchanged
"""

from collections import deque
from typing import get_args

import msgspec

from asyncgrpo import metrics
from asyncgrpo.config.schema import Config
from asyncgrpo.recording.advice import MOST_GENERATORS, Advice, Bottleneck, advise
from asyncgrpo.recording.events import Event, EventLog, Follower
from asyncgrpo.recording.pace import EVENTS

LOOK_S = 5.0
"""Interval between two computations of the advice."""
TELL_S = 60.0
"""Shortest interval between two `advice` events."""


class Adviser:
    """Follows the events of a run and writes an `advice` event when the advice has changed."""

    def __init__(self, events: EventLog, config: Config, gpus: int | None = None) -> None:
        """
        Args:
            gpus: GPUs of the cluster; None: unknown.
        """
        self._events, self._gpus = events, gpus
        self.config = config
        """The configuration in force, updated by commands to the run."""
        self._follower = Follower(events.path)
        self._last: deque[Event] = deque(maxlen=EVENTS)
        self._written: tuple[str, str] | None = None
        self._written_at = float("-inf")

    def look(self, now: float, *, is_last: bool = False) -> tuple[Advice, ...]:
        """Return the advice at `now` (Unix seconds), the most urgent first; () while there are too few steps.

        Args:
            is_last: True at the end of the run: an event is always written, for the summary.
        """
        self._last += (event for event in self._follower.poll() if event["event"] != "advice")
        advice = advise(self._last, self.config, now, self._gpus)
        self._show(advice)
        if not advice:
            self._written = None  # conditions have changed, and the earlier advice is no longer shown
        elif is_last or self._is_new(advice[0], now):
            self._written, self._written_at = (advice[0].bottleneck, advice[0].command), now
            fields = msgspec.structs.asdict(advice[0])
            self._events.write("advice", **fields, also=tuple(one.sentence for one in advice[1:]))
        return advice

    def _is_new(self, first: Advice, now: float) -> bool:
        if self._written is None:
            return True
        return now - self._written_at >= TELL_S and self._written != (first.bottleneck, first.command)

    def _show(self, advice: tuple[Advice, ...]) -> None:
        gains = {one.bottleneck: one.gain for one in reversed(advice)}
        for bottleneck in get_args(Bottleneck):
            metrics.advice_gain_ratio.labels(bottleneck=bottleneck).set(gains.get(bottleneck, 0.0))


class Autopilot:
    """Decides when to follow the advice on the number of generators. It changes one at a time and does not oscillate.

    It samples the advice every `EVERY_S`, and follows it after `LOOKS` equal samples. After a change it waits for `REST_S`,
    until new steps show the effect. A number that proved too small is not tried again for `RETRY_S`.
    """

    EVERY_S = 20.0
    LOOKS = 3
    REST_S = 120.0
    RETRY_S = 3600.0

    def __init__(self, fewest: int, most: int | None) -> None:
        self._fewest, self._most = fewest, most or MOST_GENERATORS
        self._direction, self._looks = 0, 0
        self._changed_s = self._looked_s = float("-inf")
        self._shrunk_to: int | None = None
        self._too_few: tuple[int, float] = (0, float("-inf"))

    def decide(self, advice: tuple[Advice, ...], generators: int, now_s: float) -> int | None:
        """Return the new number of generators; None: unchanged.

        Args:
            advice: the present advice.
            generators: number of generators that the run should have now.
            now_s: time of any clock.
        """
        if now_s - self._looked_s < self.EVERY_S:
            return None
        self._looked_s = now_s
        direction = self._direction_of(advice, generators)
        self._looks = self._looks + 1 if direction == self._direction else 1
        self._direction = direction
        wanted = generators + direction
        if not direction or self._looks < self.LOOKS or now_s - self._changed_s < self.REST_S:
            return None
        number, since_s = self._too_few
        if not self._fewest <= wanted <= self._most or (wanted <= number and now_s - since_s < self.RETRY_S):
            return None
        if direction > 0 and self._shrunk_to == generators:
            self._too_few = generators, now_s
        self._shrunk_to = wanted if direction < 0 else None
        self._changed_s, self._looks = now_s, 0
        return wanted

    def _direction_of(self, advice: tuple[Advice, ...], generators: int) -> int:
        """Return 1 for more, -1 for fewer, 0 for neither. Advice about signal comes first but is ignored: it sets no pace."""
        of_pace = [one for one in advice if one.bottleneck != "signal"]
        wanted = of_pace[0].generators if of_pace else None
        return 0 if wanted is None else (wanted > generators) - (wanted < generators)
