"""Off-policy corrections: per-token weights for tokens that older weights (or another kernel) sampled.

A correction is a function of `log ρ`, the log-prob of a token under the policy that we correct to minus the log-prob
with which it was sampled. It returns a weight without gradient; weights of several corrections multiply. Elementwise.
"""

import torch
from torch import Tensor


@torch.no_grad()
def truncated_importance(log_rho: Tensor, *, cap: float) -> Tensor:
    """Per-token importance weight, truncated from above.

        weight = min(exp(log_rho), cap)

    A choice of low variance, not an unbiased correction: that would be the product over the whole answer.

    Args:
        log_rho: [T] log π_prox - log μ (behaviour policy) of the sampled tokens, nats.
        cap: largest weight.
    Returns:
        [T] weights in [0, cap]. +inf gives exactly `cap`, -inf exactly 0. NaN says nothing about a token and gives 0,
        so that what a masked position holds cannot leak.
    Source:
        Truncated importance sampling; the decoupled objective: arXiv:2110.00641, used asynchronously in
        arXiv:2505.24298.
    """
    return torch.where(log_rho.isnan(), 0.0, log_rho.exp().clamp(max=cap))
