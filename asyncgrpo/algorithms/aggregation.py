"""How the losses of tokens become the loss of a step, and what every formula here shares: sums by sequence, precision.

A log-prob in bfloat16 has three significant digits, and a log-ratio is a small difference of two of them: so everything
is upcast before the first subtraction.

Packed: the tokens of all sequences one after the other, [T], and `cu_seqlens` [S+1], where each begins; the last entry
is T. A sequence may be empty. Nothing here waits for the device.

The denominators are arguments. They count the whole step, over all micro-batches and ranks, before any rejection: so
the weighted sums of any split add up to the same loss (a mean of means would not), and dropping tokens does not make
the gradients of the others larger.
"""

from typing import Literal

import torch
from torch import Tensor

# -- what every formula here shares ------------------------------------------------------------------------------------


# -- floating point ----------------------------------------------------------------------------------------------------


MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to ±20 before exp (as in verl), where float32 is still far from its end."""


def upcast(values: Tensor) -> Tensor:
    """float64 as it is, everything else in float32."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


# -- sums by sequence --------------------------------------------------------------------------------------------------


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: the number of each token's sequence, from 0. `num_tokens` is T, the last entry of `cu_seqlens`."""
    positions = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], positions, right=True)  # the first sequence that ends after the token


def sum_by_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] to [S], in the dtype of `values`; 0 for an empty sequence."""
    sums = values.new_zeros(cu_seqlens.numel() - 1)
    return sums.index_add(0, sequence_of_token(cu_seqlens, values.numel()), values)


def trained_sum(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] float64: sum over those tokens of each sequence where `mask` is true.

    In float64, since a mean over 30 000 tokens is compared with bounds like 1 ± 0.001. What other positions hold, even
    NaN, has no part in it.
    """
    return sum_by_sequence(torch.where(mask, values.to(torch.float64), 0.0), cu_seqlens)


# -- a weight for every token ------------------------------------------------------------------------------------------


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
        num_sequences: trained completions of the whole step; one without tokens counts.
        max_length: longest completion that may be sampled, tokens: a constant of the run, not of the batch.
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
