"""Every board, row by row. build.py makes the JSON from this list; panels.py has the words that it is written in."""

from panels import Board, Panel, between, lag, number, of_step, quantiles, share, shares

GENERATORS = "asyncgrpo_generator_seconds_total"
LEARNER = "asyncgrpo_learner_seconds_total"
SAMPLED = 'asyncgrpo_tokens_total{fate="generated"}'
WASTED = 'asyncgrpo_tokens_total{fate!~"generated|recovered|trained"}'
TRAINED = 'asyncgrpo_groups_total{outcome="trained"}'

SATURATION = (
    'clamp_max(sum(rate(asyncgrpo_completion_seconds_total{activity="generate"}[$__rate_interval]))'
    " / sum(asyncgrpo_engine_places), 1)"
)
ZERO_SIGNAL = f"sum(rate(asyncgrpo_zero_signal_groups_total[5m])) / (sum(rate({TRAINED}[5m])) > 0)"
AT_BOUND = "sum(rate(asyncgrpo_groups_at_bound_total[5m])) / (sum(rate(asyncgrpo_group_lag_steps_count[5m])) > 0)"


def _of_processes(metric: str) -> dict[str, str]:
    """Of each process, and of what driver and generators started: Ray and all others, engines and reward workers."""
    return {
        "{{role}} {{rank}}": f'{metric}{{of="self"}}',
        "below {{role}} {{rank}}": f'{metric}{{of="below",role=~"driver|generator"}}',
    }


# -- panels that more than one board shows ------------------------------------------------------------------------------

USEFUL = number(
    "Useful tokens per second",
    "Sampled tokens that an optimizer step has used.",
    "Falling: see who waits for whom in the next numbers, and what is wasted.",
    "suffix: tok/s",
    {"trained": "sum(rate(asyncgrpo_tokens_trained_total[$__rate_interval]))"},
    decimals=0,
    link="asyncgrpo-ratio",
)
LEARNER_WAITS = number(
    "Learner waits",
    "Share of the learner's time spent waiting for a batch.",
    "Above 10 %: more generators, or a larger buffer.max_lag if the buffer is full of groups under way.",
    "percentunit",
    {"wait": share(LEARNER, 'activity="wait_data"')},
    decimals=0,
    thresholds=((0.1, "yellow"), (0.4, "red")),
    link="asyncgrpo-ratio",
)
SATURATED = number(
    "Generator saturation",
    "Of the completions that the engines can sample at once, the share that they sample.",
    "Low while the learner waits: leases, the bound or slow rewards hold the engines; see Ratio tuning. Low while it does "
    "not wait: fewer generators would do.",
    "percentunit",
    {"saturation": SATURATION},
    decimals=0,
    link="asyncgrpo-ratio",
)
WHAT_GENERATORS_DO = Panel(
    "What generators do",
    "Share of their time. generate: at least one completion is sampled; reward: there is nothing to do but score; idle: no "
    "lease was to be had.",
    "Much reward: raise reward.workers or make the function faster. Much idle: admission or the bound holds them, or prompts "
    "have run out.",
    "percentunit",
    shares(GENERATORS, "activity"),
    stacked=True,
    top=1,
)
WHAT_THE_LEARNER_DOES = Panel(
    "What the learner does",
    "Share of its first rank's time.",
    "Much wait_data: more generators. Much publish: see Weights. Much checkpoint: raise run.checkpoint_every.",
    "percentunit",
    shares(LEARNER, "activity"),
    stacked=True,
    top=1,
)
LAG = Panel(
    "Lag",
    "Lag of trained groups and the bound in force, optimizer steps.",
    "p99 above the bound is a bug, but where the bound has just fallen. p50 at the bound: the bound holds "
    "generators back; raise buffer.max_lag if the learner waits.",
    "suffix: steps",
    {"p50": lag(0.5, "5m"), "p90": lag(0.9, "5m"), "p99": lag(0.99, "5m"), "bound": "max(asyncgrpo_max_lag_steps)"},
    decimals=0,
)
REWARD = Panel(
    "Reward",
    "Mean reward in training and on the held-out prompts.",
    "Training up and held-out flat: the reward is being gamed. Flat at its start for long: look at samples, then at Rewards.",
    "short",
    {"train": of_step("asyncgrpo_reward_mean"), "held-out": "asyncgrpo_eval_reward_mean"},
    width=12,
    height=8,
)
TOKENS_BY_FATE = Panel(
    "Tokens by fate",
    "Sampled tokens that came to the buffer, per second: generated + recovered = all others + what is in flight.",
    "Anything but trained and filtered is wasted work: Groups by outcome says why.",
    "suffix: tok/s",
    {"{{fate}}": "sum by (fate) (rate(asyncgrpo_tokens_total[$__rate_interval])) > 0"},
    width=12,
)

# -- the boards ---------------------------------------------------------------------------------------------------------

OVERVIEW = Board(
    "asyncgrpo-overview",
    "asyncgrpo: overview",
    "One asynchronous GRPO run in eight numbers: does it learn, how stale is its data, who waits for whom, what is wasted.",
    {
        "At a glance": [
            USEFUL,
            LEARNER_WAITS,
            SATURATED,
            number(
                "Sync share",
                "Share of their time in which weights keep the learner, and the generators, from their work.",
                "Above 5 %: see Weights, for which part of a publication takes long.",
                "percentunit",
                {
                    "learner": share(LEARNER, 'activity="publish"'),
                    "generators": share(GENERATORS, 'activity="weights"'),
                },
                decimals=1,
                thresholds=((0.05, "yellow"), (0.2, "red")),
                link="asyncgrpo-weights",
            ),
            number(
                "Lag and its bound, steps",
                "Optimizer steps from a group's oldest token to its training, over the time shown, beside buffer.max_lag.",
                "Always at the bound: it holds generators back; raise buffer.max_lag if the learner waits.",
                "short",
                {"p50": lag(0.5, "$__range"), "p99": lag(0.99, "$__range"), "bound": "max(asyncgrpo_max_lag_steps)"},
                decimals=0,
                link="asyncgrpo-rollouts",
            ),
            number(
                "Waste by cause",
                "Sampled tokens that no step has used, as a share of all, over the time shown, and the two largest causes.",
                "stale: raise buffer.max_lag. aborted, failed: see Reliability. filtered: prompts that are solved or too hard.",
                "percentunit",
                {
                    "all": f"sum(increase({WASTED}[$__range])) / sum(increase({SAMPLED}[$__range]))",
                    "{{fate}}": f"topk(2, sum by (fate) (increase({WASTED}[$__range]))"
                    f" / ignoring (fate) group_left sum(increase({SAMPLED}[$__range])))",
                },
                decimals=0,
                thresholds=((0.1, "yellow"), (0.3, "red")),
                link="asyncgrpo-rollouts",
            ),
            number(
                "Groups without signal",
                "Share of the trained groups whose completions all had one reward: they teach nothing.",
                "Near 1: the prompts are solved or too hard, or the reward is always the same; look at samples.",
                "percentunit",
                {"without": ZERO_SIGNAL},
                decimals=0,
                thresholds=((0.7, "yellow"), (0.95, "red")),
                link="asyncgrpo-rewards",
            ),
            number(
                "KV use",
                "Share of the engines' memory for keys and values that completions hold; the fullest engine and the mean.",
                "Near 1: completions wait for room, and fewer groups in flight would be as fast. Low: raise "
                "generators.groups_in_flight, if groups are to be had.",
                "percentunit",
                {"fullest": "max(asyncgrpo_kv_use_ratio)", "mean": "avg(asyncgrpo_kv_use_ratio)"},
                decimals=0,
                thresholds=((0.9, "yellow"), (0.98, "red")),
                link="asyncgrpo-rollouts",
            ),
        ],
        "Does it learn": [
            REWARD,
            Panel(
                "Completion length",
                "Mean sampled tokens of a completion in a step.",
                "A steady climb to sampling.max_tokens: completions are cut, or padded for reward; see Why completions end.",
                "suffix: tok",
                {"mean": of_step("asyncgrpo_completion_length_mean")},
                width=6,
                height=8,
            ),
            Panel(
                "Steps per hour",
                "Optimizer steps, averaged over 5 minutes.",
                "Falling: see which of waiting, publishing or training grew in What the learner does.",
                "suffix: /h",
                {"steps": "3600 * sum(rate(asyncgrpo_step_seconds_count[5m]))"},
                width=6,
                height=8,
                decimals=0,
            ),
        ],
        "Who waits for whom": [WHAT_THE_LEARNER_DOES, WHAT_GENERATORS_DO, LAG],
        "What may be wrong": [
            TOKENS_BY_FATE,
            Panel(
                "Failures",
                "Reward failures, syncs that did not land at once, refused messages and restarts, over 5 minutes.",
                "Each is a row of Rewards, Weights, Rollouts or Reliability, which say what to do.",
                "short",
                {
                    "rewards": "sum(increase(asyncgrpo_reward_failures_total[5m]))",
                    "syncs": 'sum(increase(asyncgrpo_weight_sync_total{outcome!="ok"}[5m]))',
                    "messages": "sum(increase(asyncgrpo_rejected_frames_total[5m]))",
                    "restarts": "sum(increase(asyncgrpo_actor_restarts_total[5m]))",
                },
                width=6,
            ),
            Panel(
                "Alerts that fire",
                "Alerts of ops/prometheus/alerts.yml, by name.",
                "Each has a page of what to do; its address is the alert's annotation.",
                "short",
                {
                    "{{alertname}}": 'count by (alertname) (ALERTS{alertstate="firing",run=~"$run"})'
                    ' or label_replace(vector(0), "alertname", "none", "", "")'
                },
                width=6,
                decimals=0,
            ),
        ],
    },
)

ROLLOUTS = Board(
    "asyncgrpo-rollouts",
    "asyncgrpo: rollouts and buffer",
    "From a lease to a trained group: what engines sample, how old it gets, where groups wait and why some are dropped.",
    {
        "Sampling": [
            Panel(
                "Tokens per second by generator",
                "Sampled tokens.",
                "One far below the others: a slow device, or prompts with long completions.",
                "suffix: tok/s",
                {"generator {{rank}}": "sum by (rank) (rate(asyncgrpo_tokens_generated_total[$__rate_interval]))"},
            ),
            Panel(
                "Completions in the engines",
                "Sampled now, waiting for a place or for room in the memory of keys and values, and the places there are.",
                "Many waiting: the engines are full; more groups in flight gain nothing. Few running: leases or the bound hold "
                "the generators.",
                "suffix: completions",
                {
                    "{{state}}": "sum by (state) (asyncgrpo_engine_completions)",
                    "places": "sum(asyncgrpo_engine_places)",
                },
            ),
            Panel(
                "KV use",
                "Share of an engine's memory for keys and values that completions hold.",
                "At 1 completions wait or are computed again: lower generators.groups_in_flight or raise "
                "generators.memory_fraction.",
                "percentunit",
                {"generator {{rank}}": "asyncgrpo_kv_use_ratio"},
                top=1,
            ),
            WHAT_GENERATORS_DO,
            Panel(
                "Completions at once",
                "Completions sampled, and scored or waiting for it, on average.",
                "More scored than sampled: the reward is too slow; see Rewards.",
                "suffix: completions",
                {"{{activity}}": "sum by (activity) (rate(asyncgrpo_completion_seconds_total[$__rate_interval]))"},
            ),
            Panel(
                "Groups in flight",
                "Groups each generator works on.",
                "Below generators.groups_in_flight it has free places that the buffer does not fill: see Slots.",
                "suffix: groups",
                {"generator {{rank}}": "asyncgrpo_groups_in_flight"},
            ),
            Panel(
                "Time to generate a group",
                "From lease to last completion.",
                "p99 far above p50: one long completion holds its group; see sampling.max_tokens and "
                "algorithm.min_completions.",
                "s",
                quantiles("asyncgrpo_generate_seconds", 0.5, 0.99),
            ),
            Panel(
                "Completion length",
                "Sampled tokens, by quantile.",
                "p99 at sampling.max_tokens: completions are cut; raise it, or teach the model to end.",
                "suffix: tok",
                quantiles("asyncgrpo_completion_length_tokens", 0.5, 0.9, 0.99),
            ),
            Panel(
                "Turns",
                "Mean turns of a completion in a step, where an environment replies.",
                "Falling to 1: the model has stopped to ask. Near environment.max_turns: completions are cut.",
                "short",
                {"mean": of_step("asyncgrpo_turns_mean")},
            ),
            Panel(
                "Why completions end",
                "Share of completions.",
                "Much `length`: raise sampling.max_tokens, or the model does not end its completions.",
                "percentunit",
                shares("asyncgrpo_completions_total", "finish_reason"),
                stacked=True,
                top=1,
            ),
        ],
        "Staleness": [
            LAG,
            Panel(
                "Trained at the bound",
                "Share of the trained groups whose lag was at the bound in force.",
                "Much of it says that the bound holds generators back: raise buffer.max_lag if the learner waits.",
                "percentunit",
                {"at the bound": AT_BOUND},
                top=1,
            ),
            Panel(
                "Groups by lag",
                "Trained groups by lag in steps, over the time shown.",
                "Most of them in the last bar: the bound holds generators back.",
                "suffix: groups",
                {"{{le}}": "sum by (le) (increase(asyncgrpo_group_lag_steps_bucket[$__range]))"},
                kind="bargauge",
            ),
        ],
        "Buffer": [
            Panel(
                "Slots",
                "Groups under way, ready and in the learner, the slots they share, and how many admission wants leased or ready.",
                "All leased: generators are the slower side. All ready: the learner is.",
                "suffix: groups",
                {
                    "{{state}}": "sum by (state) (asyncgrpo_buffer_groups)",
                    "wanted": "asyncgrpo_groups_wanted",
                    "slots": "asyncgrpo_buffer_slots",
                },
            ),
            Panel(
                "Time a group waits ready",
                "From its arrival until it goes to the learner. It is lag without use.",
                "A fraction of a step is normal. Near buffer.max_lag steps: generators run far ahead of the learner, so fewer "
                "would do.",
                "s",
                quantiles("asyncgrpo_group_ready_seconds", 0.5, 0.99, by="5m"),
            ),
            Panel(
                "Places of the generators",
                "Groups in flight, and those that all generators in touch may work on.",
                "Many places free while the learner does not wait: fewer generators would do.",
                "suffix: groups",
                {
                    "in flight": 'sum(asyncgrpo_buffer_groups{state="leased"})',
                    "places": "sum(asyncgrpo_generator_places)",
                },
            ),
            Panel(
                "Age of the oldest group",
                "Of those in flight, since its present lease, beside what a lease granted now is given.",
                "Growing without end: one prompt hangs; its lease expires after buffer.lease_timeout_s, or at the deadline of "
                "buffer.straggler_factor.",
                "s",
                {
                    "oldest": "asyncgrpo_buffer_oldest_group_age_seconds",
                    "deadline of a lease": "asyncgrpo_lease_deadline_seconds",
                },
            ),
            Panel(
                "Prompts done",
                "Prompts that are trained, filtered or dropped for good, over all epochs.",
                "Flat while steps go on: the same prompts are leased again and again; see Groups by outcome.",
                "short",
                {"prompts": "asyncgrpo_prompts_done"},
                width=4,
            ),
            Panel(
                "Epochs",
                "Passes over the training file that are complete.",
                "Several: the model sees prompts again; watch the evaluation, and give more prompts.",
                "short",
                {"epochs": "asyncgrpo_epoch"},
                width=4,
                decimals=0,
            ),
            Panel(
                "Tokens in flight",
                "Sampled tokens of groups that wait for the learner or are in it.",
                "Growing without end: the learner has stopped taking groups; see Reliability.",
                "suffix: tok",
                {"tokens": "asyncgrpo_buffer_tokens"},
            ),
        ],
        "What becomes of groups": [
            Panel(
                "Groups by outcome",
                "Per second. stale: evicted by the bound; failed: no completion had a reward; poison: the prompt used up its "
                "attempts; filtered_zero_signal: rewards were all equal.",
                "Dropped groups cost tokens and bias the data towards short completions: raise buffer.max_lag for stale ones.",
                "suffix: /s",
                {"{{outcome}}": "sum by (outcome) (rate(asyncgrpo_groups_total[$__rate_interval])) > 0"},
                width=12,
            ),
            TOKENS_BY_FATE,
            Panel(
                "Bias",
                "Distance of trained from generated groups in length and reward, 0 to 1.",
                "Above the threshold groups are given up for their age that are not like the others: raise buffer.max_lag or "
                "take buffer.policy=wait.",
                "percentunit",
                {"{{of}}": "max by (of) (asyncgrpo_bias_distance)", "threshold": "max(asyncgrpo_bias_threshold)"},
            ),
            Panel(
                "Completions in no group",
                "Per second. censored: cut at the group's deadline.",
                "Many censored: what is trained is shorter than what is sampled; raise buffer.straggler_factor.",
                "suffix: /s",
                {"{{why}}": "sum by (why) (rate(asyncgrpo_completions_discarded_total[$__rate_interval]))"},
            ),
            Panel(
                "Prompts in quarantine",
                "Prompts that are leased no more: generators ended or failed with them.",
                "quarantine.jsonl in the run folder says which and why; a deleted line has its prompt leased again.",
                "suffix: prompts",
                {"prompts": "asyncgrpo_quarantined_prompts"},
                decimals=0,
            ),
        ],
    },
)

LEARNER_BOARD = Board(
    "asyncgrpo-learner",
    "asyncgrpo: learner and algorithm",
    "Whether the policy learns in a healthy way. Where a number has a healthy band, what lies outside is shaded.",
    {
        "Reward and loss": [
            REWARD,
            Panel(
                "Loss",
                "Loss of each step.",
                "Its level means little in GRPO; a jump that stays is worth a look at the gradient norm.",
                "short",
                {"loss": of_step("asyncgrpo_loss")},
                axis=(None, None),
                width=6,
                height=8,
            ),
            Panel(
                "Learning rate and signal",
                "The learning rate as a share of its highest in the time shown, and the share of groups with a signal, which it "
                "follows.",
                "Both low: the prompts are solved, and most sampling is wasted; give other prompts or end the run.",
                "percentunit",
                {
                    "learning rate": of_step("asyncgrpo_learning_rate")
                    + " / max(max_over_time(asyncgrpo_learning_rate[$__range]))",
                    "signal": of_step("asyncgrpo_signal_ratio"),
                },
                width=6,
                height=8,
                top=1,
            ),
        ],
        "The update": [
            Panel(
                "Gradient norm",
                "Before clipping. Shaded above 10.",
                "Spikes: lower learner.lr or learner.grad_clip; learner.spike_factor skips such steps.",
                "short",
                {"norm": of_step("asyncgrpo_grad_norm")},
                thresholds=((10, "orange"), (100, "red")),
                axis=(0, 1),
            ),
            Panel(
                "Entropy",
                "Mean entropy of the policy on trained tokens. Shaded below 0.05 nats.",
                "Near 0 early: the policy has stopped exploring; raise algorithm.loss_args.high or the entropy bonus.",
                "suffix: nats",
                {"entropy": of_step("asyncgrpo_entropy")},
                thresholds=((-1e9, "orange"), (0.05, "green")),
            ),
            Panel(
                "Clipped tokens",
                "Share of trained tokens whose ratio was clipped. Shaded above 0.2.",
                "Above the band the steps are too large for the data's age: lower learner.lr or buffer.max_lag.",
                "percentunit",
                {"clipped": of_step("asyncgrpo_clip_ratio")},
                thresholds=((0.2, "orange"), (0.4, "red")),
            ),
            Panel(
                "KL to the reference",
                "Mean on trained tokens; 0 without a reference. Shaded above 0.5 nats.",
                "Growing without reward: the policy drifts; raise the coefficient of the KL.",
                "suffix: nats",
                {"KL": of_step("asyncgrpo_kl_reference")},
                thresholds=((0.5, "orange"), (2, "red")),
            ),
            Panel(
                "Step time",
                "Waiting included.",
                "p99 far above p50: evaluations and checkpoints, or a wait for one long group.",
                "s",
                quantiles("asyncgrpo_step_seconds", 0.5, 0.99, by="5m"),
            ),
            WHAT_THE_LEARNER_DOES,
        ],
        "Off-policy": [
            Panel(
                "Importance weight",
                "Mean ratio of proximal and behaviour policy on trained tokens, before the cap. Shaded outside 0.95 to 1.05.",
                "Far from 1: the data is too old (lower buffer.max_lag), or engine and learner disagree (Log-prob gap).",
                "short",
                {"mean": of_step("asyncgrpo_importance_weight_mean")},
                thresholds=between(0.95, 1.05),
                axis=(0.9, 1.1),
            ),
            Panel(
                "Capped and rejected tokens",
                "Share of trained tokens whose importance weight was capped, or that corrections rejected. Shaded above 0.05.",
                "Growing: as for the importance weight; what is rejected teaches nothing.",
                "percentunit",
                {
                    "capped": of_step("asyncgrpo_importance_capped_ratio"),
                    "rejected": of_step("asyncgrpo_rejected_ratio"),
                },
                thresholds=((0.05, "orange"), (0.2, "red")),
            ),
            Panel(
                "Effective share of completions",
                "Effective sample size of a step, by the whole ratios of its completions. Shaded below 0.3.",
                "Low: a few completions make the whole step; lower buffer.max_lag, or correct by token and not by completion.",
                "percentunit",
                {"effective": of_step("asyncgrpo_effective_sample_share")},
                top=1,
                thresholds=((-1e9, "orange"), (0.3, "green")),
            ),
            Panel(
                "KL of behaviour to policy",
                "k3 estimate, on trained tokens. Shaded above 0.05 nats.",
                "Far above what the lag explains: a kernel or a sampling parameter differs between engine and learner.",
                "suffix: nats",
                {"KL (k3)": of_step("asyncgrpo_behaviour_kl")},
                thresholds=((0.05, "orange"), (0.5, "red")),
            ),
            Panel(
                "Largest ratio of a token",
                "Of proximal to behaviour policy, in a step.",
                "Hundreds: a token that the engine held for nearly impossible; see the log-prob gap.",
                "short",
                {"largest": of_step("asyncgrpo_importance_ratio_max")},
            ),
            Panel(
                "Log-prob gap, learner against engine",
                "On tokens that the current weights sampled: rounding only, if all is well. Shaded above 0.02 nats.",
                "A jump after a sync: wrong weights on an engine. A constant offset: other precision, temperature or kernels.",
                "suffix: nats",
                {"mean": of_step("asyncgrpo_logprob_gap_mean"), "largest": of_step("asyncgrpo_logprob_gap_max")},
                thresholds=((0.02, "orange"), (0.1, "red")),
            ),
        ],
    },
)

WEIGHTS = Board(
    "asyncgrpo-weights",
    "asyncgrpo: weights",
    "Publications of weights: how long, how much, and whether every generator holds them.",
    {
        "Publications": [
            number(
                "Generators in sync",
                "Generators that proved by checksum to hold the last version, and those that the run is to have.",
                "Fewer for minutes: Policy versions names the one that stays behind; see its log.",
                "short",
                {"in sync": "asyncgrpo_generators_in_sync", "expected": "asyncgrpo_generators_expected"},
                width=6,
                decimals=0,
            ),
            number(
                "Sync time",
                "Mean time of a publication over the time shown, until the last generator has replied.",
                "More than a tenth of a step: publish less often, or look for a slow network.",
                "s",
                {
                    "mean": "sum(increase(asyncgrpo_weight_sync_seconds_sum[$__range]))"
                    " / sum(increase(asyncgrpo_weight_sync_seconds_count[$__range]))"
                },
                width=6,
                thresholds=((10, "yellow"), (60, "red")),
            ),
            number(
                "Publications that did not land at once",
                "repeated: an attempt failed and the next reached all; degraded: published without some generators.",
                "The learner's log names the generator and what was wrong.",
                "suffix: syncs",
                {
                    "repeated": 'sum(increase(asyncgrpo_weight_sync_total{outcome="repeated"}[$__range]))',
                    "degraded": 'sum(increase(asyncgrpo_weight_sync_total{outcome="degraded"}[$__range]))',
                },
                width=6,
                decimals=0,
                thresholds=((1, "yellow"), (10, "red")),
            ),
            number(
                "Sent",
                "Weights sent over the time shown, each generator counted.",
                "More than the network should carry: on a slow one `weights.deltas` sends what has changed.",
                "bytes",
                {"sent": "sum(increase(asyncgrpo_weight_sync_bytes_total[$__range]))"},
                width=6,
            ),
        ],
        "Over time": [
            Panel(
                "Sync time",
                "Of one publication, by quantile.",
                "p99 near weights.timeout_s: one generator does not reply; the learner's log says which.",
                "s",
                quantiles("asyncgrpo_weight_sync_seconds", 0.5, 0.99, by="5m"),
                width=12,
            ),
            Panel(
                "Share of time",
                "In which weights keep the learner, and the generators, from their work.",
                "Above 5 %: a publication is too dear for the length of a step.",
                "percentunit",
                {
                    "learner": share(LEARNER, 'activity="publish"'),
                    "generators": share(GENERATORS, 'activity="weights"'),
                },
                width=12,
            ),
            Panel(
                "Policy versions",
                "Published by the learner, and how far each generator is behind it.",
                "One that stays behind is out of sync: see its log. One that starts has no version yet.",
                "suffix: steps",
                {
                    "generator {{rank}} behind": "scalar(max(asyncgrpo_learner_policy_version) > 0)"
                    " - max by (rank) (asyncgrpo_generator_policy_version > 0) > -Inf"
                },
                width=12,
            ),
            Panel(
                "Version published",
                "Optimizer steps of the weights that the learner published last.",
                "A fall: a core was lost, and went on from its checkpoint.",
                "suffix: steps",
                {"learner": "max(asyncgrpo_learner_policy_version) > 0"},
                width=12,
            ),
            Panel(
                "Syncs by outcome",
                "Over 5 minutes.",
                "Anything but ok: the learner's log names the generator and what was wrong.",
                "suffix: syncs",
                {"{{outcome}}": "sum by (outcome) (increase(asyncgrpo_weight_sync_total[5m]))"},
            ),
            Panel(
                "Bytes sent",
                "Weights sent per second, each generator counted.",
                "A fall with the same number of steps: fewer generators take part; see Generators in sync.",
                "Bps",
                {"sent": "sum(rate(asyncgrpo_weight_sync_bytes_total[$__rate_interval]))"},
            ),
            Panel(
                "Sync gap",
                "Log-probs of the check sequences under each published version: learner against the engine that is farthest off.",
                "Mean above the limit: an engine does not compute with the weights it was sent; see WeightsDiffer.",
                "suffix: nats",
                {
                    "mean": "max(asyncgrpo_sync_gap_mean)",
                    "largest": "max(asyncgrpo_sync_gap_max)",
                    "limit of the mean": "max(asyncgrpo_sync_gap_limit)",
                },
                decimals=7,
            ),
            Panel(
                "Generators in sync",
                "Beside those that Prometheus can scrape and those that the run is to have.",
                "Alive and not in sync for minutes: its log says what it waits for.",
                "suffix: generators",
                {
                    "in sync": "asyncgrpo_generators_in_sync",
                    "alive": "count(asyncgrpo_generator_info) or vector(0)",
                    "expected": "asyncgrpo_generators_expected",
                },
                decimals=0,
            ),
        ],
    },
)

REWARDS = Board(
    "asyncgrpo-rewards",
    "asyncgrpo: rewards",
    "What the reward function says, how long it takes, and how often it fails.",
    {
        "What it says": [
            REWARD,
            Panel(
                "Reward spread",
                "Standard deviation of the reward over the completions of a step.",
                "Near 0 there is nothing to learn from: look at samples.",
                "short",
                {"std": of_step("asyncgrpo_reward_std")},
                width=6,
                height=8,
            ),
            Panel(
                "Groups without signal",
                "Trained ones whose completions all had one reward, and those that were filtered for it, as a share.",
                "Near 1: the prompts are solved or too hard, or the reward is always the same.",
                "percentunit",
                {
                    "trained": ZERO_SIGNAL,
                    "filtered": 'sum(rate(asyncgrpo_groups_total{outcome="filtered_zero_signal"}[5m]))'
                    ' / (sum(rate(asyncgrpo_groups_total{outcome=~"trained|filtered_zero_signal"}[5m])) > 0)',
                },
                width=6,
                height=8,
                top=1,
            ),
            Panel(
                "Parts of the reward",
                "Mean of each reward of a list, before its weight, and of each named number of a function; empty without.",
                "One that rises while the right answers do not: the model games it; lower its weight in reward.weights.",
                "short",
                {"{{part}}": "max by (part) (asyncgrpo_reward_part_mean)"},
                width=12,
            ),
            Panel(
                "Spread of the parts",
                "Standard deviation of each part over the completions of a step.",
                "A part near 0 teaches nothing any more; one far above the others decides what is learnt.",
                "short",
                {"{{part}}": "max by (part) (asyncgrpo_reward_part_std)"},
                width=12,
            ),
            Panel(
                "Reward by source",
                "Mean reward of the completions of each data_source, in the last step that had it; at most 16.",
                "One that stays behind: give it a larger share in data.weights, or easier prompts.",
                "short",
                {"{{source}}": "max by (source) (asyncgrpo_source_reward_mean)"},
                width=6,
            ),
            Panel(
                "Success by source",
                "Share of the completions of each data_source with a reward of at least reward.success.",
                "It stays at 0 while the reward rises: the reward pays for something else than right answers.",
                "percentunit",
                {"{{source}}": "max by (source) (asyncgrpo_source_success_ratio)"},
                width=6,
                top=1,
            ),
            Panel(
                "Groups without signal by source",
                "Trained groups of each data_source whose completions all had one reward, as a share.",
                "Near 1: that source is solved or too hard; give it a smaller share in data.weights.",
                "percentunit",
                {"{{source}}": "max by (source) (asyncgrpo_source_zero_signal_ratio)"},
                width=6,
                top=1,
            ),
            Panel(
                "Length by source",
                "Mean sampled tokens of a completion of each data_source.",
                "One that grows to sampling.max_tokens: its answers are cut; raise the limit, or give the length a price.",
                "short",
                {"{{source}}": "max by (source) (asyncgrpo_source_completion_length_mean)"},
                width=6,
            ),
            Panel(
                "Prompts by what was right",
                "With data.curriculum, at the start of the epoch: prompts of whose completions all, some or none were right.",
                "Nearly all solved: the prompts are used up. Nearly all hopeless: begin with easier ones; docs/sources.md.",
                "suffix: prompts",
                {"{{kind}}": "max by (kind) (asyncgrpo_curriculum_prompts)"},
                width=6,
                decimals=0,
            ),
            Panel(
                "How often they come",
                "With data.curriculum: places of these prompts in the epoch, as a share.",
                "Mixed ones have most; if they do not, there are too few of them to fill the epoch.",
                "percentunit",
                {
                    "{{kind}}": "max by (kind) (asyncgrpo_curriculum_places)"
                    " / scalar(sum(max by (kind) (asyncgrpo_curriculum_places)) > 0)"
                },
                width=6,
                top=1,
            ),
            Panel(
                "Held-out suites",
                "Of the last evaluation of each file of data.eval: mean reward, pass@k, maj@n.",
                "pass@k far above pass@1: the answers are there, and the policy is not sure of them yet; docs/evaluate.md.",
                "short",
                {"{{suite}} {{number}}": "max by (suite, number) (asyncgrpo_eval_suite)"},
                width=12,
            ),
        ],
        "How it works": [
            Panel(
                "Time to score a completion",
                "By quantile.",
                "Near reward.timeout_s: a slow or hanging reward; raise reward.workers or change the function.",
                "s",
                quantiles("asyncgrpo_reward_seconds", 0.5, 0.99),
            ),
            Panel(
                "Waiting for a score",
                "Of the completions in the generators, those that are sampled and not scored yet.",
                "Above one half the reward is the bottleneck: raise reward.workers, or make the function faster.",
                "percentunit",
                {"scoring": share("asyncgrpo_completion_seconds_total", 'activity="reward"')},
                top=1,
                thresholds=((0.5, "orange"),),
            ),
            Panel(
                "Waiting for a turn",
                "Of a completion, until a worker or a place at a service is free, by quantile.",
                "Above the time to score: raise reward.workers (or auto), or max_concurrent of the judge or of Sandbox Fusion.",
                "s",
                quantiles("asyncgrpo_reward_wait_seconds", 0.5, 0.99),
            ),
            Panel(
                "Reward workers",
                "Processes of all generators that score.",
                "Fewer than completions that wait, with cores idle: raise reward.workers.",
                "suffix: workers",
                {"workers": "sum(asyncgrpo_reward_workers)"},
                decimals=0,
            ),
            Panel(
                "Completions scored",
                "Per second.",
                "A fall to 0 while completions are sampled: every call hangs or fails.",
                "suffix: /s",
                {"scored": "sum(rate(asyncgrpo_reward_seconds_count[$__rate_interval]))"},
            ),
            Panel(
                "Completions without a score",
                "Per second, by what went wrong.",
                "The generator's log has the exception.",
                "suffix: /s",
                {"{{failure}}": "sum by (failure) (rate(asyncgrpo_reward_failures_total[$__rate_interval]))"},
                width=12,
            ),
            Panel(
                "Rewards paused",
                "Generators at which every reward call fails: they only probe, and get no lease until a probe works.",
                "Restore what the function needs, such as a judge that is down; the run goes on by itself.",
                "suffix: generators",
                {"paused": "sum(asyncgrpo_rewards_paused)"},
                width=12,
                decimals=0,
            ),
            Panel(
                "Time of a served teacher",
                "For one completion, by quantile; nothing without teacher.url.",
                "Near teacher.timeout_s: a larger server, or fewer requests at once (teacher.max_concurrent).",
                "s",
                quantiles("asyncgrpo_teacher_seconds", 0.5, 0.99),
                width=12,
            ),
            Panel(
                "Tokens scored by a served teacher",
                "Sampled tokens per second, by outcome.",
                "failed: the panel Completions without a score has the failure; docs/distillation.md.",
                "suffix: /s",
                {"{{outcome}}": "sum by (outcome) (rate(asyncgrpo_teacher_tokens_total[$__rate_interval]))"},
                width=12,
            ),
        ],
    },
)

RELIABILITY = Board(
    "asyncgrpo-reliability",
    "asyncgrpo: reliability",
    "Whether everything that should live does, what it waits for, and what grows.",
    {
        "At a glance": [
            number(
                "Since the last step",
                "Age of the last optimizer step.",
                "Past 10 minutes NoProgress fires: Waiting for names what hangs.",
                "s",
                {"step": "time() - max(asyncgrpo_last_step_timestamp_seconds)"},
                width=4,
                decimals=0,
                thresholds=((300, "yellow"), (600, "red")),
            ),
            number(
                "Since the last checkpoint",
                "Age of the newest checkpoint: what a crash now would lose.",
                "Past 2 hours: lower run.checkpoint_every, or look for a full disk.",
                "s",
                {"checkpoint": "time() - max(asyncgrpo_checkpoint_last_success_timestamp_seconds)"},
                width=4,
                decimals=0,
                thresholds=((3600, "yellow"), (7200, "red")),
            ),
            number(
                "Restarts",
                "Processes started again over the time shown.",
                "More than three of a role in half an hour: its log has the reason.",
                "short",
                {"{{actor}}": "sum by (actor) (increase(asyncgrpo_actor_restarts_total[$__range]))"},
                width=4,
                decimals=0,
                thresholds=((1, "yellow"), (20, "red")),
            ),
            number(
                "Restarts spent",
                "Share of the restarts of an hour that are spent; at 1 the next one ends the run. Of generators, the worst.",
                "Above one half: find out from their logs why processes end, before the run is given up.",
                "percentunit",
                {"{{of}}": "max by (of) (asyncgrpo_restarts_spent_ratio)"},
                width=4,
                decimals=0,
                thresholds=((0.5, "yellow"), (0.8, "red")),
            ),
            number(
                "Paused",
                "Whether the run was paused by its operator (1).",
                "`asyncgrpo resume` has it go on.",
                "short",
                {"paused": "max(asyncgrpo_paused)"},
                width=2,
                decimals=0,
                thresholds=((1, "yellow"),),
            ),
            number(
                "Free disk",
                "Room on the disk of the run folder.",
                "Below 5 GB make room: samples (run.keep_samples) and checkpoints (run.keep_checkpoints).",
                "bytes",
                {"free": "min(asyncgrpo_disk_free_bytes)"},
                width=3,
                thresholds=((-1e9, "red"), (5e9, "yellow"), (2e10, "green")),
            ),
            number(
                "The run's page",
                "Address of the run's web page; `asyncgrpo page RUN` opens it with its token.",
                "None: the run is over, or control.enabled is false.",
                "short",
                {"{{url}}": "max by (url) (asyncgrpo_page_info)"},
                width=3,
                is_named=True,
                link="${page}",
            ),
        ],
        "Processes": [
            Panel(
                "Scraped",
                "Processes that Prometheus reaches, by role, on every node.",
                "Fewer than there should be: TargetDown names the one; its file in logs/ has the reason.",
                "suffix: processes",
                {"{{role}}": 'sum by (role) (up{job="asyncgrpo",run=~"$run"})'},
                decimals=0,
            ),
            Panel(
                "Restarts",
                "Processes started again, over 5 minutes.",
                "Generators are replaced alone; learner and buffer go on together from the last checkpoint.",
                "suffix: restarts",
                {"{{actor}}": "sum by (actor) (increase(asyncgrpo_actor_restarts_total[5m]))"},
            ),
            Panel(
                "Waiting for",
                "What is being waited for right now, and for how long, by whichever process waits longest.",
                "A line that climbs names a hang; a wait ends by itself only at its deadline.",
                "s",
                {"{{what}}": "max by (what) (asyncgrpo_waiting_seconds)"},
            ),
        ],
        "What may grow": [
            Panel(
                "Memory",
                "Of each process, and of those that it started: engines, reward workers, Ray. Below the driver is the whole run "
                "as far as it is on its node.",
                "Growing without end: a leak; the kernel ends what takes too much.",
                "bytes",
                _of_processes("asyncgrpo_resident_bytes"),
                width=12,
            ),
            Panel(
                "Open files",
                "Descriptors of each process, and of those that it started.",
                "Growing with every restart: a leak; a process ends at its limit (ulimit -n).",
                "suffix: files",
                _of_processes("asyncgrpo_open_files"),
                width=6,
            ),
            Panel(
                "Processes",
                "That each process started and that live.",
                "More after every restart: something is left behind.",
                "suffix: processes",
                {"{{role}} {{rank}}": 'asyncgrpo_processes{of="below"}'},
                width=6,
            ),
        ],
        "Disk": [
            Panel(
                "Free disk",
                "Room on the disk of the run folder.",
                "One that falls for hours raises DiskFilling: look at samples and checkpoints.",
                "bytes",
                {"free": "min(asyncgrpo_disk_free_bytes)"},
                width=6,
            ),
            Panel(
                "Journal",
                "Bytes written per second.",
                "0 while groups are leased: it is blocked; nothing is acknowledged until the disk takes writes.",
                "Bps",
                {"written": "sum(rate(asyncgrpo_journal_bytes_total[$__rate_interval]))"},
                width=6,
            ),
            Panel(
                "Journal blocked",
                "1 while the journal cannot be written.",
                "Free some space: nothing is lost, and the run goes on by itself.",
                "short",
                {"blocked": "asyncgrpo_journal_blocked"},
                width=6,
                top=1,
            ),
            Panel(
                "Sync of the journal",
                "Time to put what was written on the disk, at most every half second.",
                "Above 0.1 s it holds up the buffer: take another disk.",
                "s",
                quantiles("asyncgrpo_journal_sync_seconds", 0.5, 0.99),
                width=6,
            ),
            Panel(
                "Checkpoint time",
                "Mean seconds to write one, over the time shown; 0 before the first.",
                "A large share of What the learner does: raise run.checkpoint_every.",
                "s",
                {
                    "mean": "(sum(increase(asyncgrpo_checkpoint_seconds_sum[$__range]))"
                    " / (sum(increase(asyncgrpo_checkpoint_seconds_count[$__range])) > 0)) or vector(0)"
                },
                width=8,
            ),
            Panel(
                "Refused messages",
                "Messages that could not be read or trusted, per second.",
                "Any: another version of asyncgrpo, a process that had been given up, or a peer that is not ours.",
                "suffix: /s",
                {"{{reason}}": "sum by (reason) (rate(asyncgrpo_rejected_frames_total[$__rate_interval]))"},
            ),
            Panel(
                "Versions",
                "Processes by version of asyncgrpo.",
                "More than one line: a mixed cluster; install one version everywhere.",
                "suffix: processes",
                {"{{version}}": "count by (version) (asyncgrpo_build_info)"},
                decimals=0,
            ),
        ],
    },
)

RATIO = Board(
    "asyncgrpo-ratio",
    "asyncgrpo: ratio tuning",
    "How many GPUs on each side: balance, who waits, what the bound costs, and what advice would gain.",
    {
        "At a glance": [
            number(
                "Generator GPUs per learner GPU",
                "As the run is, and as the work of both sides asks for (an hour). Processes count where there are no GPUs.",
                "Hint above actual: more generators if places are filled, else it is too high. Below: fewer, or more ranks.",
                "short",
                {
                    "actual": "asyncgrpo:generator_gpus_per_learner_gpu:actual",
                    "hint": "asyncgrpo:generator_gpus_per_learner_gpu:hint",
                },
                width=5,
                decimals=2,
            ),
            USEFUL,
            LEARNER_WAITS,
            SATURATED,
            number(
                "Places filled",
                "Of the groups that the generators may work on, the share that they have (10 minutes).",
                "Low while every slot is held: the bound holds them; raise buffer.max_lag.",
                "percentunit",
                {"filled": "asyncgrpo:places_filled:share10m"},
                decimals=0,
            ),
            number(
                "Slots held",
                "Share of the buffer's slots that groups hold (10 minutes).",
                "Near 1 with free places: the bound is too tight. Low: generators are the slower side.",
                "percentunit",
                {"held": "asyncgrpo:slots_held:share10m"},
                decimals=0,
            ),
            number(
                "Trained at the bound",
                "Share of the trained groups whose lag was at the bound in force.",
                "Much of it says that the bound holds generators back.",
                "percentunit",
                {"at the bound": AT_BOUND},
                width=4,
                decimals=0,
            ),
        ],
        "Balance": [
            Panel(
                "Generator GPUs per learner GPU",
                "As the run is, and as the work of both sides asks for, over an hour.",
                "Move one GPU where the lines are far apart and places are filled, then look at the learner's wait again.",
                "short",
                {
                    "actual": "asyncgrpo:generator_gpus_per_learner_gpu:actual",
                    "hint": "asyncgrpo:generator_gpus_per_learner_gpu:hint",
                },
            ),
            Panel(
                "GPUs at work",
                "Devices of each side times the share of their time at work, over an hour.",
                "Far below the devices there are: that side waits for the other.",
                "suffix: GPUs",
                {
                    "generators": "asyncgrpo:generator_gpus_busy:rate1h",
                    "learner": "asyncgrpo:learner_gpus_busy:rate1h",
                    "{{role}} has": "sum by (role) (asyncgrpo_devices)",
                },
            ),
            Panel(
                "What advice would gain",
                "Share by which steps would be shorter if the advice on a bottleneck were followed. `asyncgrpo status` has the "
                "sentence.",
                "Follow the highest line, then look again: the next bottleneck is another one.",
                "percentunit",
                {"{{bottleneck}}": "max by (bottleneck) (asyncgrpo_advice_gain_ratio)"},
            ),
        ],
        "Who waits": [
            WHAT_THE_LEARNER_DOES,
            WHAT_GENERATORS_DO,
            Panel(
                "Saturation and waiting",
                "Share of the engines' places that are filled, share of the completions that wait for a score, and share of the "
                "learner's time spent waiting.",
                "Learner waits and engines full: more generators. Learner waits and engines empty: the bound or the rewards.",
                "percentunit",
                {
                    "saturation": SATURATION,
                    "waiting for a score": share("asyncgrpo_completion_seconds_total", 'activity="reward"'),
                    "learner waits": share(LEARNER, 'activity="wait_data"'),
                },
                top=1,
            ),
            LAG,
            Panel(
                "Tokens per second",
                "Sampled against trained.",
                "What is sampled and never trained was dropped: see Rollouts and buffer.",
                "suffix: tok/s",
                {
                    "sampled": "sum(rate(asyncgrpo_tokens_generated_total[$__rate_interval]))",
                    "trained": "sum(rate(asyncgrpo_tokens_trained_total[$__rate_interval]))",
                },
            ),
            Panel(
                "Waste by cause",
                "Share of the sampled tokens over 5 minutes that no step has used.",
                "stale: the bound is too tight for so many generators. Waste counts as work of the generators in the hint.",
                "percentunit",
                {"{{fate}}": "max by (fate) (asyncgrpo:tokens_wasted:share5m)"},
            ),
        ],
    },
)

BOARDS = [OVERVIEW, ROLLOUTS, LEARNER_BOARD, WEIGHTS, REWARDS, RELIABILITY, RATIO]
