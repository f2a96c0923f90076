"""How the losses of tokens become the loss of a step: a weight for every token, from counts of the whole step.

The denominators are arguments and count the whole step, over all micro-batches and ranks. So the weighted sums of any
split add up to the same loss; a mean of means would not.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum-norm"]


def token_weights(
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_length: int,
) -> Tensor:
    """Weight of every token's loss in the loss of the step.

        token-mean                 w = mask / num_tokens
        seq-mean-token-sum-norm    w = mask / (num_sequences * max_length)

    Args:
        mask: [T] bool, true on tokens to train.
        cu_seqlens: [S+1] where each packed sequence starts; the modes that average within a sequence need it.
        mode: see above. The first is DAPO's, the second Dr. GRPO's.
        num_tokens: trained tokens of the whole step.
        num_sequences: trained answers of the whole step; one without tokens counts.
        max_length: longest answer that may be sampled, tokens: a constant of the run, not of the batch.
    Returns:
        [T] float32, 0 where mask is false.
    Source:
        DAPO: arXiv:2503.14476. Dr. GRPO: arXiv:2503.20783.
    """
    del cu_seqlens  # both modes weigh all tokens alike
    denominators = {"token-mean": num_tokens, "seq-mean-token-sum-norm": num_sequences * max_length}
    return mask.to(torch.float32) / max(denominators[mode], 1)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """`Σ w_t x_t`, [T] and [T] to []. What `values` holds where the weight is 0, even NaN, has no part in it."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()
