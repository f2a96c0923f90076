"""The panels of the board, row by row, from left to right: each has its queries and says what to do about what it shows.

build.py makes overview.json from them. Expressions name metrics of asyncgrpo/metrics.py without the label of the run,
which build.py adds. Rates use `$__rate_interval`, so that the board works with any scrape interval.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is one of Grafana's; `queries` maps a legend to an expression."""

    title: str
    description: str
    """What the panel shows, and what to do when it looks wrong."""
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    top: float | None = None
    """Upper end of the axis."""
    decimals: int | None = None
    thresholds: tuple[tuple[float, str], ...] = ()
    """Pairs of a value and the colour from it on. Below the first value it is green."""


def number(title: str, description: str, unit: str, queries: dict[str, str], **more: Any) -> Panel:
    """One of the eight numbers of the first row."""
    return Panel(title, description, unit, queries, kind="stat", width=3, height=5, **more)


def quantiles(metric: str, *qs: float, by: str = "$__rate_interval") -> dict[str, str]:
    """Quantiles of a histogram over all processes: expressions by legend."""
    rate = f"sum by (le) (rate({metric}_bucket[{by}]))"
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate})" for q in qs}


def share(metric: str, where: str) -> str:
    """The share of a seconds counter whose labels match `where`, 0 to 1."""
    return f"sum(rate({metric}{{{where}}}[$__rate_interval])) / sum(rate({metric}[$__rate_interval]))"


def lag(q: float, over: str) -> str:
    """A quantile of the lag. Up to 32 each lag has a bucket of its own, so rounding up makes it exact."""
    return f"ceil(histogram_quantile({q}, sum by (le) (increase(asyncgrpo_group_lag_steps_bucket[{over}]))))"


FAILURES = " + ".join(
    f"(sum(increase({metric}[$__range])) or vector(0))"
    for metric in (
        "asyncgrpo_reward_failures_total",
        'asyncgrpo_weight_sync_total{outcome!="ok"}',
        "asyncgrpo_rejected_frames_total",
        "asyncgrpo_actor_restarts_total",
    )
)

ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        number(
            "Reward",
            "Mean reward of the completions in the last step. Flat at its start for long: look at samples, then at "
            "Rewards below.",
            "short",
            {"train": "asyncgrpo_reward_mean"},
            decimals=3,
        ),
        number(
            "Steps per hour",
            "Optimizer steps, averaged over 5 minutes. Falling: see which of waiting, publishing or training grew in "
            "Learner.",
            "suffix: /h",
            {"steps": "3600 * rate(asyncgrpo_step_seconds_count[5m])"},
            decimals=0,
        ),
        number(
            "Lag p99 and its bound",
            "Optimizer steps from a group's oldest token to its training, over the time shown, beside buffer.max_lag. "
            "Always at the bound: the learner is the slower side, and buffer.admission=fresh would train younger groups.",
            "suffix: steps",
            {"p99": lag(0.99, "$__range"), "bound": "max(asyncgrpo_max_lag_steps)"},
            decimals=0,
        ),
        number(
            "Learner waits",
            "Share of the learner's time spent waiting for a batch. Above 10 %: more generators, or a larger "
            "buffer.max_lag if the buffer is full of groups under way.",
            "percentunit",
            {"wait": share("asyncgrpo_learner_seconds_total", 'activity="wait_data"')},
            decimals=0,
            thresholds=((0.1, "yellow"), (0.4, "red")),
        ),
        number(
            "Generators busy",
            "Share of the generators' time in which they sample at least one completion. Low while the learner waits: see What "
            "generators do for what they do instead.",
            "percentunit",
            {"busy": share("asyncgrpo_generator_seconds_total", 'activity="generate"')},
            decimals=0,
        ),
        number(
            "Tokens per second",
            "Sampled against trained. What is sampled and never trained was dropped: see Groups by outcome.",
            "suffix: tok/s",
            {
                "generated": "sum(rate(asyncgrpo_tokens_generated_total[$__rate_interval]))",
                "trained": "sum(rate(asyncgrpo_tokens_trained_total[$__rate_interval]))",
            },
            decimals=0,
        ),
        number(
            "Weight sync",
            "Mean time of a publication over the time shown, until the last generator has replied. "
            "More than a tenth of a step: see Weights.",
            "s",
            {
                "mean": "increase(asyncgrpo_weight_sync_seconds_sum[$__range])"
                " / increase(asyncgrpo_weight_sync_seconds_count[$__range])"
            },
            thresholds=((10, "yellow"), (60, "red")),
        ),
        number(
            "Failures",
            "Reward failures, failed syncs, refused messages and restarts over the time shown. The rows below say "
            "which.",
            "short",
            {"failures": FAILURES},
            decimals=0,
            thresholds=((1, "yellow"), (50, "red")),
        ),
    ],
    "Learning": [
        Panel(
            "Reward",
            "Mean reward in training and on the held-out prompts. Training up and held-out flat: the reward is being "
            "gamed.",
            "short",
            {"train": "asyncgrpo_reward_mean", "held-out": "asyncgrpo_eval_reward_mean"},
            width=12,
            height=8,
        ),
        Panel(
            "Reward spread",
            "Standard deviation of the reward over the completions of a step. Near 0 there is nothing to learn from.",
            "short",
            {"std": "asyncgrpo_reward_std"},
            width=6,
            height=8,
        ),
        Panel(
            "Completion length",
            "Mean sampled tokens of a completion. A steady climb to sampling.max_tokens: completions are cut, or padded for "
            "reward.",
            "suffix: tok",
            {"mean": "asyncgrpo_completion_length_mean"},
            width=6,
            height=8,
        ),
        Panel(
            "Loss",
            "Loss of each step. Its level means little in GRPO; a jump that stays is worth a look at the gradient "
            "norm.",
            "short",
            {"loss": "asyncgrpo_loss"},
            width=6,
        ),
        Panel(
            "Gradient norm",
            "Before clipping. Spikes: lower learner.lr or learner.grad_clip.",
            "short",
            {"norm": "asyncgrpo_grad_norm"},
            width=6,
        ),
        Panel(
            "Entropy and KL",
            "Entropy of the policy and KL to the reference model, nats. Entropy near 0 early: raise "
            "algorithm.loss_args.high or entropy_coef.",
            "suffix: nats",
            {"entropy": "asyncgrpo_entropy", "KL": "asyncgrpo_kl_reference"},
            width=6,
        ),
        Panel(
            "Groups without signal",
            "Share of the trained groups whose completions all had one reward: they teach nothing. Near 1: the prompts are "
            "solved or too hard, or the reward is always the same.",
            "percentunit",
            {
                "without signal": "sum(rate(asyncgrpo_zero_signal_groups_total[5m]))"
                ' / (sum(rate(asyncgrpo_groups_total{outcome="trained"}[5m])) > 0)'
            },
            width=6,
            top=1,
        ),
        Panel(
            "Clipped tokens, signal and learning rate",
            "Share of trained tokens whose ratio was clipped (above 0.2 the steps are too large), share of the "
            "groups that are not hopeless with a signal, and the learning rate, which falls with it (learner.full_lr_signal).",
            "short",
            {
                "clipped": "asyncgrpo_clip_ratio",
                "signal": "asyncgrpo_signal_ratio",
                "learning rate": "asyncgrpo_learning_rate",
            },
            width=6,
        ),
    ],
    "Staleness": [
        Panel(
            "Lag",
            "Lag of trained groups and the bound in force, optimizer steps. p99 above the bound is a bug, but where the "
            "bound has just fallen; p50 at the bound: the learner limits the run, and buffer.admission=fresh would train "
            "younger groups.",
            "suffix: steps",
            {
                "p50": lag(0.5, "5m"),
                "p90": lag(0.9, "5m"),
                "p99": lag(0.99, "5m"),
                "bound": "max(asyncgrpo_max_lag_steps)",
            },
            decimals=0,
        ),
        Panel(
            "Trained at the bound",
            "Share of the trained groups whose lag was at the bound in force. Normal for buffer.admission=eager; with fresh, "
            "much of it says that the bound holds generators back: raise buffer.max_lag if the learner waits.",
            "percentunit",
            {
                "at the bound": "sum(rate(asyncgrpo_groups_at_bound_total[5m]))"
                " / (sum(rate(asyncgrpo_group_lag_steps_count[5m])) > 0)"
            },
            top=1,
        ),
        Panel(
            "Groups by lag",
            "Trained groups by lag in steps, over the time shown. Most of them in the last bar: the bound is at work.",
            "suffix: groups",
            {"{{le}}": "sum by (le) (increase(asyncgrpo_group_lag_steps_bucket[$__range]))"},
            kind="bargauge",
        ),
        Panel(
            "Importance weights",
            "Mean weight proximal / behaviour policy, and the share of tokens at the cap. A mean far from 1 or a "
            "growing share: the data is too old, or engine and learner disagree.",
            "short",
            {
                "mean": "asyncgrpo_importance_weight_mean",
                "capped share": "asyncgrpo_importance_capped_ratio",
                "rejected share": "asyncgrpo_rejected_ratio",
                "effective share of completions": "asyncgrpo_effective_sample_share",
            },
        ),
        Panel(
            "Distance of the policies",
            "KL of the behaviour to the proximal policy, nats, and the largest ratio of a token. Far above what the lag "
            "explains: a kernel or a sampling parameter differs.",
            "short",
            {"KL (k3)": "asyncgrpo_behaviour_kl", "largest ratio": "asyncgrpo_importance_ratio_max"},
        ),
        Panel(
            "Log-prob gap, learner against engine",
            "On tokens that the current weights sampled, nats: rounding only, if all is well. A jump after a sync: "
            "wrong weights on an engine; a constant offset: different precision, temperature or kernels.",
            "suffix: nats",
            {"mean": "asyncgrpo_logprob_gap_mean", "largest": "asyncgrpo_logprob_gap_max"},
            width=12,
        ),
        Panel(
            "Policy versions",
            "Published by the learner and held by each generator. A generator that stays behind is out of sync: see "
            "its log.",
            "suffix: steps",
            {
                "learner": "asyncgrpo_learner_policy_version",
                "generator {{rank}}": "asyncgrpo_generator_policy_version",
            },
            width=12,
        ),
    ],
    "Buffer": [
        Panel(
            "Slots",
            "Groups under way, ready and in the learner, and the slots they share. All leased: generators are the "
            "slower side; all ready: the learner is. Wanted: how many buffer.admission keeps leased or ready.",
            "suffix: groups",
            {
                "{{state}}": "asyncgrpo_buffer_groups",
                "wanted": "asyncgrpo_groups_wanted",
                "slots": "asyncgrpo_buffer_slots",
            },
        ),
        Panel(
            "Time a group waits ready",
            "From its arrival until it goes to the learner. It is lag without use: with buffer.admission=fresh it is a "
            "fraction of a step; near buffer.max_lag steps, generators run far ahead of the learner.",
            "s",
            quantiles("asyncgrpo_group_ready_seconds", 0.5, 0.99, by="5m"),
        ),
        Panel(
            "Places of the generators",
            "Groups in flight, and those that all generators in touch may work on. Many places free while the learner does "
            "not wait: fewer generators would do.",
            "suffix: groups",
            {
                "in flight": 'sum(asyncgrpo_buffer_groups{state="leased"})',
                "places": "sum(asyncgrpo_generator_places)",
            },
        ),
        Panel(
            "Groups by outcome",
            "Per second. Dropped ones cost tokens: stale means evicted by the bound, failed that no completion had a "
            "reward, poison that the prompt used up its attempts. filtered_zero_signal: rewards were all equal.",
            "suffix: /s",
            {"{{outcome}}": "sum by (outcome) (rate(asyncgrpo_groups_total[$__rate_interval]))"},
        ),
        Panel(
            "Bias",
            "Distance of trained from generated groups, 0 to 1. Above the threshold: groups are given up for their age, and "
            "they are not like the others. Age itself is the share that was given up.",
            "percentunit",
            {"{{of}}": "max by (of) (asyncgrpo_bias_distance)", "threshold": "max(asyncgrpo_bias_threshold)"},
        ),
        Panel(
            "Age of the oldest group",
            "Since its first lease. Growing without end: one prompt hangs; its lease expires after "
            "buffer.lease_timeout_s.",
            "s",
            {"oldest": "asyncgrpo_buffer_oldest_group_age_seconds"},
        ),
        Panel(
            "Refused messages",
            "Messages that could not be read or trusted, per second. Any: another version of asyncgrpo, or a peer "
            "that is not ours.",
            "suffix: /s",
            {"{{reason}}": "sum by (reason) (rate(asyncgrpo_rejected_frames_total[$__rate_interval]))"},
            width=12,
        ),
        Panel(
            "Prompts and epochs",
            "Prompts done in the current epoch, and epochs complete.",
            "short",
            {"prompts": "asyncgrpo_prompts_done", "epochs": "asyncgrpo_epoch"},
            width=12,
        ),
        Panel(
            "Tokens by fate",
            "Sampled tokens that came to the buffer, per second: generated + recovered = all others + what is in flight. "
            "Anything but trained and filtered is wasted work.",
            "suffix: tok/s",
            {
                "{{fate}}": "sum by (fate) (rate(asyncgrpo_tokens_total[$__rate_interval]))",
                "in flight (tokens)": "asyncgrpo_buffer_tokens",
            },
            width=12,
        ),
        Panel(
            "Journal",
            "Bytes written per second, and 1 while it cannot be written: then nothing is acknowledged or leased. Look at "
            "the disk of the run folder.",
            "Bps",
            {
                "bytes per second": "rate(asyncgrpo_journal_bytes_total[$__rate_interval])",
                "blocked": "asyncgrpo_journal_blocked",
            },
            width=6,
        ),
        Panel(
            "Sync of the journal",
            "Time to put what was written on the disk, at most every half second. Above 0.1 s it holds up the buffer.",
            "s",
            quantiles("asyncgrpo_journal_sync_seconds", 0.5, 0.99),
            width=6,
        ),
        Panel(
            "Completions in no group",
            "Per second. retried: sampled again; spare: the reserve, not needed; censored: cut at the deadline of their "
            "group, so what is trained is shorter than what is sampled. Many censored: raise buffer.straggler_factor.",
            "suffix: /s",
            {"{{why}}": "sum by (why) (rate(asyncgrpo_completions_discarded_total[$__rate_interval]))"},
        ),
        Panel(
            "Deadline of a lease",
            "What a lease granted now is given, beside the age of the oldest group. Only with buffer.straggler_factor does "
            "it follow the median of the groups.",
            "s",
            {"deadline": "asyncgrpo_lease_deadline_seconds", "oldest": "asyncgrpo_buffer_oldest_group_age_seconds"},
        ),
        Panel(
            "Prompts in quarantine",
            "Prompts that are leased no more: generators ended or failed with them. quarantine.jsonl in "
            "the run folder says which and why.",
            "suffix: prompts",
            {"prompts": "asyncgrpo_quarantined_prompts"},
        ),
    ],
    "Generators": [
        Panel(
            "Tokens per second by generator",
            "Sampled tokens. One far below the others: a slow device, or prompts with long completions.",
            "suffix: tok/s",
            {"generator {{rank}}": "sum by (rank) (rate(asyncgrpo_tokens_generated_total[$__rate_interval]))"},
        ),
        Panel(
            "What generators do",
            "Share of their time. generate: at least one completion is sampled; reward: there is nothing to do but score, "
            "so raise reward.workers or make the function faster; idle: no lease was to be had, because admission or the bound "
            "holds them, or prompts have run out.",
            "percentunit",
            {
                "{{activity}}": "sum by (activity) (rate(asyncgrpo_generator_seconds_total[$__rate_interval]))"
                " / ignoring (activity) group_left sum(rate(asyncgrpo_generator_seconds_total[$__rate_interval]))"
            },
            stacked=True,
            top=1,
        ),
        Panel(
            "Completions at once",
            "Completions sampled, and scored or waiting for it, on average. More scored than sampled: the reward is too slow.",
            "suffix: completions",
            {"{{activity}}": "sum by (activity) (rate(asyncgrpo_completion_seconds_total[$__rate_interval]))"},
        ),
        Panel(
            "Groups in flight",
            "Groups each generator works on. Below generators.groups_in_flight it has free places that the buffer does not "
            "fill.",
            "suffix: groups",
            {"generator {{rank}}": "asyncgrpo_groups_in_flight"},
        ),
        Panel(
            "Time to generate a group",
            "From lease to last completion. p99 far above p50: one long completion holds its group; see sampling.max_tokens.",
            "s",
            quantiles("asyncgrpo_generate_seconds", 0.5, 0.99),
        ),
        Panel(
            "Completion length",
            "Sampled tokens, by quantile.",
            "suffix: tok",
            quantiles("asyncgrpo_completion_length_tokens", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Why completions end",
            "Share of completions. Much `length`: raise sampling.max_tokens, or the model does not end its completions.",
            "percentunit",
            {
                "{{finish_reason}}": "sum by (finish_reason) (rate(asyncgrpo_completions_total[$__rate_interval]))"
                " / ignoring (finish_reason) group_left sum(rate(asyncgrpo_completions_total[$__rate_interval]))"
            },
            stacked=True,
            top=1,
        ),
    ],
    "Weights": [
        Panel(
            "Sync time",
            "Of one publication, by quantile.",
            "s",
            quantiles("asyncgrpo_weight_sync_seconds", 0.5, 0.99, by="5m"),
        ),
        Panel(
            "Syncs by outcome",
            "Over the last 5 minutes. Anything but ok: the learner's log names the generator and what was wrong.",
            "suffix: syncs",
            {"{{outcome}}": "sum by (outcome) (increase(asyncgrpo_weight_sync_total[5m]))"},
            width=6,
        ),
        Panel(
            "Bytes sent",
            "Weights sent per second, each generator counted.",
            "Bps",
            {"sent": "rate(asyncgrpo_weight_sync_bytes_total[$__rate_interval])"},
            width=5,
        ),
        Panel(
            "Generators in sync",
            "Generators that proved by checksum to hold the last version, beside those that Prometheus can scrape and those "
            "that the run is to have.",
            "suffix: generators",
            {
                "in sync": "asyncgrpo_generators_in_sync",
                "alive": "count(asyncgrpo_generator_info) or vector(0)",
                "expected": "asyncgrpo_generators_expected",
            },
            width=5,
        ),
    ],
    "Rewards": [
        Panel(
            "Time to score a completion",
            "By quantile. Near reward.timeout_s: a slow or hanging reward; raise reward.workers or fix the function.",
            "s",
            quantiles("asyncgrpo_reward_seconds", 0.5, 0.99),
            width=9,
        ),
        Panel(
            "Completions without a score",
            "Per second, by what went wrong. The generator's log has the exception.",
            "suffix: /s",
            {"{{failure}}": "sum by (failure) (rate(asyncgrpo_reward_failures_total[$__rate_interval]))"},
            width=9,
        ),
        Panel(
            "Rewards paused",
            "Generators at which every reward call fails: they only probe, and get no lease until a probe works.",
            "suffix: generators",
            {"paused": "sum(asyncgrpo_rewards_paused)"},
            width=6,
        ),
    ],
    "Learner and runtime": [
        Panel(
            "What the learner does",
            "Share of its first rank's time.",
            "percentunit",
            {
                "{{activity}}": "sum by (activity) (rate(asyncgrpo_learner_seconds_total[$__rate_interval]))"
                " / ignoring (activity) group_left sum(rate(asyncgrpo_learner_seconds_total[$__rate_interval]))"
            },
            stacked=True,
            top=1,
        ),
        Panel("Step time", "Waiting included.", "s", quantiles("asyncgrpo_step_seconds", 0.5, 0.99, by="5m")),
        Panel(
            "Since the last step and checkpoint",
            "Age of both. The first growing past 10 minutes raises NoProgress.",
            "s",
            {
                "step": "time() - asyncgrpo_last_step_timestamp_seconds",
                "checkpoint": "time() - asyncgrpo_checkpoint_last_success_timestamp_seconds",
            },
        ),
        Panel(
            "Waiting for",
            "What each process is waiting for right now, and for how long. A line that climbs names a hang.",
            "s",
            {"{{role}} {{rank}}: {{what}}": "asyncgrpo_waiting_seconds"},
        ),
        Panel(
            "Checkpoint time",
            "Mean seconds to write one, over the time shown; 0 before the first.",
            "s",
            {
                "mean": "(increase(asyncgrpo_checkpoint_seconds_sum[$__range])"
                " / (increase(asyncgrpo_checkpoint_seconds_count[$__range]) > 0)) or vector(0)"
            },
            width=4,
        ),
        Panel(
            "Restarts",
            "Processes started again over the time shown.",
            "suffix: restarts",
            {"{{actor}}": "sum by (actor) (increase(asyncgrpo_actor_restarts_total[$__range]))"},
            width=4,
        ),
        Panel(
            "Memory",
            "Of each process, and of those that it started: engines, reward workers, Ray. Growing without end: a leak; the "
            "kernel ends what takes too much.",
            "bytes",
            {"{{role}} {{rank}} {{of}}": "asyncgrpo_resident_bytes"},
            width=12,
        ),
        Panel(
            "Open files",
            "Descriptors of each process, and of those that it started. Growing with every restart: a leak; a process ends at "
            "its limit (ulimit -n).",
            "suffix: files",
            {"{{role}} {{rank}} {{of}}": "asyncgrpo_open_files"},
            width=6,
        ),
        Panel(
            "Processes",
            "That each process started and that live. More after every restart: something is left behind.",
            "suffix: processes",
            {"{{role}} {{rank}}": 'asyncgrpo_processes{of="below"}'},
            width=6,
        ),
        Panel(
            "Versions",
            "Processes by version of asyncgrpo. More than one line: a mixed cluster.",
            "suffix: processes",
            {"{{version}}": "count by (version) (asyncgrpo_build_info)"},
            width=4,
        ),
        Panel(
            "Free disk",
            "Room on the disk of the run folder. One that falls for hours raises DiskFilling: look at samples and checkpoints.",
            "bytes",
            {"free": "min(asyncgrpo_disk_free_bytes)"},
            width=4,
        ),
    ],
}
