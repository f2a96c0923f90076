"""The digest of a tensor: 64 bits, the sum of the digests of its boxes for any partition of the tensor into boxes.

    digest = sum over rows r and columns c of  bits(r, c) R(r) C(c)   modulo 2^64

`bits` are the element's bits as an integer; R and C are odd numbers that a hash draws for each row and column. The last
dimension is the columns, all others are the rows. So a process that holds some boxes computes their digests in place.

A change of one element is always detected, because its factor is odd. Several changes are missed if they cancel under the
pseudorandom factors: with probability about 2^-64; 2^-49 if only signs of 16-bit numbers change and 2^-33 if only signs of
32-bit numbers do, because their bits are then multiples of 2^15 and 2^31. The digest does not protect against an adversary.
"""

from itertools import product

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_MASK = 2**64 - 1
_AT_ONCE = 2**17
"""Elements widened to 8 bytes at once: they fit in a core's cache."""
_AT_ONCE_ON_DEVICE = 2**24
_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def box_digest(values: Tensor, tensor: str, shape: tuple[int, ...], start: tuple[int, ...]) -> int:
    """Return the digest of a box of a tensor.

    Args:
        values: elements of the box, of any strides and dtype, on a CPU or a GPU.
        tensor, shape: name and shape of the whole tensor.
        start: indices of the first element of the box in the tensor.
    """
    if values.ndim < 2:
        values, shape, start = values.reshape(1, -1), (1, *(shape or (1,))), (0, *(start or (0,)))
    seed, total = xxhash.xxh3_64_intdigest(tensor.encode()), 0
    columns = _factors(seed ^ _MASK, start[-1], values.shape[-1])
    for index in product(*map(range, values.shape[:-2])):
        row = 0
        for length, first, at in zip(shape, start, (*index, 0), strict=False):
            row = row * length + first + at
        rows = _factors(seed, row, values.shape[-2])
        total += _of_matrix(values[index].detach(), rows, columns)
    return total & _MASK


def _factors(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return `count` odd numbers for the indices from `first` on (splitmix64: Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _of_matrix(values: Tensor, rows: NDArray[np.uint64], columns: NDArray[np.uint64]) -> int:
    if values.device.type != "cpu":
        return _on_device(values, rows, columns)
    size, total = values.element_size(), 0
    step = max(1, _AT_ONCE // len(columns))
    for first in range(0, len(rows), step):
        bits = values[first : first + step].contiguous().view(_PATTERN[size])
        wide = bits.numpy().view(f"u{size}").astype(np.uint64)
        total += int(np.dot(rows[first : first + step], wide @ columns))
    return total


def _on_device(values: Tensor, rows: NDArray[np.uint64], columns: NDArray[np.uint64]) -> int:
    """Compute the digest by elementwise products, because GPUs lack an integer matrix product. Synchronizes once."""
    size = values.element_size()
    step = max(1, _AT_ONCE_ON_DEVICE // len(columns))
    of_columns, of_rows = (torch.from_numpy(each.view(np.int64)).to(values.device) for each in (columns, rows))
    total = of_rows.new_zeros(())
    for first in range(0, len(rows), step):
        bits = values[first : first + step].contiguous().view(_PATTERN[size]).to(torch.int64)
        bits = bits & (2 ** (8 * size) - 1) if size < 8 else bits
        total += ((bits * of_columns).sum(1) * of_rows[first : first + step]).sum()
    return int(total.item())
