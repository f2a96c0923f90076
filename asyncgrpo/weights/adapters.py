"""Merges a low-rank adapter into its base weight, bitwise identical for any sharding of the rows.

The product of the two adapter matrices is exact in float64 before it is rounded. So it does not depend on a library's order
of summation, or on threads, instructions or device.
"""

import torch
from torch import Tensor

_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # elements merged at once: on a CPU they fit in a core's cache
_EXACT = 53  # bits of a float64: integers up to 2^53 are exact


@torch.no_grad()
def merge(base: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute base + up @ down, added in float32 and rounded once.

    First, a power of two moves from each row of `down` to `up`, so that rows of `down` have size about 1. Then `up` and
    `down` are rounded to 22 to 26 bits relative to the largest value of a row of `up` and of a column of `down`, about the
    precision of float32. Their product is then exact until it is rounded to float32.

    Args:
        base: [out, in], any floating dtype.
        up: [out, rank] float32, with the adapter's scale multiplied in.
        down: [rank, in] float32.
        dtype: dtype of the result.
    Returns:
        [out, in] on the device of `up`; bitwise identical on every device.
    """
    rank = down.shape[0]
    bits = (_EXACT - (rank - 1).bit_length()) // 2
    size = _power_of_two(down.double(), dim=1)
    up, down = _on_grid(up * size.T, bits, dim=1), _on_grid(down / size, bits, dim=0)
    merged = torch.empty(base.shape, dtype=dtype, device=up.device)
    rows = max(1, _CHUNK[up.device.type] // base.shape[1])
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        merged[part] = (up[part] @ down).float().add_(base[part].to(up.device, torch.float32))
    return merged


def _on_grid(matrix: Tensor, bits: int, *, dim: int) -> Tensor:
    """Round to at most 2^bits multiples of a power of two, with one power per line along `dim`.

    For each element of the result, the products of two such numbers are multiples of one power of two, and a sum of
    `rank` products stays below 2^53 multiples. So every partial sum is exact.
    """
    step = _power_of_two(matrix, dim=dim) * 2.0**-bits
    return (matrix / step).round_().mul_(step)


def _power_of_two(matrix: Tensor, *, dim: int) -> Tensor:
    """Return the smallest power of two above all absolute values of a line along `dim`, float64; 1 for zeros."""
    exponent = torch.frexp(matrix.abs().amax(dim, keepdim=True)).exponent.long()
    return ((exponent + 1023) << 52).view(torch.float64)  # built from bits, because `pow` may be inexact
