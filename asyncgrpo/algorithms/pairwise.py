"""Pairwise losses: raise the probability of a better completion over that of a worse one of the same prompt.

`pairs` selects pairs from rewards. `pairwise` turns them into a detached coefficient of each token's `∇log π`. Without a
reference or length normalisation both log-probs of a pair may fall, so combine it with a KL penalty.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncgrpo.algorithms.advantages import Groups, has_signal
from asyncgrpo.algorithms.aggregation import sequence_of_token, sum_by_sequence

PairKind = Literal["best_worst", "random", "all"]


class PairwiseResult(NamedTuple):
    """The maximised objective, without gradient."""

    objective_gradient: Tensor
    """[T] float64 derivative of the sum over pairs by each token's log-prob; 0 outside the mask. The loss to
    differentiate is `-Σ objective_gradient_t log π(y_t) / number of pairs of the step`."""
    value: Tensor
    """[P] float64 objective of each pair, at most 0."""


@torch.no_grad()
def pairs(
    rewards: Tensor, group_ids: Tensor, *, kind: PairKind, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Select pairs of completions of one prompt with different rewards.

        best_worst    one per group: the best and the worst; ties take the first in the batch
        random        one per group, uniformly
        all           every pair

    A group with equal rewards, or with fewer than two, has no pair.

    Args:
        rewards: [S] one reward per completion, NaN if missing.
        group_ids: [S] integers, equal for completions of one prompt. Any order, any values.
        generator: for "random", on the device of the rewards; None: torch's default.
    Returns:
        Winners and losers, [P] int64 indices of completions each, in arbitrary order.
    """
    rewards = rewards.to(torch.float64)
    groups = Groups(group_ids)
    if kind == "best_worst":
        return _best_worst(rewards, groups)
    first, second = _ordered_pairs(groups)
    is_pair = rewards[first] > rewards[second]  # false for NaN
    winner, loser = first[is_pair], second[is_pair]
    if kind == "random":
        ticket = torch.randperm(winner.numel(), generator=generator, device=rewards.device)
        is_drawn = ticket == Groups(groups.number[winner]).min(ticket)
        winner, loser = winner[is_drawn], loser[is_drawn]
    return winner, loser


def _best_worst(rewards: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    position = torch.arange(rewards.numel(), device=rewards.device)
    missing = rewards.isnan()
    best, worst = rewards.masked_fill(missing, -torch.inf), rewards.masked_fill(missing, torch.inf)
    first_best = groups.min(torch.where(best == groups.max(best), position, rewards.numel()))
    first_worst = groups.min(torch.where(worst == groups.min(worst), position, rewards.numel()))
    is_winner = has_signal(rewards, groups) & (position == first_best)
    return position[is_winner], first_worst[is_winner]


def _ordered_pairs(groups: Groups) -> tuple[Tensor, Tensor]:
    """Return all ordered pairs within groups, with self-pairs. Memory grows with Σ size², not with S²."""
    position = torch.arange(groups.number.numel(), device=groups.number.device)
    by_group = torch.argsort(groups.number, stable=True)
    group_size = torch.bincount(groups.number)
    group_start = group_size.cumsum(0) - group_size
    partners = group_size[groups.number]
    first = torch.repeat_interleave(position, partners)
    nth_partner = torch.arange(first.numel(), device=first.device) - (partners.cumsum(0) - partners)[first]
    return first, by_group[group_start[groups.number[first]] + nth_partner]


@torch.no_grad()
def pairwise(
    policy_logprobs: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    winner: Tensor,
    loser: Tensor,
    *,
    beta: float,
    reference_logprobs: Tensor | None = None,
    length_normalised: bool = False,
) -> PairwiseResult:
    """Compute the logistic objective of each pair, and its derivative by the log-prob of each token.

        value = log sigmoid(beta z)        z = (LP_w - LP_l) - (LP_w - LP_l under the reference)
        d value / d LP_w = beta sigmoid(-beta z) = - d value / d LP_l

    LP is a completion's log-prob: the sum over its trained tokens, or their mean if `length_normalised` (0 without any). A
    completion in several pairs gets the sum of their derivatives.

    Args:
        policy_logprobs: [T] log π of the sampled tokens, nats. Its gradient is not used.
        cu_seqlens: [S+1] start of each packed sequence.
        mask: [T] bool, True on trained tokens. Values at other positions, even NaN, are ignored.
        winner, loser: [P] indices of sequences, as from `pairs`.
        beta: steepness, per nat.
        reference_logprobs: [T] log-probs under the frozen reference; None: z without the reference term.
    Source:
        DPO, arXiv:2305.18290; without a reference, the pairwise logistic loss.
    """
    relative = policy_logprobs.to(torch.float64)
    if reference_logprobs is not None:
        relative = relative - reference_logprobs.to(torch.float64)
    totals = sum_by_sequence(torch.where(mask, relative, 0.0), cu_seqlens)
    lengths = sum_by_sequence(mask.to(torch.float64), cu_seqlens).clamp(min=1.0)
    share = 1 / lengths if length_normalised else torch.ones_like(lengths)  # weight of a token in its completion's LP
    z = (totals * share)[winner] - (totals * share)[loser]
    of_pair = beta * torch.sigmoid(-beta * z)
    of_sequence = torch.zeros_like(totals).index_add(0, winner, of_pair).index_add(0, loser, -of_pair) * share
    gradient = torch.where(mask, of_sequence[sequence_of_token(cu_seqlens, mask.numel())], 0.0)
    return PairwiseResult(gradient, F.logsigmoid(beta * z))
