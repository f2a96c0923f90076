"""What happens to a reward before it becomes an advantage: length, KL to the reference, truncation.

A missing reward (NaN) stays missing through all of it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import sum_by_sequence

TruncationRule = Literal["keep", "mask", "zero"]


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """What a long completion loses; add it to the reward.

        0 up to max_length - buffer tokens, then linear to -factor at max_length, and -factor beyond

    Args:
        lengths: [S] tokens of each completion, with those that it read between its turns.
        max_length: tokens at which the penalty is full.
        buffer: tokens over which it grows, 1 to max_length.
        factor: the full penalty, in units of reward.
    Returns:
        [S] float64 in [-factor, 0].
    Source:
        DAPO, arXiv:2503.14476.
    """
    assert 0 < buffer <= max_length and factor >= 0, (buffer, max_length, factor)
    over = lengths.to(torch.float64) - (max_length - buffer)
    return -factor * (over / buffer).clamp(0.0, 1.0)


@torch.no_grad()
def reward_with_kl(rewards: Tensor, kl_per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, *, coef: float) -> Tensor:
    """R - coef Σ kl over the trained tokens of each completion: the KL to the reference as part of the reward.

    Args:
        rewards: [S] one reward per completion.
        kl_per_token: [T] an estimate at each token, nats. k1 is the right one here, wrong as it is in a loss.
        mask: [T] bool, true on trained tokens; what others hold, even NaN, does not count.
        cu_seqlens: [S+1] where each sequence starts.
        coef: reward per nat.
    Returns:
        [S] float64.
    Source:
        arXiv:1909.08593; in an outcome reward as in RLOO, arXiv:2402.14740.
    """
    kl = sum_by_sequence(torch.where(mask, kl_per_token.to(torch.float64), 0.0), cu_seqlens)
    return rewards.to(torch.float64) - coef * kl


class Truncation(NamedTuple):
    """What truncated completions count for."""

    rewards: Tensor
    """[S] float64."""
    is_trained: Tensor
    """[S] bool: the completion's tokens are trained."""


@torch.no_grad()
def apply_truncation(rewards: Tensor, is_truncated: Tensor, *, rule: TruncationRule) -> Truncation:
    """Completions that reached the length limit before they ended.

        keep    their reward as it is
        mask    their reward counts in the group's statistics, but their tokens are not trained
        zero    their reward becomes 0; a missing one stays missing

    Args:
        rewards: [S] one reward per completion, NaN where it has none.
        is_truncated: [S] bool.
    Source:
        mask: the overlong filtering of DAPO, arXiv:2503.14476. zero: AReaL.
    """
    assert rule in ("keep", "mask", "zero"), rule
    rewards = rewards.to(torch.float64)
    if rule == "zero":
        rewards = rewards.masked_fill(is_truncated & ~rewards.isnan(), 0.0)
    return Truncation(rewards, ~is_truncated if rule == "mask" else torch.ones_like(is_truncated))
