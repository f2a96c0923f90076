"""Shaping of rewards before they become advantages: length penalty, KL to the reference, truncation.

A missing reward (NaN) stays missing.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import sum_by_sequence

TruncationRule = Literal["keep", "mask", "zero"]


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the length penalty of each completion, to be added to its reward.

        0 up to max_length - buffer tokens, then linear to -factor at max_length, and -factor beyond

    Args:
        lengths: [S] tokens of each completion, with the observations between its turns.
        max_length: tokens from which the full penalty applies.
        buffer: tokens over which the penalty grows, 1 to max_length.
        factor: full penalty, in units of reward.
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
    """Return R - coef Σ kl over the trained tokens of each completion: the KL as part of the reward.

    Args:
        rewards: [S] one reward per completion.
        kl_per_token: [T] estimate at each token, nats. k1 is unbiased here, unlike in a loss.
        mask: [T] bool, True on trained tokens. Values at other positions, even NaN, are ignored.
        cu_seqlens: [S+1] start of each sequence.
        coef: reward per nat.
    Returns:
        [S] float64.
    Source:
        arXiv:1909.08593; in an outcome reward as in RLOO, arXiv:2402.14740.
    """
    kl = sum_by_sequence(torch.where(mask, kl_per_token.to(torch.float64), 0.0), cu_seqlens)
    return rewards.to(torch.float64) - coef * kl


class Truncation(NamedTuple):
    """Rewards and training mask after truncation."""

    rewards: Tensor
    """[S] float64."""
    is_trained: Tensor
    """[S] bool, True if the completion's tokens are trained."""


@torch.no_grad()
def apply_truncation(rewards: Tensor, is_truncated: Tensor, *, rule: TruncationRule) -> Truncation:
    """Apply a rule to completions that reached the length limit.

        keep    reward unchanged
        mask    the reward counts in the group's statistics, but the tokens are not trained
        zero    the reward becomes 0; a missing one stays missing

    Args:
        rewards: [S] one reward per completion, NaN if missing.
        is_truncated: [S] bool.
    Source:
        mask: overlong filtering of DAPO, arXiv:2503.14476. zero: AReaL.
    """
    assert rule in ("keep", "mask", "zero"), rule
    rewards = rewards.to(torch.float64)
    if rule == "zero":
        rewards = rewards.masked_fill(is_truncated & ~rewards.isnan(), 0.0)
    return Truncation(rewards, ~is_truncated if rule == "mask" else torch.ones_like(is_truncated))
