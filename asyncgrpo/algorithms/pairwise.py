"""Learning from pairs: raise the probability of a better completion over that of a worse one to the same prompt.

`pairs` chooses them from rewards, `pairwise` turns them into a detached factor of each token's `∇log π`. Without a reference or
length normalisation nothing stops both log-probs of a pair from falling, so use it with a KL penalty.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncgrpo.algorithms.advantages import Groups, has_signal
from asyncgrpo.algorithms.aggregation import sequence_of_token, sum_by_sequence

PairKind = Literal["best_worst", "random", "all"]


class Pairs(NamedTuple):
    """Indices of completions, int64, in no order that means anything."""

    winner: Tensor
    """[P] the completion with the higher reward."""
    loser: Tensor
    """[P] the other, of the same group."""


class PairwiseResult(NamedTuple):
    """The objective, to be maximised. Nothing here has a gradient."""

    objective_gradient: Tensor
    """[T] float64: derivative of the *sum* over pairs by each token's log-prob; 0 outside the mask. The loss to
    differentiate is `-Σ objective_gradient_t log π(y_t) / number of pairs of the step`."""
    value: Tensor
    """[P] float64: the objective of each pair, at most 0."""


@torch.no_grad()
def pairs(rewards: Tensor, group_ids: Tensor, *, kind: PairKind, generator: torch.Generator | None = None) -> Pairs:
    """Pairs of completions of one prompt with different rewards; never one without a reward.

        best_worst    one per group: the best and the worst; of several, the first in the batch
        random        one per group, each of its pairs being as likely
        all           every pair

    A group whose rewards are all equal, or with fewer than two, gives none.

    Args:
        rewards: [S] one reward per completion, NaN where it has none.
        group_ids: [S] integers; completions of one prompt have the same. Any order, any values.
        generator: what "random" draws from, on the device of the rewards; None is torch's own.
    """
    assert kind in ("best_worst", "random", "all"), kind
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
    return Pairs(winner, loser)


def _best_worst(rewards: Tensor, groups: Groups) -> Pairs:
    position = torch.arange(rewards.numel(), device=rewards.device)
    missing = rewards.isnan()
    best, worst = rewards.masked_fill(missing, -torch.inf), rewards.masked_fill(missing, torch.inf)
    first_best = groups.min(torch.where(best == groups.max(best), position, rewards.numel()))
    first_worst = groups.min(torch.where(worst == groups.min(worst), position, rewards.numel()))
    is_winner = has_signal(rewards, groups) & (position == first_best)
    return Pairs(position[is_winner], first_worst[is_winner])


def _ordered_pairs(groups: Groups) -> tuple[Tensor, Tensor]:
    """Every completion with every completion of its group, itself included: memory grows with Σ size², not with S²."""
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
    """The logistic objective of each pair, and its derivative by the log-prob of each token.

        value = log sigmoid(beta z)        z = (LP_w - LP_l) - (LP_w - LP_l under the reference)
        d value / d LP_w = beta sigmoid(-beta z) = - d value / d LP_l

    LP is a completion's log-prob: the sum over its trained tokens, or their mean if `length_normalised` (0 for a completion
    without any). A completion in several pairs gets the sum of what they give it.

    Args:
        policy_logprobs: [T] log π of the sampled tokens, nats. Its gradient is not used.
        cu_seqlens: [S+1] where each packed sequence starts.
        mask: [T] bool, true on trained tokens; what others hold, even NaN, does not count.
        winner, loser: [P] indices of sequences, as from `pairs`.
        beta: steepness, per nat.
        reference_logprobs: [T] the same under the frozen reference; None leaves that half of z out.
    Source:
        DPO, arXiv:2305.18290; without a reference, the pairwise logistic loss.
    """
    relative = policy_logprobs.to(torch.float64)
    if reference_logprobs is not None:
        relative = relative - reference_logprobs.to(torch.float64)
    totals = sum_by_sequence(torch.where(mask, relative, 0.0), cu_seqlens)
    lengths = sum_by_sequence(mask.to(torch.float64), cu_seqlens).clamp(min=1.0)
    share = 1 / lengths if length_normalised else torch.ones_like(lengths)  # of a completion's LP that each token is
    z = (totals * share)[winner] - (totals * share)[loser]
    of_pair = beta * torch.sigmoid(-beta * z)
    of_sequence = torch.zeros_like(totals).index_add(0, winner, of_pair).index_add(0, loser, -of_pair) * share
    gradient = torch.where(mask, of_sequence[sequence_of_token(cu_seqlens, mask.numel())], 0.0)
    return PairwiseResult(gradient, F.logsigmoid(beta * z))
