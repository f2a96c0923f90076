"""Our scheduler beside other systems' on one profile: the same lengths, each at the split that is best for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncgrpo.planner.model import predict
from asyncgrpo.planner.peers import PEERS, Gpus, best_split, lengths_of
from asyncgrpo.planner.plan import splits
from asyncgrpo.planner.profile import Profile
from asyncgrpo.planner.simulate import simulate

TRIED = 2
"""Splits of ours that are simulated: the best by the closed form."""
OURS = {"asyncgrpo": "wait", "drop": "drop"}
"""Our policies by the names that `simulate` has for them."""


def compare(profile: Profile, gpus: int, policies: Sequence[str], max_lag: int | None = None) -> list[dict[str, Any]]:
    """A row for each policy: its best split, seconds of a step, mean lag, trained tokens a second, and times the slowest."""
    lengths = lengths_of(profile)
    rows: list[dict[str, Any]] = []
    for policy in policies:
        if policy in OURS:
            split, step_s, lag, tokens_per_s = _ours(profile, gpus, OURS[policy], max_lag)
        else:
            split, outcome = best_split(profile, PEERS[policy], gpus, lengths)
            step_s, lag = outcome.step_s, outcome.lag_mean
            tokens_per_s = profile.prompts_per_step * profile.group_size * profile.lengths.mean / step_s
        shared = "shared" if policy == "synchronous" else f"{split.generators}:{split.ranks}"
        rows.append(
            {"policy": policy, "gpus": gpus, "s/step": step_s, "lag": lag, "tokens/s": tokens_per_s, "split": shared}
        )
    slowest = max(row["s/step"] for row in rows)
    return [row | {"times": slowest / row["s/step"], "split": row["split"]} for row in rows]


def _ours(profile: Profile, gpus: int, policy: str, max_lag: int | None) -> tuple[Gpus, float, float, float]:
    ranked = sorted(splits(profile, gpus, max_lag), key=lambda split: predict(profile, split).step_s)[:TRIED]
    found = [(split, simulate(profile, replace(split, policy=policy))) for split in ranked]
    split, best = min(found, key=lambda one: one[1].step_s)
    return Gpus(split.generators, split.ranks), best.step_s, best.lag_mean, best.tokens_per_s
