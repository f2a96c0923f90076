"""Exports the metrics of all roles and moves them as a healthy run would. Prints its port, then runs until killed.

Its argument is the token that a scrape must send.
"""

import itertools
import random
import sys
import time

from asyncgrpo import metrics

GROUPS, COMPLETIONS, MAX_LAG = 8, 8, 2


def start() -> None:
    metrics.generator_info.info({"engine": "fake"})
    metrics.page_info.info({"url": "http://127.0.0.1:1"})
    metrics.devices.set(1)
    metrics.engine_places.set(64)
    metrics.kv_use_ratio.set(0.3)
    metrics.max_lag_steps.set(MAX_LAG)
    metrics.bias_threshold.set(0.1)
    metrics.buffer_slots.set((MAX_LAG + 1) * GROUPS)
    metrics.groups_wanted.set(2 * GROUPS)
    metrics.generator_places.set(4 * GROUPS)
    metrics.generators_in_sync.set(1)
    metrics.disk_free_bytes.set(1e11)
    metrics.generators_expected.set(1)


def one_group(rng: random.Random) -> None:
    metrics.groups_total.labels(outcome="leased").inc()
    metrics.groups_total.labels(outcome="accepted").inc()
    metrics.generate_seconds.observe(rng.uniform(0.05, 0.2))
    metrics.generator_seconds_total.labels(activity="generate").inc(0.02)
    for fate, tokens in (("generated", 240), ("trained", 200), ("stale", 40)):
        metrics.tokens_total.labels(fate=fate).inc(tokens)
    metrics.generator_seconds_total.labels(activity="idle").inc(0.002)
    metrics.completion_seconds_total.labels(activity="generate").inc(0.02 * COMPLETIONS)
    metrics.completion_seconds_total.labels(activity="reward").inc(0.002 * COMPLETIONS)
    for _ in range(COMPLETIONS):
        tokens = rng.randrange(4, 60)
        metrics.tokens_generated_total.inc(tokens)
        metrics.completion_length_tokens.observe(tokens)
        metrics.completions_total.labels(finish_reason="stop").inc()
        metrics.reward_seconds.observe(0.002)
        metrics.reward_wait_seconds.observe(0.001)


def one_step(rng: random.Random, step: int) -> None:
    for _ in range(GROUPS):
        one_group(rng)
        lag = rng.randrange(MAX_LAG + 1)
        metrics.group_lag_steps.observe(lag)
        metrics.groups_at_bound_total.inc(lag == MAX_LAG)
        metrics.group_ready_seconds.observe(rng.uniform(0.0, 0.4))
        metrics.groups_total.labels(outcome="trained").inc()
    metrics.buffer_groups.labels(state="leased").set(5)
    metrics.buffer_groups.labels(state="ready").set(3)
    metrics.buffer_oldest_group_age_seconds.set(rng.random())
    metrics.completions_discarded_total.labels(why="censored").inc(GROUPS)
    metrics.lease_deadline_seconds.set(60.0)
    metrics.quarantined_prompts.set(0)
    for kind, prompts, places in (("solved", 40, 10), ("mixed", 50, 85), ("hopeless", 10, 5)):
        metrics.curriculum_prompts.labels(kind=kind).set(prompts)
        metrics.curriculum_places.labels(kind=kind).set(places)
    metrics.bias_distance.labels(of="length").set(rng.uniform(0.0, 0.02))
    metrics.journal_bytes_total.inc(10_000)
    metrics.journal_sync_seconds.observe(rng.uniform(0.005, 0.01))
    metrics.prompts_done.set(step * GROUPS)
    metrics.groups_in_flight.set(5)
    metrics.reward_workers.set(1)
    metrics.observe_step(
        {
            "step": step,
            "reward_mean": min(1.0, 0.1 + step / 50),
            "reward_std": 0.3,
            "reward_parts": {"correct": min(1.0, 0.1 + step / 50), "format": 0.9},
            "reward_parts_std": {"correct": 0.4, "format": 0.2},
            "sources": {
                name: {
                    "reward_mean": mean,
                    "success_share": mean,
                    "zero_signal_share": 0.2,
                    "completion_length_mean": 30.0,
                }
                for name, mean in (("gsm8k", 0.8), ("aiw", 0.4))
            },
            "loss": rng.gauss(0, 0.01),
            "grad_norm": 0.5,
            "lr": 1e-3,
            "entropy": 2.0,
            "signal_share": 0.8,
            "clip_ratio": 0.01,
            "importance_mean": 1.0,
            "importance_capped": 0.001,
            "diagnostics": {"ratio_max": 1.5, "ess_sequence": 0.9, "kl_k3": 1e-3, "rejected_dropped": 0.0},
            "logprob_gap_mean": 1e-7,
            "logprob_gap_max": 2e-6,
            "completion_length_mean": 30.0,
            "turns_mean": 1.5,
            "zero_signal_groups": 1,
            "tokens_trained": GROUPS * COMPLETIONS * 30,
            "seconds": {"wait_data": 0.05, "forward_backward": 0.1, "optimizer": 0.02, "publish": 0.01},
        }
    )
    metrics.weight_sync_total.labels(outcome="ok").inc()
    metrics.weight_sync_seconds.observe(rng.uniform(0.01, 0.02))
    metrics.weight_sync_bytes_total.inc(400_000)
    metrics.sync_gap_mean.set(3e-7)
    metrics.sync_gap_max.set(rng.uniform(1e-6, 2e-6))
    metrics.sync_gap_limit.set(3e-5)
    metrics.learner_policy_version.set(step)
    metrics.generator_policy_version.set(step)
    if step % 5 == 0:
        metrics.eval_reward_mean.set(min(1.0, 0.1 + step / 50))
        metrics.eval_suite.labels(suite="gsm8k", number="pass@1").set(min(1.0, 0.1 + step / 50))


def main() -> None:
    rng = random.Random(0)
    start()
    print(metrics.serve(*metrics.ROLES, token=sys.argv[1]), flush=True)
    for step in itertools.count(1):
        one_step(rng, step)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
