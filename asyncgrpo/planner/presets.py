"""Assumed profiles, for planning before there is anything to measure. None of their figures was measured here."""

import math

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.profile import DEVIATIONS, DecodeCurve, LearnerTimes, Lengths, Profile


def lognormal(median: float, sigma: float, longest: float, correlation: float = 0.5) -> Lengths:
    """Log-normal lengths, cut at `longest`, half of whose variance is the prompt's."""
    tokens = tuple(min(longest, median * math.exp(sigma * float(deviation))) for deviation in DEVIATIONS)
    return Lengths(tokens=tokens, correlation=correlation)


PRESETS = {
    "7b-long-tail": Profile(
        source="preset 7b-long-tail",
        hardware="H100, assumed",
        model="7B, bfloat16",
        engine="sglang",
        prompts_per_step=128,
        group_size=16,
        groups_in_flight=12,
        generators=24,
        ranks=8,
        gpus_each=1,
        max_lag=4,
        prompt_tokens=300.0,
        lengths=lognormal(4000.0, 0.9, 27_000.0),
        # Memory-bound decode: 15 GB of weights at 3.35 TB/s, and its kernels; then the KV cache of 7,000 tokens x 56 KB each.
        decode=DecodeCurve(base_s=0.0075, per_completion_s=0.00012),
        # 6 x 7.6e9 flops a token, a third more for recomputing, at 40 % of 989 TFLOP/s.
        learner=LearnerTimes(base_s=2.0, rank_s_per_token=1.54e-4),
        publish_s=6.0,
        pause_s=2.0,
        reward_s=0.05,
        reward_workers=8,
        kv_completions=180,
    ),
}


def preset_profile(name: str) -> Profile:
    """Raises ConfigError, which lists the names."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: there is no such profile; expected {', '.join(PRESETS)}")
    return PRESETS[name]
