"""The digest of published weights: 64 bits, and the digests of parts add up to that of the whole.

    digest = sum over blocks of  xxh3_64(bytes of the block, seed = its first byte's place)   modulo 2^64

A block is 1 MiB of the publication; the last one may be shorter. Parts that are cut between two blocks add up, in any order.
What an accident changes in a block, by however many bits, leaves its hash as it was about once in 2^64; so it is with a
block that is missing, shorter, at another place, or exchanged for another. That is a property of a good hash and not
proved: no change is found for certain. An adversary can make two publications of one digest.

It is computed on a CPU, where xxh3 reads memory about as fast as a core can; of weights on a card it needs a copy in host
memory, which is where engines load them from.
"""

import itertools
from collections.abc import Iterable

import xxhash
from torch import Tensor

from asyncgrpo.weights.threads import spread

WORD = 8
"""Lengths and starts are multiples of so many bytes."""
BLOCK = 2**20
"""Bytes that are hashed at once: few enough that a core has them in its cache when it has just written them."""
_MASK = 2**64 - 1


def digest(flat: Tensor, start: int = 0) -> int:
    """The digest of a part of a publication.

    Args:
        flat: [n] uint8, contiguous, n a multiple of 8.
        start: its place in the publication, bytes, a multiple of 8. Where a part begins or ends within a block, the piece
            of that block is hashed as a block of its own.

    Raises:
        ValueError: `start` or n is not a multiple of 8.
    """
    if start % WORD or len(flat) % WORD:
        raise ValueError(f"{len(flat)} bytes at {start} are no words of {WORD} bytes")
    content, end, total = flat.cpu().numpy().data, start + len(flat), 0
    edges = [start, *range(start - start % BLOCK + BLOCK, end, BLOCK), end]
    for a, b in itertools.pairwise(edges):
        if a < b:
            total += xxhash.xxh3_64_intdigest(content[a - start : b - start], a)
    return total & _MASK


def digest_pieces(flat: Tensor, pieces: Iterable[tuple[int, int]]) -> str:
    """The digest of a publication, [num_bytes] uint8, by several threads; 16 hex digits.

    Args:
        pieces: first and last byte of each. They are taken one by one, and need not be there before.
    """
    return add_digests(spread(lambda piece: digest(flat[slice(*piece)], piece[0]), pieces))


def add_digests(parts: Iterable[int]) -> str:
    """The digest of a publication from those of its parts, as 16 hex digits."""
    return f"{sum(parts) & _MASK:016x}"
