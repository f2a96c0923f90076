"""The digest of published weights: 64 bits that are the same on CPU and GPU, and add up over any parts.

    digest = sum over words of  row(r) * column(c) * fold(word)   modulo 2^64,   fold(w) = w ^ (w >>> 31)

The word at place p of the publication stands in row r = p // TILE_WORDS, column c = p % TILE_WORDS of a table. The
multipliers of rows and columns are odd and fixed: they are drawn by a splitmix64 generator (Steele, Lea and Flood 2014).

What it finds:

- for certain: any change within one word of 8 bytes, however many of its bits. `fold` and the product with an odd number
  can both be undone, so another word gives another term;
- otherwise all but about one in 2^(63 - t) of the changes, where t is the lowest bit in which any folded word differs.
  Words replaced by unrelated ones have t = 0. Flips of one bit a word, in however many words, have t <= 32, and so has a
  tensor of 1, 2, 4 or 8 bytes an element with all its signs flipped. A larger t needs words whose low bits each change
  just as the bit 31 places above does: zeros that become ones everywhere have t = 33, and the worst pair of words t = 63.

Without `fold` the top bit of any two words could be flipped unseen, since an odd number times 2^63 is 2^63. The shift is
no multiple of 8, so that equal changes of the elements of a word do not cancel. Zeros add nothing: the length is not
in the digest, and the layout that both sides agree on must fix it. An adversary can make two publications of one digest.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 8
"""Bytes of a word: lengths and starts are multiples of it."""
TILE_WORDS = 2**16
"""Words of a row: its multipliers and the scratch of a CPU stay in a core's cache."""
_ROWS_ON_DEVICE = 64
"""Rows of one step on a GPU: 32 MiB of words and as much scratch."""
_SHIFT = 31
_MASK = 2**64 - 1
_FIRST_ROW = 2**32
"""The rows' place in the sequence of multipliers, behind all columns."""


class _Rectangle(NamedTuple):
    """Consecutive words that fill columns `column` to `column + width` of `rows` rows from `row` on."""

    begin: int
    row: int
    rows: int
    column: int
    width: int


def digest(flat: Tensor, start: int = 0) -> int:
    """The digest of a part of a publication; those of all parts add up to that of the whole.

    Args:
        flat: [n] uint8, contiguous, n a multiple of 8.
        start: its place in the publication, bytes, a multiple of 8.

    Raises:
        ValueError: `start` or n is not a multiple of 8.
    """
    if start % WORD or len(flat) % WORD:
        raise ValueError(f"{len(flat)} bytes at {start} are no words of {WORD} bytes")
    rectangles = _rectangles(start // WORD, len(flat) // WORD)
    return (_on_cpu if flat.device.type == "cpu" else _on_device)(flat.view(torch.int64), rectangles) & _MASK


def add_digests(parts: Iterable[int]) -> str:
    """The digest of a publication from those of its parts, as 16 hex digits."""
    return f"{sum(parts) & _MASK:016x}"


def _rectangles(first: int, count: int) -> Iterator[_Rectangle]:
    """`count` words from place `first` on: the rest of a row, whole rows and the start of a row, as far as they exist."""
    begin = 0
    while begin < count:
        row, column = divmod(first + begin, TILE_WORDS)
        rows = (count - begin) // TILE_WORDS if column == 0 else 0
        width = TILE_WORDS if rows else min(TILE_WORDS - column, count - begin)
        yield _Rectangle(begin, row, rows or 1, column, width)
        begin += (rows or 1) * width


def _on_cpu(words: Tensor, rectangles: Iterable[_Rectangle]) -> int:
    """In NumPy, whose operations on 64-bit integers take about three quarters of the time of PyTorch's."""
    table, multipliers, total = words.numpy().view(np.uint64), _columns(), 0
    scratch, shift = np.empty_like(multipliers), np.uint64(_SHIFT)
    for begin, row, rows, column, width in rectangles:
        columns, folded = multipliers[column : column + width], scratch[:width]
        for index, multiplier in enumerate(_multipliers(_FIRST_ROW + row, rows).tolist()):
            part = table[begin + index * width :][:width]
            np.right_shift(part, shift, out=folded)
            np.bitwise_xor(folded, part, out=folded)
            np.multiply(folded, columns, out=folded)
            total += int(np.add.reduce(folded)) * multiplier
    return total


def _on_device(words: Tensor, rectangles: Iterable[_Rectangle]) -> int:
    """In PyTorch, many rows in one step; nothing is copied to the host but the sum."""
    multipliers, total = _columns_on(words.device), torch.zeros((), dtype=torch.int64, device=words.device)
    for begin, first, rows, column, width in rectangles:
        table = words[begin : begin + rows * width].view(rows, width)
        for index in range(0, rows, _ROWS_ON_DEVICE):
            part = table[index : index + _ROWS_ON_DEVICE]
            folded = (part >> _SHIFT).bitwise_and_(2 ** (64 - _SHIFT) - 1)  # a shift of int64 repeats the sign
            folded.bitwise_xor_(part).mul_(multipliers[column : column + width])
            row_multipliers = torch.from_numpy(_multipliers(_FIRST_ROW + first + index, len(part)).view(np.int64))
            total += (folded.sum(1) * row_multipliers.to(words.device)).sum()
    return int(total.item())


@lru_cache(maxsize=1)
def _columns() -> NDArray[np.uint64]:
    return _multipliers(0, TILE_WORDS)


@lru_cache(maxsize=8)
def _columns_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_columns().view(np.int64)).to(device)


def _multipliers(first: int, count: int) -> NDArray[np.uint64]:
    """[count] odd numbers: places `first` and on of one fixed sequence, splitmix64."""
    state = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
