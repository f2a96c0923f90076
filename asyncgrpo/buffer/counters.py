"""A buffer in numbers: totals for the learner's record, and the metrics that this process exports."""

import logging

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.groups import State

log = logging.getLogger(__name__)


def counters(buffer: Buffer) -> dict[str, float]:
    """Totals of this process: groups by outcome, those filtered by kind, tokens by fate. Of now: tokens in flight, bias."""
    groups = {f"groups_{k}": float(v) for k, v in buffer.outcomes.items()}
    filtered = {f"filtered_{k}": float(v) for k, v in buffer.filtered.items()}
    tokens = {f"tokens_{k}": float(v) for k, v in buffer.tokens.items()}
    answers = {f"answers_{k}": float(v) for k, v in buffer.discarded.items()}
    bias = {f"bias_{k}": v for k, v in buffer.bias.distances().items()}
    now = {"tokens_in_flight": float(buffer.tokens_in_flight), "prompts_done": float(buffer.prompts_done)}
    return groups | filtered | tokens | answers | bias | now


class Gauges:
    """Brings the metrics up to what a buffer counts."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, buffer: Buffer, now_s: float) -> None:
        """All of them; and says in the log what has become biased."""
        for sentence in buffer.bias.news():
            log.warning("%s (buffer.bias_threshold, docs/staleness.md)", sentence)
        for name, distance in buffer.bias.distances().items():
            metrics.bias_distance.labels(of=name).set(distance)
        for metric, label, totals in (
            (metrics.groups_total, "outcome", buffer.outcomes),
            (metrics.tokens_total, "fate", buffer.tokens),
            (metrics.answers_discarded_total, "why", buffer.discarded),
        ):
            for value, total in totals.items():
                metric.labels(**{label: value}).inc(total - self._shown.get((label, value), 0))
                self._shown[label, value] = total
        metrics.lease_deadline_seconds.set(buffer.deadline_s)
        metrics.quarantined_prompts.set(buffer.num_quarantined)
        metrics.buffer_tokens.set(buffer.tokens_in_flight)
        for state in State:
            metrics.buffer_groups.labels(state=state.value).set(buffer.count(state))
        oldest = buffer.oldest_lease()
        metrics.buffer_oldest_group_age_seconds.set(now_s - oldest.leased_at_s if oldest else 0.0)
        metrics.epoch.set(buffer.epoch)
        metrics.prompts_done.set(buffer.prompts_done)
