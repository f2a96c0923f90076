"""Digests of tensors, of 64 bits, and the threads that compute them.

The digest of a tensor is the sum of the digests of its boxes, for any partition of the tensor into boxes:

    digest = sum over rows r and words w of  bits(r, w) R(r) C(w)   modulo 2^64

The last dimension is the columns, all others are the rows. A word is an element of 4 bytes, or 4 bytes of smaller neighbours in
a row, or half of a larger element; `bits` are its bits as an integer. A hash of the tensor's name draws odd numbers: R(r) for
each row, and C(w) for each even word. C(w + 1) = (2^32 + 1) C(w), so that a CPU multiplies two words at once. A process that
holds some boxes computes their digests in place. A box that cuts a word counts the bits of its own elements.

A change of one element of at most 4 bytes is always detected, because its factor is odd times at most 2^24. Several changes are
missed if they cancel under the pseudorandom factors: with probability about 2^-64; in the worst case, where only signs of the
last elements of words change, 2^-32, because their bits are multiples of 2^31. Two words that share a factor cancel only if one
goes from all zeros to all ones or back. The digest does not protect against an adversary.

The digest of a publication is the sum of those of its tensors.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo.host import cores

# -- threads: copies and NumPy release the GIL while they work, so threads run in parallel -----------------------------

MOST = 16
CORES_EACH = 8
"""Cores per thread: a machine with GPUs has about so many per GPU, and its other processes work at the same time."""
SHARE_BYTES = 2**26
"""Bytes that a thread takes at once."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@cache
def num_threads() -> int:
    return max(1, min(MOST, cores() // CORES_EACH))


def spread(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """Apply `work` to every piece. Yield the results in the order of the pieces, and propagate exceptions.

    Closing the iterator waits for the pieces in progress.

    Args:
        pieces: consumed lazily, only a few ahead of the results.
    """
    if num_threads() == 1:
        yield from map(work, pieces)
        return
    under_way: deque[Future[Result]] = deque()
    try:
        for piece in pieces:
            if len(under_way) > num_threads():
                yield under_way.popleft().result()
            under_way.append(_pool().submit(work, piece))
        while under_way:
            yield under_way.popleft().result()
    finally:
        wait(under_way)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="weights-bytes")


# -- the digest of a tensor --------------------------------------------------------------------------------------------

_AT_ONCE = 2**15
"""Integers of 8 bytes that are multiplied at once: they fit in a core's cache."""
_AT_ONCE_ON_DEVICE = 2**24
_WORD = 4
"""Bytes of a word."""
_HALF = np.uint64(32)
"""Bits of a word, to shift by."""
_MASK = 2**64 - 1
_PATTERN = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}


def box_digest(values: Tensor, tensor: str, shape: tuple[int, ...], start: tuple[int, ...]) -> int:
    """Return the digest of a box of a tensor.

    Args:
        values: elements of the box, of any strides and dtype, on a CPU or a GPU.
        tensor, shape: name and shape of the whole tensor.
        start: indices of the first element of the box in the tensor.
    """
    if values.ndim < 2:
        values, shape, start = values.reshape(1, -1), (1, *(shape or (1,))), (0, *(start or (0,)))
    if not values.numel():
        return 0
    if values.ndim > 2 and values.shape[1:-1] == shape[1:-1]:  # its rows follow each other
        with suppress(RuntimeError):  # torch would copy them
            values, start = values.view(-1, values.shape[-1]), (start[0] * prod(shape[1:-1]), start[-1])
            shape = (prod(shape[:-1]), shape[-1])
    is_on_cpu = values.device.type == "cpu"
    numbers = np.arange if is_on_cpu else partial(torch.arange, device=values.device)
    seed, total = _seed(tensor), 0
    width, columns = _columns(~seed, values, start[-1], numbers, in_pairs=is_on_cpu)
    for index in itertools.product(*map(range, values.shape[:-2])):
        row = 0
        for length, first, at in zip(shape, start, (*index, 0), strict=False):
            row = row * length + first + at
        rows = _factors(seed, numbers(row, row + values.shape[-2]))
        total += (_on_cpu if is_on_cpu else _on_device)(values[index].detach(), width, rows, columns)
    return total & _MASK


def tensor_digest(values: Tensor, tensor: str) -> int:
    """Return the digest of a whole tensor of this name."""
    return box_digest(values, tensor, tuple(values.shape), (0,) * values.ndim)


def run_digest(values: Tensor, tensor: str, shape: tuple[int, ...], first: int) -> int:
    """Return the digest of consecutive elements of a contiguous tensor.

    Args:
        values: [n] elements.
        tensor, shape: name and shape of the whole tensor.
        first: index of the first element in the flattened tensor.
    """
    *leading, width = shape or (1,)
    total, at = 0, 0
    while at < len(values):
        row, column = divmod(first + at, width)
        left = len(values) - at
        count = min(width - column, left) if column or left < width else left - left % width
        box = values[at : at + count].view(-1, min(count, width))
        total += box_digest(box, tensor, (prod(leading), width), (row, column))
        at += count
    return total & _MASK


def box_digests(values: Tensor, tensors: Sequence[str], start: tuple[int, int]) -> list[int]:
    """Return the digests of boxes of several matrices, computed together, with few calls for many small boxes.

    Args:
        values: [n, rows, columns] elements of the boxes, of any strides.
        tensors: names of the n matrices.
        start: indices of the first element of each box in its matrix.
    """
    seeds = torch.tensor([[_seed(name)] for name in tensors], device=values.device)
    numbers = partial(torch.arange, device=values.device)
    width, columns = _columns(~seeds, values, start[1], numbers, in_pairs=False)
    rows = _factors(seeds, numbers(start[0], start[0] + values.shape[1]))
    at_once = _AT_ONCE if values.device.type == "cpu" else _AT_ONCE_ON_DEVICE
    totals, step = [], max(1, at_once // (rows.shape[1] * columns.shape[1]))
    for first in range(0, len(values), step):
        some = slice(first, first + step)
        part = values[some].detach().contiguous()
        bits = _bits(part.flatten(0, 1), width).to(torch.int64).view(*part.shape[:2], -1)
        totals.append(((bits * columns[some, None]).sum(2) * rows[some]).sum(1))
    return [total & _MASK for total in torch.cat(totals).tolist()]


def _seed(tensor: str) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(tensor.encode()), "big", signed=True)


def _columns(seed: Any, values: Tensor, first: int, numbers: Callable[..., Any], *, in_pairs: bool) -> tuple[int, Any]:
    """Return the bytes to read as one integer, and the factor of each: of two words, of words, else of elements.

    Args:
        values: a box.
        first: its first column.
        numbers: counts from one number to before another, in steps.
        in_pairs: read two words at once, if no box cuts them.
    """
    size = values.element_size()
    start, end, pair = first * size, (first + values.shape[-1]) * size, 2 * _WORD
    if in_pairs and start % pair == end % pair == 0:
        return pair, _factors(seed, numbers(start // pair, end // pair))
    width = _WORD if start % _WORD == end % _WORD == 0 else size
    place = numbers(start, end, width)
    word = place // _WORD
    return width, _factors(seed, word // 2) * (1 + word % 2 * 2**32) << (place % _WORD * 8)


def _factors(seed: Any, indices: Any) -> Any:
    """Return an odd number for each index modulo 2^64 (splitmix64: Steele, Lea and Flood 2014; its constants as signed).

    For a box on a GPU they are computed there: an upload would wait for the weights that are being uploaded.

    Args:
        seed: a number, or [n, 1] for a row of the result each.
        indices: int64, of NumPy or torch, as the result.
    """
    x = indices * -0x61C8864680B583EB + seed
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & (2**33 - 1))) | 1


def _on_cpu(values: Tensor, width: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> int:
    bits, step = _bits(values, width).numpy(), max(1, _AT_ONCE // len(columns))
    of_rows = np.empty(len(rows), np.int64)
    for first in range(0, len(rows), step):
        some = slice(first, first + step)
        if width > _WORD:
            two = bits[some].view(np.uint64)
            wide = (two + (two >> _HALF)).view(np.int64)
        else:
            wide = bits[some].astype(np.int64)
        np.einsum("rw,w->r", wide, columns, out=of_rows[some])  # for integers this is faster than a matrix product
    return int(np.dot(rows, of_rows))


def _on_device(values: Tensor, width: int, rows: Tensor, columns: Tensor) -> int:
    """Compute the digest by elementwise products, because GPUs lack an integer matrix product. Synchronizes once."""
    step = max(1, _AT_ONCE_ON_DEVICE // len(columns))
    total = rows.new_zeros(())
    for first in range(0, len(rows), step):
        bits = _bits(values[first : first + step], width).to(torch.int64)
        total += ((bits * columns).sum(1) * rows[first : first + step]).sum()
    return int(total.item())


def _bits(values: Tensor, width: int) -> Tensor:
    """Return the bits of a matrix as integers of so many bytes: a view, or of a copy if torch would refuse the view."""
    size = values.element_size()
    starts = (values.storage_offset(), *values.stride()[:-1])
    if values.stride(-1) != 1 or any(start * size % width for start in starts):
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(_PATTERN[width])
