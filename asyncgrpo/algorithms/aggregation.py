"""How the losses of tokens become the loss of a step: a weight for every token, from counts of the whole step.

The denominators are arguments. They count the whole step, over all micro-batches and ranks, before any rejection: so
the weighted sums of any split add up to the same loss (a mean of means would not), and dropping tokens does not make
the gradients of the others larger.
"""

from typing import Literal

import torch
from torch import Tensor

from asyncgrpo.algorithms.packed import sequence_of_token, trained_sum

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


@torch.no_grad()
def token_weights(
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    mode: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_length: int | None = None,
    tokens_in_group: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    """Weight of every token's loss in the loss of the step.

        token-mean                 w = mask / num_tokens                                     DAPO's default in verl, TRL
        seq-mean-token-sum         w = mask / num_sequences
        seq-mean-token-mean        w = mask / (trained tokens of the sequence * num_sequences)    GRPO, GSPO
        seq-mean-token-sum-norm    w = mask / (num_sequences * max_length)                   Dr. GRPO
        prompt-mean                w = mask / (trained tokens of the group * num_groups)     ScaleRL; DAPO as written

    The division is exact: no epsilon stands beside a count. A count of 0, where there is nothing to weigh, is taken
    as 1.

    Args:
        mask: [T] bool, true on tokens to train, before rejection.
        cu_seqlens: [S+1] where each packed sequence starts; None will do where all tokens weigh alike.
        num_tokens: trained tokens of the whole step.
        num_sequences: trained answers of the whole step; one without tokens counts.
        max_length: longest answer that may be sampled, tokens: a constant of the run, not of the batch.
        tokens_in_group: [S] trained tokens of the whole group to which each sequence belongs, over the whole step.
        num_groups: groups of the whole step.
    Returns:
        [T] float64, 0 where mask is false.
    Source:
        GRPO: arXiv:2402.03300. DAPO: arXiv:2503.14476. Dr. GRPO: arXiv:2503.20783. ScaleRL: arXiv:2510.13786.
    """
    trained = mask.to(torch.float64)
    if mode == "token-mean":
        return trained / max(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return trained / max(num_sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        assert max_length is not None, f"{mode} needs max_length"
        return trained / max(num_sequences * max_length, 1)
    assert cu_seqlens is not None, f"{mode} needs cu_seqlens"
    if mode == "seq-mean-token-mean":
        per_sequence = trained_sum(mask, mask, cu_seqlens) * num_sequences
    else:
        assert mode == "prompt-mean" and tokens_in_group is not None and num_groups is not None, mode
        per_sequence = tokens_in_group.to(torch.float64) * num_groups
    return trained / per_sequence.clamp(min=1)[sequence_of_token(cu_seqlens, mask.numel())]


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """`Σ w_t x_t`, [T] and [T] to []. What `values` holds where the weight is 0, even NaN, has no part in it."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()
