"""The digest of published weights: 64 bits, the sum of the digests of its parts.

    digest = sum over blocks of  xxh3_64(bytes of the block, seed = offset of its first byte)   modulo 2^64

A block is 1 MiB of the publication; the last one may be shorter. Parts cut at block boundaries add up, in any order. An
accidental change of a block goes undetected with probability about 2^-64. The same holds for a block that is missing,
truncated, at another offset or exchanged for another. This is an empirical property of a good hash, not a proof. An
adversary can construct two publications with equal digests.

It is computed on a CPU, where xxh3 runs at about the memory bandwidth of a core. Weights on a GPU need a copy in host
memory, from which engines load them.
"""

import itertools
from collections.abc import Iterable

import xxhash
from torch import Tensor

from asyncgrpo.weights.threads import spread

WORD = 8
"""Lengths and starts are multiples of this, bytes."""
BLOCK = 2**20
"""Bytes hashed at once: few enough to be still in the cache of the core that wrote them."""
_MASK = 2**64 - 1


def digest(flat: Tensor, start: int = 0) -> int:
    """Return the digest of a part of a publication.

    Args:
        flat: [n] uint8, contiguous, n a multiple of 8.
        start: its offset in the publication, bytes, a multiple of 8. If a part begins or ends within a block, its piece of
            that block is hashed as a block of its own.

    Raises:
        ValueError: `start` or n is not a multiple of 8.
    """
    if start % WORD or len(flat) % WORD:
        raise ValueError(f"{len(flat)} bytes at {start} are not aligned to {WORD} bytes")
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


def add_digests(parts: Iterable[int]) -> str:
    """Return the digest of a publication from those of its parts, 16 hex digits."""
    return f"{sum(parts) & _MASK:016x}"
