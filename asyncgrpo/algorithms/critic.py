"""What a learned critic needs: advantages and returns of every token, and the loss that trains the values.

Off the critic's path nothing here is used. Everything is on packed tokens, in float64 and without gradient; what a
position outside the mask holds, even NaN, changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import standardised
from asyncgrpo.algorithms.aggregation import sequence_of_token


class GaeResult(NamedTuple):
    """Both [T] float64, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor
    """Advantage + value, before any whitening: what the critic learns."""


class ValueLoss(NamedTuple):
    """The critic's loss at every token. Nothing here has a gradient."""

    value: Tensor
    """[T] float64, the loss itself, for reports."""
    loss_gradient: Tensor
    """[T] float64, its derivative by the new value v. The loss to differentiate is `Σ w_t loss_gradient_t v_t`."""
    clipped: Tensor
    """[T] bool: the clip took this token's gradient away."""


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float | Tensor
) -> GaeResult:
    """Generalised advantage estimation over the trained tokens of each sequence.

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next        return_t = A_t + V_t

    "next" is the next trained token of the same sequence; after the last one both are 0. So observation tokens (mask
    false) are passed over without a discount, and a reward on one of them is not seen: put the outcome's reward on the
    last trained token.

    Args:
        rewards: [T] reward of each token.
        values: [T] the critic's value before each token.
        mask: [T] bool, true on trained tokens.
        cu_seqlens: [S+1] where each sequence starts.
        gamma: discount per trained token.
        lam: one for all, or [S] one for each sequence, as from `length_adaptive_lambda`.
    Source:
        arXiv:1506.02438; observation tokens as in verl.
    """
    sequence = sequence_of_token(cu_seqlens, values.numel())
    values = torch.where(mask, values.to(torch.float64), 0.0)
    continues = torch.cat([sequence[1:] == sequence[:-1], mask.new_zeros(min(1, mask.numel()))]).to(torch.float64)
    decay = gamma * (lam.to(torch.float64)[sequence] if isinstance(lam, Tensor) else torch.full_like(values, lam))

    # A token outside the mask hands on what comes after it. Value of the next trained token, here or later:
    upcoming = _scan_back(continues.masked_fill(mask, 0.0), values)
    next_values = continues * upcoming.roll(-1)
    delta = torch.where(mask, rewards.to(torch.float64) + gamma * next_values - values, 0.0)
    advantages = _scan_back(continues * torch.where(mask, decay, 1.0), delta)
    advantages = torch.where(mask, advantages, 0.0)
    return GaeResult(advantages, advantages + values)


def _scan_back(factors: Tensor, terms: Tensor) -> Tensor:
    """x with x_t = terms_t + factors_t x_(t+1), in log2(T) steps of whole tensors instead of T of single numbers.

    After the step of reach k, `terms_t` holds what tokens t to t+2k-1 contribute to x_t, and `factors_t` what x_(t+2k)
    is worth. A factor of 0 ends a sequence, so sequences need no padding and never meet.
    """
    factors, terms = factors.clone(), terms.clone()
    reach = 1
    while reach < terms.numel():
        terms[:-reach] = terms[:-reach] + factors[:-reach] * terms[reach:]
        factors[:-reach] = factors[:-reach] * factors[reach:]
        reach *= 2
    return terms


def whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the mask, N - 1 in the denominator.

    Args:
        values: [T] any float.
        mask: [T] bool.
    Returns:
        [T] float64; 0 outside the mask, and everywhere if the mask has fewer than two tokens.
    """
    return torch.where(mask, standardised(values, mask, eps=eps), 0.0)


@torch.no_grad()
def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> ValueLoss:
    """Squared error of the critic, pessimistic about values that moved far within a step.

        value         = 0.5 max((v - R)², (v_clip - R)²)        v_clip = v_old + clamp(v - v_old, -clip, +clip)
        loss_gradient = v - R, and 0 where the clipped branch is the larger: v_clip is constant there

    Args:
        values: [T] v, from the weights being trained. Its gradient is not used.
        returns: [T] R, from `gae`.
        old_values: [T] v_old, from the weights at the start of the step; unused without a clip.
        clip: how far v may move before it is held back, in units of reward; None: not at all.
    Source:
        PPO as in verl, whose clip is 0.5.
    """
    values, returns, old_values = (x.to(torch.float64) for x in (values, returns, old_values))
    error = values - returns
    if clip is None:
        return ValueLoss(0.5 * error.square(), error, torch.zeros_like(error, dtype=torch.bool))
    clipped_error = old_values + (values - old_values).clamp(-clip, clip) - returns
    # Inside the clip both branches are the same number up to rounding, so the distance decides, not the comparison alone.
    clipped = ((values - old_values).abs() > clip) & (clipped_error.abs() > error.abs())
    return ValueLoss(
        0.5 * torch.where(clipped, clipped_error, error).square(), error.masked_fill(clipped, 0.0), clipped
    )


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha length), and 0 where that is negative: [S] tokens to [S] float64 in [0, 1).

    Long completions look further: Σ lam^k is alpha length. It is for the policy's advantages;
    the critic's returns keep lam = 1.

    Source: VAPO, arXiv:2504.05118, alpha 0.05; the floor (completions under 1/alpha tokens, empty ones too) as in NeMo RL.
    """
    return (1 - 1 / (alpha * lengths.to(torch.float64))).clamp(min=0.0)
