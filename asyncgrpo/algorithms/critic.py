"""Formulas of a learned critic: advantages and returns of every token, and the value loss.

All functions take packed tokens and return float64 without gradient. Values outside the mask, even NaN, are ignored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import standardised
from asyncgrpo.algorithms.aggregation import sequence_of_token


class GaeResult(NamedTuple):
    """Advantages and returns, [T] float64, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor
    """Advantage + value before whitening, the target of the critic."""


class ValueLoss(NamedTuple):
    """The critic's loss at every token, without gradient."""

    value: Tensor
    """[T] float64 loss, for reports."""
    loss_gradient: Tensor
    """[T] float64 derivative by the new value v. The loss to differentiate is `Σ w_t loss_gradient_t v_t`."""


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float) -> GaeResult:
    """Generalised advantage estimation over the trained tokens of each sequence.

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next        return_t = A_t + V_t

    "next" is the next trained token of the same sequence; after the last one both are 0. Observation tokens (mask False) are
    skipped without discount, and rewards on them are ignored. Place the outcome's reward on the last trained token.

    Args:
        rewards: [T] reward of each token.
        values: [T] the critic's value before each token.
        mask: [T] bool, True on trained tokens.
        cu_seqlens: [S+1] start of each sequence.
        gamma: discount per trained token.
        lam: decay of the advantages per trained token.
    Source:
        arXiv:1506.02438; observation tokens as in verl.
    """
    sequence = sequence_of_token(cu_seqlens, values.numel())
    values = torch.where(mask, values.to(torch.float64), 0.0)
    continues = torch.cat([sequence[1:] == sequence[:-1], mask.new_zeros(min(1, mask.numel()))]).to(torch.float64)

    # Value of the next trained token at or after each position; positions outside the mask pass it on.
    upcoming = _scan_back(continues.masked_fill(mask, 0.0), values)
    next_values = continues * upcoming.roll(-1)
    delta = torch.where(mask, rewards.to(torch.float64) + gamma * next_values - values, 0.0)
    advantages = _scan_back(continues * torch.where(mask, torch.full_like(values, gamma * lam), 1.0), delta)
    advantages = torch.where(mask, advantages, 0.0)
    return GaeResult(advantages, advantages + values)


def _scan_back(factors: Tensor, terms: Tensor) -> Tensor:
    """Solve x_t = terms_t + factors_t x_(t+1) in log2(T) vectorized steps.

    After the step of reach k, `terms_t` is the contribution of tokens t to t+2k-1 to x_t, and `factors_t` the factor of
    x_(t+2k). A factor of 0 ends a sequence, so sequences need no padding.
    """
    factors, terms = factors.clone(), terms.clone()
    reach = 1
    while reach < terms.numel():
        terms[:-reach] = terms[:-reach] + factors[:-reach] * terms[reach:]
        factors[:-reach] = factors[:-reach] * factors[reach:]
        reach *= 2
    return terms


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8) over the mask, with N - 1 in the denominator.

    Args:
        values: [T] any float.
        mask: [T] bool.
    Returns:
        [T] float64; 0 outside the mask, and everywhere if the mask has fewer than two tokens.
    """
    return torch.where(mask, standardised(values, mask), 0.0)


@torch.no_grad()
def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> ValueLoss:
    """Squared error of the critic, pessimistic for values that moved far within a step.

        value         = 0.5 max((v - R)², (v_clip - R)²)        v_clip = v_old + clamp(v - v_old, -clip, +clip)
        loss_gradient = v - R, and 0 where the clipped branch is the larger: v_clip is constant there

    Args:
        values: [T] v, from the weights being trained. Its gradient is not used.
        returns: [T] R, from `gae`.
        old_values: [T] v_old, from the weights at the start of the step; unused without a clip.
        clip: distance of v from v_old beyond which it is clipped, in units of reward; None: no clip.
    Source:
        PPO as in verl, whose clip is 0.5.
    """
    values, returns, old_values = (x.to(torch.float64) for x in (values, returns, old_values))
    error = values - returns
    if clip is None:
        return ValueLoss(0.5 * error.square(), error)
    clipped_error = old_values + (values - old_values).clamp(-clip, clip) - returns
    # Inside the clip both branches are equal up to rounding, so the distance is tested too.
    clipped = ((values - old_values).abs() > clip) & (clipped_error.abs() > error.abs())
    return ValueLoss(0.5 * torch.where(clipped, clipped_error, error).square(), error.masked_fill(clipped, 0.0))
