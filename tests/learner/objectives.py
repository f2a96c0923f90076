"""The algorithms that the learner's gradient is checked for, and answers with every edge to check it on."""

import numpy as np

from asyncgrpo.types import Group, Observation, PolicyVersion, VersionSpan
from tests.learner.helpers import OLDER, VERSION, changed, make_group

OLDEST = PolicyVersion(VERSION.lineage, VERSION.number - 3)
VOCAB = 61
MAX_TOKENS = 16

ON_RATIOS = {"anchor": "behaviour", "corrections": ()}
"""Where the surrogate itself sees the ratio to the behaviour policy."""
KL = {"kl_coef": 0.3}
PAIRWISE = {"loss": "pairwise", "loss_args": {"beta": 0.5}, "corrections": ()}


def corrected(*corrections: dict, **others) -> dict:
    return {"loss": "reinforce", "corrections": corrections} | others


CASES: dict[str, dict] = {
    # losses
    "ppo_clip": ON_RATIOS,
    "ppo_clip, dual": ON_RATIOS | {"loss_args": {"clip_low": 0.1, "clip_high": 0.1, "dual_ratio": 1.3}},
    "gspo": ON_RATIOS
    | {"loss": "gspo", "loss_args": {"clip_low": 0.1, "clip_high": 0.1}, "aggregation": "seq-mean-token-mean"},
    "cispo": ON_RATIOS | {"loss": "cispo", "loss_args": {"clip_low": 0.2, "clip_high": 0.2}},
    "dppo_tv": ON_RATIOS | {"loss": "dppo_tv", "loss_args": {"low_prob": 0.01, "high_prob": 0.01}},
    "dppo_kl": ON_RATIOS | {"loss": "dppo_kl", "loss_args": {"low_nats": 0.001, "high_nats": 0.001}},
    "sapo": ON_RATIOS | {"loss": "sapo"},
    "gmpo": ON_RATIOS | {"loss": "gmpo", "loss_args": {"clip_low_nats": 0.2, "clip_high_nats": 0.2}},
    "vespo": ON_RATIOS | {"loss": "vespo"},
    "dro": ON_RATIOS | {"loss": "dro", "loss_args": {"beta": 0.5}},
    "topr": ON_RATIOS | {"loss": "topr"},
    "reinforce": ON_RATIOS | {"loss": "reinforce"},
    # anchors
    "anchor proximal": {},
    "anchor interpolated": {"anchor": "interpolated", "corrections": ({"high_ratio": 1.1},)},
    "anchor interpolated, sequences": {"anchor": "interpolated", "loss": "gspo", "loss_args": {"clip_low": 0.05}},
    # corrections
    "truncate": corrected({"high_ratio": 1.1}),
    "clip": corrected({"action": "clip", "low_ratio": 0.9, "high_ratio": 1.1}),
    "mask": corrected({"action": "mask", "low_ratio": 0.8, "high_ratio": 1.2}),
    "reject": corrected({"action": "reject", "low_ratio": 0.8, "high_ratio": 1.2}),
    "truncate sequences": corrected({"level": "sequence", "high_ratio": 1.1}),
    "mask sequences": corrected({"level": "sequence", "action": "mask", "low_ratio": 0.5, "high_ratio": 1.5}),
    "reject by mean": corrected({"level": "geometric", "action": "reject", "low_ratio": 0.9, "high_ratio": 1.1}),
    "veto": corrected({"kind": "veto", "low_ratio": 0.5}),
    "opsm": corrected({"kind": "opsm", "max_nats": 0.05}),
    "m2po": corrected({"kind": "m2po", "max_mean_square": 0.04}),
    "m2po on ratios": corrected({"kind": "m2po", "max_mean_square": 0.04}, anchor="behaviour", loss="ppo_clip"),
    "divergence": corrected({"kind": "divergence", "estimator": "k2", "max_nats": 0.05}),
    "divergence of sequences": corrected({"kind": "divergence", "level": "sequence", "max_nats": 0.04}),
    "several": corrected(
        {"high_ratio": 1.1}, {"kind": "veto", "low_ratio": 0.5}, {"kind": "m2po", "max_mean_square": 0.1}
    ),
    # aggregations
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"aggregation": "seq-mean-token-sum-norm"},
    "prompt-mean": {"aggregation": "prompt-mean"},
    "prompt-mean, masked": {"aggregation": "prompt-mean", "truncated": "mask"},
    # penalties
    **{
        f"kl {kind}": KL | {"kl_kind": kind}
        for kind in ("abs", "k2", "k3", "low_var_kl", "k1+", "abs+", "k3+", "low_var_kl+", "k3_reweighted")
    },
    "kl full": KL | {"kl_kind": "full"},
    "kl full, seq-mean-token-mean": KL | {"kl_kind": "full", "aggregation": "seq-mean-token-mean", "entropy_coef": 0.1},
    "kl k1 in the reward": KL | {"kl_kind": "k1", "kl_in": "reward"},
    "kl k3 in the reward, rloo": KL | {"kl_kind": "k3", "kl_in": "reward", "advantage": "rloo"},
    "entropy": {"entropy_coef": 0.2},
    "entropy and kl": KL | {"entropy_coef": 0.2, "truncated": "mask"},
    "kl to the behaviour policy": ON_RATIOS | {"behaviour_kl_coef": 0.5, "loss": "dppo_tv"},
    "kl to the behaviour policy, anchor proximal": {"behaviour_kl_coef": 0.5},
    # advantages
    **{f"advantage {name}": {"advantage": name} for name in ("dr_grpo", "lite", "opo", "reinforce_plus_plus_baseline")},
    # what looks at the whole step
    "pairwise": PAIRWISE,
    "pairwise, all, per token": PAIRWISE | {"loss_args": {"beta": 2.0, "pairs": "all", "length_normalised": True}},
    "pairwise, reference": PAIRWISE | {"loss_args": {"beta": 0.5, "reference": True}},
    "pairwise, corrected": PAIRWISE
    | {"corrections": ({"high_ratio": 1.1}, {"action": "reject", "low_ratio": 0.8, "high_ratio": 1.2})},
    "pairwise, penalties": PAIRWISE | KL | {"entropy_coef": 0.2},
    "gae": {"advantage": "gae"},
    "gae, kl in the reward": {"advantage": "gae", "kl_kind": "k1", "kl_in": "reward", "critic": {"value_clip": None}}
    | KL,
    "gae, masked": {"advantage": "gae", "truncated": "mask", "aggregation": "seq-mean-token-mean"},
}
"""Name to `algorithm` section."""

STEP_WIDE = (
    "m2po", "several", "pairwise, all, per token", "pairwise, reference", "pairwise, penalties", "prompt-mean, masked",
    "seq-mean-token-mean", "gspo", "kl k3 in the reward, rloo", "kl full, seq-mean-token-mean", "gae, kl in the reward",
    "entropy and kl",
)  # fmt: skip
"""Those in which a token's gradient depends on tokens that may lie elsewhere, one or two of a kind."""


def groups(logprobs=None) -> list[Group]:
    """Six prompts: an empty completion, one-token completions, a constant group, a failure, a singleton, cut completions,
    observations before, between and behind the tokens of one, and several versions, in one completion too.

    Args:
        logprobs: function of the ids of a prompt and a completion; behaviour log-probs are around them.
    """
    rng = np.random.default_rng(4)
    lengths = [(9, 1, 4, 6), (3, 0, 7), (2, 5), (4, 1, 8), (3,), (6, 2, 12)]
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.2, 0.9, 0.4), (0.1, 0.1), (1.0, None, 0.0), (0.5,), (0.0, 1.0, 0.3)]
    made = []
    for number, (sizes, given) in enumerate(zip(lengths, rewards, strict=True)):
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 9)).tolist())
        completions = [rng.integers(0, VOCAB, n).tolist() for n in sizes]
        noise = [rng.normal(0, 0.2, n) + (rng.random(n) < 0.1) * rng.choice([-0.9, 0.9]) for n in sizes]
        version = (VERSION, OLDER, OLDEST)[number % 3]
        made.append(make_group(number, given, completions, prompt=prompt, logprobs=noise, version=version))
    made[0] = changed(
        made[0], 0, spans=(VersionSpan(OLDEST, 0, 3), VersionSpan(OLDER, 3, 5), VersionSpan(VERSION, 5, 9))
    )
    made[1] = changed(made[1], 2, finish_reason="length")
    made[5] = changed(made[5], 2, finish_reason="length")
    said = (Observation(at, np.arange(at + 1, 3 * at + 3, dtype=np.int32)) for at in (0, 3, 8))
    made[3] = changed(made[3], 2, observations=tuple(said))
    for group in made:
        for completion in (rollout.completion for rollout in group.rollouts if len(rollout.completion.token_ids)):
            exact = logprobs(group.prompt.token_ids, completion) if logprobs else -4.0
            np.minimum(exact + completion.logprobs, -1e-3, out=completion.logprobs)
    return made
