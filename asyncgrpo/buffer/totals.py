"""What the buffer tells of itself: totals and figures for the learner's record, and the metrics of its process."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.groups import GroupEntry, State
from asyncgrpo.types import GeneratorSeconds
from asyncgrpo.wire.rollouts import OF_ONE_BATCH

log = logging.getLogger(__name__)


def counters(buffer: Buffer) -> dict[str, float]:
    """Totals of this process by name: groups by outcome, filtered groups by kind, tokens by fate, discarded completions.

    Beside them stand tokens in flight, prompts done and the distances of bias, as they are now.
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
    """How full the buffer was when `batch` was taken, and how long its groups had waited; their names begin with `OF_ONE_BATCH`.

    `under_way` counts what is leased or ready, the batch included; `wanted` is absent where admission wants every slot
    filled, and `ready_seconds` where it is known of no group.
    """
    under_way = buffer.count(State.LEASED) + buffer.count(State.READY) + len(batch)
    figures = {"max_lag": buffer.max_lag, "slots": buffer.num_slots, "under_way": under_way}
    if buffer.wanted is not None:
        figures["wanted"] = buffer.wanted
    named = {OF_ONE_BATCH + name: float(figure) for name, figure in figures.items()}
    waited = ready_seconds(batch, now_s)
    return named | ({f"{OF_ONE_BATCH}ready_seconds": sum(waited) / len(waited)} if waited else {})


def ready_seconds(batch: Sequence[GroupEntry], now_s: float) -> list[float]:
    """How long each group of `batch` has waited ready. Those that an earlier start left are not in it."""
    return [now_s - entry.ready_at_s for entry in batch if entry.ready_at_s is not None]


def observe_batch(buffer: Buffer, batch: Sequence[GroupEntry], version: int, now_s: float) -> None:
    """Count a batch that goes to the learner for the step that starts at `version` in this process's metrics."""
    for entry in batch:
        lag = version - entry.oldest.number
        metrics.group_lag_steps.observe(lag)
        metrics.groups_at_bound_total.inc(lag >= entry.max_lag)
    for waited_s in ready_seconds(batch, now_s):
        metrics.group_ready_seconds.observe(waited_s)


class Load:
    """What the generators did since a batch: how many groups they worked on and had places for, and what took their time."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._seconds = {"in_flight": 0.0, "places": 0.0, "in_touch": 0.0}
        self._load = dict.fromkeys(self._seconds, 0.0)
        self._elapsed_s = 0.0
        self._at_s: float | None = None

    def note(self, now_s: float, *, in_flight: int, places: int, in_touch: int) -> None:
        """Note the load at `now_s`; it counts for the time since the last call."""
        self._load = {"in_flight": in_flight, "places": places, "in_touch": in_touch}
        elapsed_s = now_s - self._at_s if self._at_s is not None else 0.0
        for name, load in self._load.items():
            self._seconds[name] += load * elapsed_s
        self._elapsed_s += elapsed_s
        self._at_s = now_s
        metrics.generator_places.set(places)

    def spent(self, before: GeneratorSeconds, now: GeneratorSeconds) -> None:
        """Note what one generator's process says it has done, and what it said before."""
        for activity, seconds in msgspec.structs.asdict(now).items():
            self._spent[activity] += max(0.0, seconds - getattr(before, activity))

    def since_batch(self) -> dict[str, float]:
        """Since the last call: mean loads, and the seconds of all generators by activity; names as of `batch_figures`.

        Where no time has passed, the load is the one that was noted last.
        """
        means = self._load
        if self._elapsed_s > 0:
            means = {name: seconds / self._elapsed_s for name, seconds in self._seconds.items()}
        told = {OF_ONE_BATCH + name: float(figure) for name, figure in {**means, **self._spent}.items()}
        self._seconds, self._elapsed_s, self._spent = dict.fromkeys(self._seconds, 0.0), 0.0, Counter()
        return told


class Gauges:
    """Brings the metrics up to what a buffer counts."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, buffer: Buffer, now_s: float) -> None:
        """Set all metrics, and log which distances have become large."""
        for sentence in buffer.bias.news():
            log.warning("%s (docs/staleness.md)", sentence)
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
