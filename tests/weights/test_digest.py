"""The digest of a publication: one value for any split, and what it finds."""

import itertools

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.weights.digest import BLOCK, add_digests, digest

MASK = 2**64 - 1
NEAR = BLOCK - 8 * 8
"""So many bytes into the publication, 16 words lie on both sides of the end of a block."""


def drawn(num_words: int, seed: int = 0) -> torch.Tensor:
    """[8 num_words] uint8, random."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_words * 8, dtype=np.uint8))


def as_defined(flat: torch.Tensor, start: int) -> int:
    """The formula of the module's page: byte after byte into the block that it is of."""
    blocks: dict[int, bytearray] = {}
    for place, byte in enumerate(flat.tolist(), start):
        blocks.setdefault(max(place // BLOCK * BLOCK, start), bytearray()).append(byte)
    return sum(xxhash.xxh3_64_intdigest(bytes(block), seed) for seed, block in blocks.items()) & MASK


# -- one value ---------------------------------------------------------------------------------------------------------


def test_the_value_never_changes():
    """Two releases at the two ends of a publication must agree."""
    counted = torch.arange(256, dtype=torch.uint8)
    assert digest(counted) == 0x9408A4433B952D71
    assert digest(counted, 64) == 0xB444AA576C9017E9
    assert digest(torch.zeros(64, dtype=torch.uint8)) == 0x2FFB6918C12C256E
    assert digest(torch.full((3 * BLOCK + 8,), 255, dtype=torch.uint8), 8) == 0xF85C7F5DA73D5349


@pytest.mark.parametrize(("start", "num_words"), [(0, 1), (8, BLOCK // 8 + 1), (NEAR, 64), (2**40 + NEAR, BLOCK // 8)])
def test_it_is_what_the_page_says(start, num_words):
    flat = drawn(num_words)
    assert digest(flat, start) == as_defined(flat, start)


@given(cuts=st.lists(st.integers(0, 5), max_size=4))
@settings(max_examples=25, deadline=None)
def test_the_parts_add_up_to_the_whole(cuts):
    flat = drawn(4 * BLOCK // 8 + 9)
    edges = sorted({0, *(cut * BLOCK for cut in cuts if cut < 5), len(flat)})
    parts = [digest(flat[a:b], a) for a, b in itertools.pairwise(edges)]
    assert add_digests(parts) == add_digests([digest(flat)])
    assert add_digests(reversed(parts)) == add_digests(parts)


def test_an_empty_part_adds_nothing():
    assert digest(torch.empty(0, dtype=torch.uint8), 24) == 0
    assert add_digests([]) == "0" * 16


# -- what it finds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, NEAR])
@pytest.mark.parametrize("flat", [drawn(64), torch.zeros(512, dtype=torch.uint8)], ids=["random", "zeros"])
def test_every_flip_of_a_bit(flat, start):
    seen = {digest(flat, start)}
    for byte, bit in itertools.product(range(len(flat)), range(8)):
        flipped = flat.clone()
        flipped[byte] ^= 1 << bit
        seen.add(digest(flipped, start))
    assert len(seen) == 1 + 64 * 64, "no two of them are the same either"


@pytest.mark.parametrize("size", [BLOCK // 2, BLOCK, 2 * BLOCK])
def test_tensors_that_changed_places(size):
    flat = drawn(size)
    tensors = list(flat.split(size))
    seen = {digest(torch.cat([*tensors[:k], tensors[k + 1], tensors[k], *tensors[k + 2 :]])) for k in range(7)}
    assert len(seen | {digest(flat)}) == 8
