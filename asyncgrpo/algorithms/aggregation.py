"""Aggregation of token losses to the loss of a step, and helpers of all formulas: sums by sequence, precision.

A log-prob in bfloat16 has three significant digits, and a log-ratio is a small difference of two of them. So everything is
upcast before the first subtraction.

Packed layout: the tokens of all sequences in order, [T], and `cu_seqlens` [S+1], the start of each; the last entry is T. A
sequence may be empty. No function synchronizes with the device.

The denominators are arguments. They count the full step, over all micro-batches and ranks, before rejection. So the weighted
sums of any split add up to the same loss (a mean of means would not), and rejected tokens do not enlarge the gradients of the
rest.
"""

from typing import Literal

import torch
from torch import Tensor

# -- floating point ----------------------------------------------------------------------------------------------------


MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to ±20 before exp, as in verl, far below the float32 overflow."""


def upcast(values: Tensor) -> Tensor:
    """Convert to float32, unless the values are float64."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


# -- sums by sequence --------------------------------------------------------------------------------------------------


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [T] int64 sequence numbers of the tokens, from 0. `num_tokens` is T, the last entry of `cu_seqlens`."""
    positions = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], positions, right=True)  # the first sequence that ends after the token


def sum_by_sequence(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum [T] values to [S], in their dtype; 0 for an empty sequence."""
    sums = values.new_zeros(cu_seqlens.numel() - 1)
    return sums.index_add(0, sequence_of_token(cu_seqlens, values.numel()), values)


def trained_sum(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum values over the trained tokens of each sequence to [S] float64.

    Float64, because a mean over 30 000 tokens is compared with bounds like 1 ± 0.001. Values at other positions, even NaN,
    are ignored.
    """
    return sum_by_sequence(torch.where(mask, values.to(torch.float64), 0.0), cu_seqlens)


Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def at_level(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor | None, *, level: Level) -> Tensor:
    """Return [T] log-ratio of each token, its sequence, or its sequence per trained token; 0 where the mask is False."""
    x = upcast(log_ratio)
    if level == "token":
        return torch.where(mask, x, 0.0)
    assert cu_seqlens is not None, f"level {level} needs cu_seqlens"
    total = trained_sum(x, mask, cu_seqlens)
    if level == "geometric":
        total = total / trained_sum(mask, mask, cu_seqlens).clamp(min=1)
    return torch.where(mask, total[sequence_of_token(cu_seqlens, x.numel())].to(x.dtype), 0.0)


# -- weights -----------------------------------------------------------------------------------------------------------


Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


@torch.no_grad()
def token_weights(
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_length: int | None = None,
    tokens_in_group: Tensor | None = None,
    num_groups: int | None = None,
) -> Tensor:
    """Return the weight of every token's loss in the loss of the step.

        token-mean                 w = mask / num_tokens                                     DAPO's default in verl, TRL
        seq-mean-token-sum         w = mask / num_sequences
        seq-mean-token-mean        w = mask / (trained tokens of the sequence * num_sequences)    GRPO, GSPO
        seq-mean-token-sum-norm    w = mask / (num_sequences * max_length)                   Dr. GRPO
        prompt-mean                w = mask / (trained tokens of the group * num_groups)     ScaleRL; DAPO as written

    The division is exact, without epsilon. A count of 0 is replaced by 1.

    Args:
        mask: [T] bool, True on tokens to train, before rejection.
        cu_seqlens: [S+1] start of each packed sequence.
        num_tokens: trained tokens of the full step.
        num_sequences: trained completions of the full step, including those without tokens.
        max_length: longest completion that may be sampled, tokens; a constant of the run.
        tokens_in_group: [S] trained tokens of each sequence's group in the full step.
        num_groups: groups of the full step.
    Returns:
        [T] float64, 0 where mask is False.
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
    if mode == "seq-mean-token-mean":
        per_sequence = trained_sum(mask, mask, cu_seqlens) * num_sequences
    else:
        assert mode == "prompt-mean" and tokens_in_group is not None and num_groups is not None, mode
        per_sequence = tokens_in_group.to(torch.float64) * num_groups
    return trained / per_sequence.clamp(min=1)[sequence_of_token(cu_seqlens, mask.numel())]


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return [] `Σ w_t x_t` of [T] tensors. Values of weight 0, even NaN, are ignored."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()
