"""Diagnostics of a step, as sums and counts over its tokens.

Each function returns named scalars over the tokens of a mask. `merge` adds them over micro-batches and ranks (names that end
in `_max` or `_min` take the extreme). Only merged sums are divided, so a report does not depend on the split of a step. All
functions take the mask before rejection, because rejected tokens must be visible. A new diagnostic is one more function here.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, Level, at_level, sequence_of_token, trained_sum

Sums = dict[str, Tensor]
"""Scalar float64 tensors by name, on the device of the tokens."""


def merge(parts: Iterable[Sums]) -> Sums:
    """Merge the sums of micro-batches or ranks: add, or take the extreme for names that end in `_max` or `_min`."""
    merged: Sums = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith("_max"):
                merged[name] = torch.maximum(merged[name], value)
            elif name.endswith("_min"):
                merged[name] = torch.minimum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def report(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged sums.

    Covers the reports of `ratio_sums`, `update_sums`, `lag_sums` and `share_sums`, which must be there, and the shares of every
    `kept_sums` and `outside_sums`. Other sums are left to the caller.
    """
    found = ratio_report(sums) | update_report(sums) | lag_report(sums) | share_report(sums)
    for name in [key.removesuffix("_sequences") for key in sums if key.endswith("_sequences")]:
        if name not in ("rho", "lag"):
            found |= shares(name, sums)
    return found


@torch.no_grad()
def mean_sums(mask: Tensor, **values: Tensor) -> Sums:
    """Return `tokens` (the count of the mask) and the sum of each named [T] tensor, bool or float."""
    return {"tokens": _count(mask)} | {name: _total(value, mask) for name, value in values.items()}


@torch.no_grad()
def gap_sums(policy_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Sums:
    """Sum |log π - log μ|, nats, over tokens that the learner's own weights sampled: the mismatch of engine and learner.

    Names: `gap` the sum, `gap_tokens` the count, `gap_max` the largest (0 without tokens).
    """
    gap = torch.where(mask, policy_logprobs.to(torch.float64) - behaviour_logprobs.to(torch.float64), 0.0).abs()
    return {"gap": gap.sum(), "gap_tokens": _count(mask), "gap_max": _largest(gap, mask, 0.0)}


@torch.no_grad()
def ratio_sums(log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Sums:
    """Sum the terms of `ratio_report` for ρ = π_num/μ, named `rho_...`. log ρ is cut to ±20 in exp only.

    Args:
        log_rho: [T] log π_num - log μ of the sampled tokens, nats.
        mask: [T] bool, True on trained tokens, before rejection.
        cu_seqlens: [S+1] start of each sequence. Sequences without trained tokens are ignored.
    """
    x = log_rho.to(torch.float64)
    rho = _ratio(x)
    present = trained_sum(mask, mask, cu_seqlens) > 0
    rho_of_sequence = _ratio(trained_sum(x, mask, cu_seqlens))
    return {
        "rho_tokens": _count(mask),
        "rho_sequences": _count(present),
        "rho_log": _total(x, mask),
        # The linear term is exact, and dominates for a large -x.
        "rho_k3": _total(torch.expm1(x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - x, mask),
        "rho_sum": _total(rho, mask),
        "rho_squares": _total(rho.square(), mask),
        "rho_max": _largest(rho, mask, 0.0),
        "rho_min": -_largest(-rho, mask, -torch.inf),
        "rho_sequence_sum": _total(rho_of_sequence, present),
        "rho_sequence_squares": _total(rho_of_sequence.square(), present),
    }


def ratio_report(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged `ratio_sums`. With x = log ρ on trained tokens and X its sum over a sequence:

        kl_k1, kl_k3              mean(-x), mean(e^x - 1 - x)    KL(μ ‖ num), the second never negative
        ratio_mean, _min, _max    of e^x
        ess_token, _sequence      (Σw)² / (n Σw²) of w = e^x, e^X, not truncated; a falling sequence-level share
                                  precedes a collapse (VCPO)

    Without tokens the report is that of agreement: ratios and sample shares 1, the rest 0.
    """
    tokens, sequences = sums["rho_tokens"], sums["rho_sequences"]
    if not tokens:
        ones = dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max", "ess_token", "ess_sequence"), 1.0)
        return {"kl_k1": 0.0, "kl_k3": 0.0} | ones
    return {
        "kl_k1": -sums["rho_log"] / tokens,
        "kl_k3": sums["rho_k3"] / tokens,
        "ratio_mean": sums["rho_sum"] / tokens,
        "ratio_min": sums["rho_min"],
        "ratio_max": sums["rho_max"],
        "ess_token": effective_sample_share(sums["rho_sum"], sums["rho_squares"], tokens),
        "ess_sequence": effective_sample_share(sums["rho_sequence_sum"], sums["rho_sequence_squares"], sequences),
    }


@torch.no_grad()
def outside_sums(
    name: str,
    log_rho: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: Level,
    low_ratio: float | None = None,
    high_ratio: float | None = None,
) -> Sums:
    """Count tokens outside the bounds of a correction (truncated, masked, rejected or vetoed), by side.

    Names, prefixed with `name_`: `tokens` and `sequences` with trained tokens; `below` and `above`: tokens with ρ at its
    level outside the bound; `sequences_below`, `sequences_above`: sequences with such a token.
    """
    rho = at_level(log_rho.to(torch.float64), mask, cu_seqlens, level=level).exp()
    nowhere = torch.zeros_like(mask)
    below = mask & (rho < low_ratio) if low_ratio is not None else nowhere
    above = mask & (rho > high_ratio) if high_ratio is not None else nowhere
    sums = {
        "tokens": _count(mask),
        "sequences": _with_any(mask, cu_seqlens),
        "below": _count(below),
        "above": _count(above),
        "sequences_below": _with_any(below, cu_seqlens),
        "sequences_above": _with_any(above, cu_seqlens),
    }
    return {f"{name}_{key}": value for key, value in sums.items()}


@torch.no_grad()
def kept_sums(name: str, keep: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Sums:
    """Count rejections: `{name}_tokens` and `{name}_sequences` before, `_dropped` and `_sequences_dropped`.

    A sequence is dropped if none of its trained tokens is kept.
    """
    tokens, sequences = _count(mask), _with_any(mask, cu_seqlens)
    kept = keep & mask
    return {
        f"{name}_tokens": tokens,
        f"{name}_sequences": sequences,
        f"{name}_dropped": tokens - _count(kept),
        f"{name}_sequences_dropped": sequences - _with_any(kept, cu_seqlens),
    }


def shares(name: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged `outside_sums` or `kept_sums` of that name: each count as a share of tokens or sequences."""
    totals = (f"{name}_tokens", f"{name}_sequences")
    counts = [key for key in sums if key.startswith(f"{name}_") and key not in totals]
    return {key: sums[key] / max(sums[totals[key.startswith(f"{name}_sequences_")]], 1.0) for key in counts}


@torch.no_grad()
def update_sums(
    log_ratio: Tensor, advantages: Tensor, clipped: Tensor, mask: Tensor, *, dual_ratio: float | None = None
) -> Sums:
    """Sum the terms of `update_report` for the ratio r = policy / anchor that a surrogate clips, named `update_...`.

    `update_max`, `update_min` of r; clipped tokens: `update_high` with A > 0, `update_low` with A < 0, `update_dual` with
    A < 0 beyond the dual clip.

    Args:
        clipped: [T] bool of the surrogate.
        dual_ratio: of `ppo_clip`, if used.
    """
    ratio = _ratio(log_ratio)
    clipped = clipped & mask
    is_bad = clipped & (advantages < 0)
    beyond = is_bad & (ratio > dual_ratio) if dual_ratio is not None else torch.zeros_like(mask)
    return {
        "update_tokens": _count(mask),
        "update_max": _largest(ratio, mask, 0.0),
        "update_min": -_largest(-ratio, mask, -torch.inf),
        "update_high": _count(clipped & (advantages > 0)),
        "update_low": _count(is_bad & ~beyond),
        "update_dual": _count(beyond),
    }


def update_report(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged `update_sums`: `update_ratio_min`, `update_ratio_max` (1 if no token was run), and as shares of tokens
    `update_clipped_high`, `update_clipped_low`, `update_clipped_dual`."""
    tokens = max(sums["update_tokens"], 1.0)
    return {
        "update_ratio_min": sums["update_min"] if sums["update_max"] else 1.0,
        "update_ratio_max": sums["update_max"] or 1.0,
        "update_clipped_high": sums["update_high"] / tokens,
        "update_clipped_low": sums["update_low"] / tokens,
        "update_clipped_dual": sums["update_dual"] / tokens,
    }


@torch.no_grad()
def lag_sums(token_versions: Tensor, version: int | Tensor, mask: Tensor, cu_seqlens: Tensor) -> Sums:
    """Sum the lag of the weights that sampled each token, in optimizer steps, named `lag_...`.

    `lag_sum` over tokens, `lag_max`; `lag_mixed`, the number of sequences with several versions.
    """
    lag = (version - token_versions).to(torch.float64)
    oldest, newest = _largest_of_each(lag, mask, cu_seqlens), -_largest_of_each(-lag, mask, cu_seqlens)
    present = oldest >= newest
    return {
        "lag_tokens": _count(mask),
        "lag_sequences": _count(present),
        "lag_sum": _total(lag, mask),
        "lag_max": _largest(lag, mask, 0.0),
        "lag_mixed": _count(present & (oldest > newest)),
    }


def lag_report(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged `lag_sums`: `lag_mean` over tokens, `lag_max`, `lag_mixed_share` over sequences. 0 without tokens."""
    tokens, sequences = max(sums["lag_tokens"], 1.0), max(sums["lag_sequences"], 1.0)
    return {
        "lag_mean": sums["lag_sum"] / tokens,
        "lag_max": sums["lag_max"],
        "lag_mixed_share": sums["lag_mixed"] / sequences,
    }


LAGS = (0, 1, 2, 4, 8, 16, 32)
"""Largest lag of each class of completions in `share_sums`. Older completions are one more class."""


@torch.no_grad()
def share_sums(
    log_rho: Tensor, token_versions: Tensor, version: int | Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Sums:
    """Sum ρ by the lag of a completion, which is that of its oldest trained token.

    Names: `share_tokens_i`, `share_sum_i`, `share_squares_i` for class i of `LAGS`, log ρ cut to ±20.
    """
    oldest = _largest_of_each((version - token_versions).to(torch.float64), mask, cu_seqlens)
    of_sequence = torch.stack([oldest > largest for largest in LAGS]).sum(0)  # no copy of the bounds to a GPU
    lag_class = of_sequence[sequence_of_token(cu_seqlens, mask.numel())]
    rho = _ratio(log_rho)
    sums: Sums = {}
    for i in range(len(LAGS) + 1):
        of_class = mask & (lag_class == i)
        sums |= {
            f"share_tokens_{i}": _count(of_class),
            f"share_sum_{i}": _total(rho, of_class),
            f"share_squares_{i}": _total(rho.square(), of_class),
        }
    return sums


def share_report(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide merged `share_sums`: the effective sample share of each class with completions, `ess_lag_0` to `ess_lag_32` by
    its largest lag, `ess_lag_more` beyond."""
    names = [*map(str, LAGS), "more"]
    found = {name: [sums[f"share_{of}_{i}"] for of in ("sum", "squares", "tokens")] for i, name in enumerate(names)}
    return {f"ess_lag_{name}": effective_sample_share(*one) for name, one in found.items() if one[2]}


def shares_within(sums: Mapping[str, float]) -> dict[int, float]:
    """Return the effective sample share of completions up to each lag, from merged `share_sums` and `lag_sums`.

    The largest lag is that of the oldest token, so its share is that of the step. Empty without tokens.
    """
    total, squares, tokens, found = 0.0, 0.0, 0.0, {}
    for i, lag in enumerate([*LAGS, math.inf]):
        if sums[f"share_tokens_{i}"]:
            total, squares = total + sums[f"share_sum_{i}"], squares + sums[f"share_squares_{i}"]
            tokens += sums[f"share_tokens_{i}"]
            found[int(min(lag, sums["lag_max"]))] = effective_sample_share(total, squares, tokens)
    return found


def effective_sample_share(weight_sum: float, weight_squares: float, count: float) -> float:
    """Return `(Σρ)² / (n Σρ²)`: 1 if all weights are equal, 1/n if one dominates; 1 without weights.

    Source: VCPO, arXiv:2602.17616, where a fall of it predicts a collapse.
    """
    return weight_sum**2 / (count * weight_squares) if count and weight_squares else 1.0


def _ratio(x: Tensor) -> Tensor:
    return x.to(torch.float64).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.to(torch.float64), 0.0).sum()


def _count(mask: Tensor) -> Tensor:
    return mask.sum().to(torch.float64)


def _largest_of_each(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [S] the largest masked value of each sequence; -inf without any."""
    lowest = values.new_full((cu_seqlens.numel() - 1,), -torch.inf)
    sequence = sequence_of_token(cu_seqlens, values.numel())
    return lowest.scatter_reduce(0, sequence, torch.where(mask, values, -torch.inf), "amax")


def _largest(values: Tensor, mask: Tensor, of_none: float) -> Tensor:
    """Return the largest masked value, or `of_none` without any; `of_none` must not exceed a value."""
    return torch.cat([torch.where(mask, values, of_none), values.new_full((1,), of_none)]).max()


def _with_any(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the number of sequences with a masked token."""
    return _count(trained_sum(mask, mask, cu_seqlens) > 0)
