"""Policy surrogates, each as the detached coefficient that it puts before the gradient of a token's log-prob.

The gradient of every surrogate with respect to the policy is `c_t A_t ∇log π(y_t)`, and only `c` differs from paper to
paper. So a surrogate is a function of the log-ratio and the advantage that returns `c`; it cannot forget to stop a
gradient. Everything is elementwise: what a masked position holds, even NaN, stays at that position.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to ±20 (as in verl), where exp is still far from float32's end."""


class Surrogate(NamedTuple):
    """A surrogate at every token. Nothing here has a gradient."""

    coefficient: Tensor
    """[T] `c_t`. The loss to differentiate is `-Σ w_t c_t A_t log π(y_t)`."""
    value: Tensor
    """[T] the objective as the paper writes it, to be maximised; for reports."""
    clipped: Tensor
    """[T] bool: the clip took this token's gradient away."""


@torch.no_grad()
def ppo_clip(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """PPO's pessimistic clip with two bounds.

        value = min(r A, clip(r, 1 - low, 1 + high) A)        r = exp(log_ratio)
        c     = r where the unclipped branch is the smaller or equal one, else 0

    Args:
        log_ratio: [T] log π_θ - log π_anchor of the sampled tokens, nats. The anchor is the proximal or
            the behaviour policy.
        advantages: [T] advantage of each token's answer.
        low, high: how far r may leave 1 before a token stops pulling it further.
    Source:
        PPO: arXiv:1707.06347. Asymmetric bounds: DAPO, arXiv:2503.14476.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    unclipped = ratio * advantages
    pessimistic = ratio.clamp(1 - low, 1 + high) * advantages
    clipped = pessimistic < unclipped
    is_constant = clipped | (bounded != log_ratio)
    return Surrogate(ratio.masked_fill(is_constant, 0.0), torch.minimum(unclipped, pessimistic), clipped)
