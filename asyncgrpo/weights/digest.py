"""Digests of published weights, of 64 bits: of their bytes, of a tensor's elements; and the threads that compute them.

The digest of a publication is the sum of the digests of its parts:

    digest = sum over blocks of  xxh3_64(bytes of the block, seed = offset of its first byte)   modulo 2^64

A block is 1 MiB of the publication; the last one may be shorter. Parts cut at block boundaries add up, in any order. An
accidental change of a block goes undetected with probability about 2^-64. The same holds for a block that is missing,
truncated, at another offset or exchanged for another. This is an empirical property of a good hash, not a proof.

It is computed on a CPU, where xxh3 runs at about the memory bandwidth of a core. Weights on a GPU need a copy in host
memory, from which engines load them.

The digest of a tensor is the sum of the digests of its boxes, for any partition of the tensor into boxes:

    digest = sum over rows r and words w of  bits(r, w) R(r) C(w)   modulo 2^64

The last dimension is the columns, all others are the rows. A word is an element of at least 4 bytes, or 4 bytes of smaller
neighbours in a row; `bits` are its bits as an integer. R and C are odd numbers that a hash draws for each row and word. So a
process that holds some boxes computes their digests in place. A box that cuts a word counts the bits of its own elements.

A change of one element is always detected, because its factor is odd times at most 2^24. Several changes are missed if they
cancel under the pseudorandom factors: with probability about 2^-64; in the worst case, where only signs of the last elements
of words change, 2^-33, because their bits are multiples of 2^31. Neither digest protects against an adversary.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo.host import cores

# -- threads: copies, xxHash and NumPy release the GIL while they work, so threads run in parallel ---------------------

MOST = 8
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


# -- the digest of a publication ---------------------------------------------------------------------------------------

BLOCK = 2**20
"""Bytes hashed at once: few enough to be still in the cache of the core that wrote them."""
_MASK = 2**64 - 1


def digest(flat: Tensor, start: int = 0) -> int:
    """Return the digest of a part of a publication.

    Args:
        flat: [n] uint8, contiguous.
        start: its offset in the publication, bytes. If a part begins or ends within a block, its piece of that block is
            hashed as a block of its own.
    """
    content, end, total = flat.cpu().numpy().data, start + len(flat), 0
    edges = [start, *range(start - start % BLOCK + BLOCK, end, BLOCK), end]
    for a, b in itertools.pairwise(edges):
        if a < b:
            total += xxhash.xxh3_64_intdigest(content[a - start : b - start], a)
    return total & _MASK


def digest_pieces(flat: Tensor, pieces: Iterable[tuple[int, int]]) -> str:
    """Return the digest of a publication, [num_bytes] uint8, computed by several threads; 16 hex digits.

    Args:
        pieces: start and end of each piece, bytes. The iterable is consumed lazily: a piece must be complete only when it
            is yielded.
    """
    return add_digests(spread(lambda piece: digest(flat[slice(*piece)], piece[0]), pieces))


def add_digests(parts: Iterable[int | str]) -> str:
    """Return the digest of a publication from those of its parts, as numbers or 16 hex digits each; 16 hex digits."""
    return f"{sum(int(part, 16) if isinstance(part, str) else part for part in parts) & _MASK:016x}"


# -- the digest of a tensor --------------------------------------------------------------------------------------------

_AT_ONCE = 2**17
"""Words widened to 8 bytes at once: they fit in a core's cache."""
_AT_ONCE_ON_DEVICE = 2**24
_WORD = 4
"""Bytes that are multiplied at once. Of bfloat16 this halves the products, and so the time."""
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
    is_on_cpu = values.device.type == "cpu"
    numbers = np.arange if is_on_cpu else partial(torch.arange, device=values.device)
    seed, total = _seed(tensor), 0
    width, columns = _columns(~seed, values, start[-1], numbers)
    for index in itertools.product(*map(range, values.shape[:-2])):
        row = 0
        for length, first, at in zip(shape, start, (*index, 0), strict=False):
            row = row * length + first + at
        rows = _factors(seed, numbers(row, row + values.shape[-2]))
        total += (_on_cpu if is_on_cpu else _on_device)(values[index].detach(), width, rows, columns)
    return total & _MASK


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
    width, columns = _columns(~seeds, values, start[1], numbers)
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


def _columns(seed: Any, values: Tensor, first: int, numbers: Callable[[int, int], Any]) -> tuple[int, Any]:
    """Return the bytes to read as one integer, and the factor of each: of whole words, else of elements.

    Args:
        values: a box.
        first: its first column.
        numbers: counts from one number to before another.
    """
    size, end = values.element_size(), first + values.shape[-1]
    each = max(1, _WORD // size)
    if first % each == end % each == 0:
        return size * each, _factors(seed, numbers(first // each, end // each))
    column = numbers(first, end)
    return size, _factors(seed, column // each) << (column % each * (8 * size))


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
    total, step = 0, max(1, _AT_ONCE // len(columns))
    for first in range(0, len(rows), step):
        wide = _bits(values[first : first + step], width).numpy().astype(np.int64)
        of_rows = np.einsum("rw,w->r", wide, columns)  # for integers this is faster than a matrix product
        total += int(np.dot(rows[first : first + step], of_rows))
    return total


def _on_device(values: Tensor, width: int, rows: Tensor, columns: Tensor) -> int:
    """Compute the digest by elementwise products, because GPUs lack an integer matrix product. Synchronizes once."""
    step = max(1, _AT_ONCE_ON_DEVICE // len(columns))
    total = rows.new_zeros(())
    for first in range(0, len(rows), step):
        bits = _bits(values[first : first + step], width).to(torch.int64)
        total += ((bits * columns).sum(1) * rows[first : first + step]).sum()
    return int(total.item())


def _bits(values: Tensor, width: int) -> Tensor:
    """Return the bits of a matrix as integers of so many bytes."""
    flat = values.reshape(-1)
    if flat.storage_offset() * flat.element_size() % width:  # torch would refuse the view
        flat = flat.clone()
    return flat.view(_PATTERN[width]).view(len(values), -1)
