"""What a step reports about its tokens, as sums and counts.

Each function returns named scalars over the tokens of a mask. `merge` adds them over micro-batches and ranks (names
that end in `_max` take the larger), and only the merged sums are divided: so a report does not depend on how a step
was split. A new diagnostic is one more function here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0

Sums = dict[str, Tensor]
"""Name to a scalar float64 tensor, on the device of the tokens."""


def merge(parts: Iterable[Sums]) -> Sums:
    """Sums of several micro-batches or ranks as one: added, or the larger for names that end in `_max`."""
    merged: Sums = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


@torch.no_grad()
def mean_sums(mask: Tensor, **values: Tensor) -> Sums:
    """`tokens` (the count of the mask) and the sum over them of each named [T] tensor, bool or float."""
    return {"tokens": _count(mask)} | {name: _total(value, mask) for name, value in values.items()}


@torch.no_grad()
def importance_sums(log_rho: Tensor, mask: Tensor, *, cap: float) -> Sums:
    """Of the ratio ρ = proximal / behaviour policy, before truncation.

    Names: `importance` Σρ and `importance_squares` Σρ² (for the effective sample size), log ρ cut to ±20;
    `importance_capped` how many exceed `cap`.
    """
    rho = log_rho.to(torch.float64).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "importance": _total(rho, mask),
        "importance_squares": _total(rho.square(), mask),
        "importance_capped": _total(rho > cap, mask),
    }


@torch.no_grad()
def gap_sums(policy_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Sums:
    """Of |log π - log μ|, nats, on tokens that the learner's own weights sampled: what engine and learner disagree by.

    Names: `gap` the sum, `gap_tokens` the count, `gap_max` the largest (0 where there are none).
    """
    gap = torch.where(mask, (policy_logprobs - behaviour_logprobs).abs(), 0.0).to(torch.float64)
    return {"gap": gap.sum(), "gap_tokens": _count(mask), "gap_max": torch.cat([gap, gap.new_zeros(1)]).max()}


def effective_sample_share(weight_sum: float, weight_squares: float, count: float) -> float:
    """`(Σρ)² / (n Σρ²)`: 1 when all weights are equal, 1/n when one has everything; 1 of nothing.

    Source: VCPO, arXiv:2602.17616, uses its fall as the sign of a coming collapse.
    """
    return weight_sum**2 / (count * weight_squares) if count and weight_squares else 1.0


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.to(torch.float64), 0.0).sum()


def _count(mask: Tensor) -> Tensor:
    return mask.sum().to(torch.float64)
