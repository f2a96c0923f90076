"""What every formula here shares: sums over the sequences of a packed batch, and the floating point they are computed in.

A log-prob in bfloat16 has three significant digits, and a log-ratio is a small difference of two of them: so everything
is upcast before the first subtraction.

Packed: the tokens of all sequences one after the other, [T], and `cu_seqlens` [S+1], where each begins; the last entry
is T. A sequence may be empty. Nothing here waits for the device.
"""

import torch
from torch import Tensor

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
