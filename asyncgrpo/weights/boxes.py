"""The digest of a tensor: 64 bits, to which any boxes of the tensor add up, however it is cut.

    digest = sum over rows r and columns c of  bits(r, c) R(r) C(c)   modulo 2^64

`bits` are those of an element as a whole number, R and C odd numbers that a hash draws for each place. The columns are the last
dimension, the rows all others. So who holds some boxes computes their digests where they lie, without the rest.

What it finds: any change of one element for certain, since its factor is odd. Several changes go unseen if they cancel under
factors that nobody chose: about once in 2^64, in 2^49 where only signs of 16-bit numbers change, and in 2^33 where only signs
of 32-bit numbers do, since their bits are then multiples of 2^15 and 2^31. It is no protection against an adversary.
"""

from itertools import product

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_MASK = 2**64 - 1
_AT_ONCE = 2**17
"""Elements that are widened to 8 bytes at once: they stay in a core's cache."""
_AT_ONCE_ON_DEVICE = 2**24
_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def box_digest(values: Tensor, tensor: str, shape: tuple[int, ...], start: tuple[int, ...]) -> int:
    """The digest of a box of a tensor.

    Args:
        values: the elements of the box, of any strides and dtype, on a CPU or a GPU.
        tensor, shape: name and shape of the whole tensor.
        start: the place of the box in it.
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
    """An odd number for each place from `first` on (splitmix64: Steele, Lea and Flood 2014)."""
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
    """Compute it by elementwise products: a GPU has no product of matrices of whole numbers. It is waited for once."""
    size = values.element_size()
    step = max(1, _AT_ONCE_ON_DEVICE // len(columns))
    of_columns, of_rows = (torch.from_numpy(each.view(np.int64)).to(values.device) for each in (columns, rows))
    total = of_rows.new_zeros(())
    for first in range(0, len(rows), step):
        bits = values[first : first + step].contiguous().view(_PATTERN[size]).to(torch.int64)
        bits = bits & (2 ** (8 * size) - 1) if size < 8 else bits
        total += ((bits * of_columns).sum(1) * of_rows[first : first + step]).sum()
    return int(total.item())
