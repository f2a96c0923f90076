"""The digests of a publication and of a tensor: one value for any split, and what they find."""

import itertools
import random

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.weights import digest as module
from asyncgrpo.weights.digest import BLOCK, add_digests, box_digest, box_digests, digest, run_digest

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


# -- of a tensor, whose boxes add up however it is cut -----------------------------------------------------------------

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])


def drawn_as(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def whole(tensor: torch.Tensor, name: str = "w") -> int:
    return box_digest(tensor, name, tuple(tensor.shape), (0,) * tensor.ndim)


@dtypes
@pytest.mark.parametrize("shape", [(), (37,), (13, 24), (3, 5, 7), (2, 3, 4, 5), (3, 0)])
def test_the_digests_of_boxes_add_up_however_a_tensor_is_cut(shape, dtype, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 32)
    tensor, rng = drawn_as(*shape, dtype=dtype), random.Random(0)
    for _ in range(10):
        edges = [sorted({0, length, rng.randrange(length + 1), rng.randrange(length + 1)}) for length in shape]
        cut = itertools.product(*(itertools.pairwise(each) for each in edges))
        total = sum(
            box_digest(tensor[tuple(slice(*span) for span in box)], "w", shape, tuple(a for a, _ in box)) for box in cut
        )
        assert total & MASK == whole(tensor)


@dtypes
@pytest.mark.parametrize("shape", [(), (37,), (13, 24), (3, 5, 7), (2, 3, 4, 5)])
def test_the_digests_of_runs_add_up_however_a_tensor_is_cut(shape, dtype):
    tensor, rng = drawn_as(*shape, dtype=dtype), random.Random(0)
    flat = tensor.reshape(-1)
    for _ in range(10):
        edges = sorted({0, len(flat), *(rng.randrange(len(flat)) for _ in range(3))})
        total = sum(run_digest(flat[a:b], "w", shape, a) for a, b in itertools.pairwise(edges))
        assert total & MASK == whole(tensor)


def test_the_digest_of_a_box_is_what_the_page_says():
    tensor = torch.tensor([[1, 2], [3, 5]], dtype=torch.int64)
    seed = module._seed("w")
    assert seed & MASK == xxhash.xxh3_64_intdigest(b"w")
    rows, columns = (module._factors(one, np.arange(2)) for one in (seed, ~seed))
    assert all(int(factor) % 2 for factor in np.concatenate([rows, columns]))
    assert int(module._factors(0, np.arange(2))[1]) & MASK == 0xE220A8397B1DCDAF, (
        "the first number of splitmix64 from seed 0"
    )
    expected = sum(int(tensor[r, c]) * int(rows[r]) * int(columns[c]) for r in range(2) for c in range(2))
    assert whole(tensor) == expected & MASK


@dtypes
def test_a_card_computes_the_same(dtype, monkeypatch):
    """Its products here, on the CPU; `tests/gpu/test_boxes.py` is for a card."""
    monkeypatch.setattr(module, "_AT_ONCE_ON_DEVICE", 100)
    tensor = drawn_as(13, 24, dtype=dtype)
    for first in (0, 1):  # whole words, and words that are cut
        results = []
        for compute, numbers in ((module._on_device, torch.arange), (module._on_cpu, np.arange)):
            width, columns = module._columns(1, tensor, first, numbers)
            results.append(compute(tensor, width, module._factors(0, numbers(0, 13)), columns) & MASK)
        assert results[0] == results[1]


@dtypes
@pytest.mark.parametrize("columns", [slice(0, 24), slice(1, 24), slice(4, 9)])
def test_boxes_of_several_tensors_have_the_digests_of_each(dtype, columns, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 600)
    tensor, names = drawn_as(7, 9, 24, dtype=dtype), [f"expert {number}" for number in range(7)]
    boxes, start = tensor[:, 2:8, columns], (2, columns.start)
    expected = [box_digest(box, name, (9, 24), start) for box, name in zip(boxes, names, strict=True)]
    assert box_digests(boxes, names, start) == expected


def changes(bits: torch.Tensor, rng: random.Random):
    """Changed copies: a bit, rows and columns in another order, signs, steps up and down that add up to nothing."""
    for row, bit in itertools.product(range(8), range(16)):
        changed = bits.clone()
        changed[row, row] ^= -(2**15) if bit == 15 else 1 << bit
        yield changed
    for _ in range(2000):
        (i, j), (p, q), changed = rng.sample(range(8), 2), rng.sample(range(12), 2), bits.clone()
        kind = rng.randrange(6)
        if kind == 0:
            changed[[i, j]] = changed[[j, i]]
        elif kind == 1:
            changed[:, [p, q]] = changed[:, [q, p]]
        elif kind == 2:
            changed[i] ^= -(2**15)
        elif kind == 3:
            changed[i, p] += 1
            changed[j, q] -= 1
        elif kind == 4:  # of rank one: its rows and its columns add up to nothing
            changed[i, [p, q]] += torch.tensor([1, -1], dtype=torch.int16)
            changed[j, [p, q]] += torch.tensor([-1, 1], dtype=torch.int16)
        else:
            changed = changed.roll(rng.randrange(1, 12), 1)
        yield changed


def test_every_change_of_a_tensor_is_found():
    bits = drawn_as(8, 12).view(torch.int16)
    before = whole(bits)
    found = [whole(changed) != before for changed in changes(bits, random.Random(0)) if not torch.equal(changed, bits)]
    assert len(found) > 2000 and all(found)


def test_tensors_of_the_same_elements_differ_by_name_and_place():
    tensor = drawn_as(4, 6)
    assert whole(tensor) != whole(tensor, "v")
    assert box_digest(tensor, "w", (8, 6), (0, 0)) != box_digest(tensor, "w", (8, 6), (4, 0))
