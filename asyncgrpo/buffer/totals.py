"""Counters, batch statistics and metrics of the buffer's process."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import Buffer, GroupEntry, State
from asyncgrpo.types import GeneratorSeconds
from asyncgrpo.wire.rollouts import OF_ONE_BATCH

log = logging.getLogger(__name__)


def counters(buffer: Buffer) -> dict[str, float]:
    """Return the totals of this process: groups by outcome, filtered groups by kind, tokens by fate, discarded completions.

    Tokens in flight, prompts done and the distances of bias are momentary values.
    """
    totals: dict[str, Mapping[str, float]] = {
        "groups": buffer.outcomes,
        "filtered": buffer.filtered,
        "tokens": buffer.tokens,
        "completions": buffer.discarded,
        "bias": buffer.bias.distances(),
    }
    now = {"tokens_in_flight": float(buffer.tokens_in_flight), "prompts_done": float(buffer.prompts_done)}
    return {f"{name}_{key}": float(value) for name, counts in totals.items() for key, value in counts.items()} | now


def batch_figures(buffer: Buffer, batch: Sequence[GroupEntry], now_s: float) -> dict[str, float]:
    """Return statistics of a taken batch: occupancy of the buffer and waiting time. Names begin with `OF_ONE_BATCH`.

    `under_way` counts leased and ready groups, the batch included. `wanted` is absent if admission fills every slot,
    `ready_seconds` if all groups come from an earlier start.
    """
    under_way = buffer.count(State.LEASED) + buffer.count(State.READY) + len(batch)
    figures = {"max_lag": buffer.max_lag, "slots": buffer.num_slots, "under_way": under_way}
    if buffer.wanted is not None:
        figures["wanted"] = buffer.wanted
    figures_of_batch = {OF_ONE_BATCH + name: float(figure) for name, figure in figures.items()}
    waited = ready_seconds(batch, now_s)
    return figures_of_batch | ({f"{OF_ONE_BATCH}ready_seconds": sum(waited) / len(waited)} if waited else {})


def ready_seconds(batch: Sequence[GroupEntry], now_s: float) -> list[float]:
    """Return the time that each group of `batch` was ready, seconds, without groups that an earlier start left."""
    return [now_s - entry.ready_at_s for entry in batch if entry.ready_at_s is not None]


def observe_batch(buffer: Buffer, batch: Sequence[GroupEntry], version: int, now_s: float) -> None:
    """Observe the batch of the step that starts at `version` in this process's metrics."""
    for entry in batch:
        lag = version - entry.oldest.number
        metrics.group_lag_steps.observe(lag)
        metrics.groups_at_bound_total.inc(lag >= entry.max_lag)
    for waited_s in ready_seconds(batch, now_s):
        metrics.group_ready_seconds.observe(waited_s)


class Load:
    """Load of the generators since the last batch: groups, places, and seconds by activity."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._seconds = {"in_flight": 0.0, "places": 0.0, "in_touch": 0.0}
        self._load = dict.fromkeys(self._seconds, 0.0)
        self._elapsed_s = 0.0
        self._at_s: float | None = None

    def note(self, now_s: float, *, in_flight: int, places: int, in_touch: int) -> None:
        """Set the load at `now_s`. The load before it counts for the time since the last call."""
        self._load = {"in_flight": in_flight, "places": places, "in_touch": in_touch}
        elapsed_s = now_s - self._at_s if self._at_s is not None else 0.0
        for name, load in self._load.items():
            self._seconds[name] += load * elapsed_s
        self._elapsed_s += elapsed_s
        self._at_s = now_s
        metrics.generator_places.set(places)

    def spent(self, before: GeneratorSeconds, now: GeneratorSeconds) -> None:
        """Add the activity of one generator's process between two of its reports."""
        for activity, seconds in msgspec.structs.asdict(now).items():
            self._spent[activity] += max(0.0, seconds - getattr(before, activity))

    def since_batch(self) -> dict[str, float]:
        """Return mean loads and the seconds of all generators by activity since the last call, named as in `batch_figures`.

        If no time has passed, the means are the current load.
        """
        means = self._load
        if self._elapsed_s > 0:
            means = {name: seconds / self._elapsed_s for name, seconds in self._seconds.items()}
        figures = {OF_ONE_BATCH + name: float(figure) for name, figure in {**means, **self._spent}.items()}
        self._seconds, self._elapsed_s, self._spent = dict.fromkeys(self._seconds, 0.0), 0.0, Counter()
        return figures


class Gauges:
    """Updates the metrics from the counters of a buffer."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, buffer: Buffer, now_s: float) -> None:
        """Set all metrics, and log distances that have become large."""
        for sentence in buffer.bias.news():
            log.warning("%s (buffer.bias_threshold, docs/staleness.md)", sentence)
        for name, distance in buffer.bias.distances().items():
            metrics.bias_distance.labels(of=name).set(distance)
        for metric, label, totals in (
            (metrics.groups_total, "outcome", buffer.outcomes),
            (metrics.tokens_total, "fate", buffer.tokens),
            (metrics.completions_discarded_total, "why", buffer.discarded),
        ):
            for value, total in totals.items():
                metric.labels(**{label: value}).inc(total - self._shown.get((label, value), 0))
                self._shown[label, value] = total
        metrics.lease_deadline_seconds.set(buffer.deadline_s)
        metrics.quarantined_prompts.set(buffer.num_quarantined)
        metrics.buffer_tokens.set(buffer.tokens_in_flight)
        for state in State:
            metrics.buffer_groups.labels(state=state.value).set(buffer.count(state))
        metrics.max_lag_steps.set(buffer.max_lag)
        metrics.buffer_slots.set(buffer.num_slots)
        metrics.groups_wanted.set(buffer.num_slots if buffer.wanted is None else buffer.wanted)
        oldest = buffer.oldest_lease()
        metrics.buffer_oldest_group_age_seconds.set(now_s - oldest.leased_at_s if oldest else 0.0)
        metrics.epoch.set(buffer.epoch)
        metrics.prompts_done.set(buffer.prompts_done)
