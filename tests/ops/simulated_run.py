"""Exports the metrics of all roles and moves them as a healthy run would. Prints its port, then runs until killed.

Its argument is the token that a scrape must send.
"""

import itertools
import random
import sys
import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from asyncgrpo import metrics

GROUPS, COMPLETIONS, MAX_LAG = 8, 8, 2


def start() -> None:
    for metric in all_of(Gauge):
        metric.set(1)
    metrics.generator_info.info({"engine": "fake"})
    metrics.page_info.info({"url": "http://127.0.0.1:1"})
    metrics.max_lag_steps.set(MAX_LAG)
    metrics.buffer_slots.set((MAX_LAG + 1) * GROUPS)
    metrics.generator_places.set(4 * GROUPS)


def all_of(kind: type) -> list[Any]:
    """The metrics of this kind that have no labels, and whose value is not computed at a scrape."""
    found = [metric for metric in vars(metrics).values() if isinstance(metric, kind) and not metric._labelnames]
    return [metric for metric in found if "_child_samples" not in vars(metric)]


def one_group(rng: random.Random) -> None:
    for metric in all_of(Histogram):
        metric.observe(rng.uniform(0.05, 0.2))
    for metric in all_of(Counter):
        metric.inc()
    for outcome in ("leased", "accepted", "trained"):
        metrics.groups_total.labels(outcome=outcome).inc()
    for fate, tokens in (("generated", 240), ("trained", 200), ("stale", 40)):
        metrics.tokens_total.labels(fate=fate).inc(tokens)
    for activity, seconds in (("generate", 0.02), ("reward", 0.002), ("idle", 0.002)):
        metrics.generator_seconds_total.labels(activity=activity).inc(seconds)
        metrics.completion_seconds_total.labels(activity=activity).inc(seconds * COMPLETIONS)
    for _ in range(COMPLETIONS):
        metrics.completions_total.labels(finish_reason="stop").inc()


def one_step(rng: random.Random, step: int) -> None:
    for _ in range(GROUPS):
        one_group(rng)
    metrics.buffer_groups.labels(state="leased").set(5)
    metrics.buffer_groups.labels(state="ready").set(3)
    metrics.completions_discarded_total.labels(why="censored").inc(GROUPS)
    for kind, prompts, places in (("solved", 40, 10), ("mixed", 50, 85), ("hopeless", 10, 5)):
        metrics.curriculum_prompts.labels(kind=kind).set(prompts)
        metrics.curriculum_places.labels(kind=kind).set(places)
    metrics.bias_distance.labels(of="length").set(rng.uniform(0.0, 0.02))
    parts = {"correct": min(1.0, 0.1 + step / 50), "format": 0.9}
    source = dict.fromkeys(metrics.SOURCE_GAUGES, 0.5)
    event = dict.fromkeys(metrics.STEP_GAUGES, 0.5) | {"step": step, "sources": {"gsm8k": source, "aiw": source}}
    event |= {"zero_signal_groups": 1, "tokens_trained": GROUPS * COMPLETIONS * 30}
    event |= {"reward_parts": parts, "reward_parts_std": dict.fromkeys(parts, 0.2)}
    event |= {"seconds": {"wait_data": 0.05, "forward_backward": 0.1, "optimizer": 0.02, "publish": 0.01}}
    metrics.observe_step(event)
    metrics.weight_sync_total.labels(outcome="ok").inc()
    metrics.learner_policy_version.set(step)
    metrics.generator_policy_version.set(step)
    if step % 5 == 0:
        metrics.eval_suite.labels(suite="gsm8k", number="pass@1").set(parts["correct"])


def main() -> None:
    rng = random.Random(0)
    port = metrics.serve(*metrics.ROLES, token=sys.argv[1])
    start()
    print(port, flush=True)
    for step in itertools.count(1):
        one_step(rng, step)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
