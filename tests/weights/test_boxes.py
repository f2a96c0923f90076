"""The digest of a tensor is the sum of those of its boxes, however it is cut, and what changes it."""

import itertools
import random

import numpy as np
import pytest
import torch

from asyncgrpo.weights import digest
from asyncgrpo.weights.digest import box_digest

MASK = 2**64 - 1
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def whole(tensor: torch.Tensor, name: str = "w") -> int:
    return box_digest(tensor, name, tuple(tensor.shape), (0,) * tensor.ndim)


@dtypes
@pytest.mark.parametrize("shape", [(), (37,), (13, 24), (3, 5, 7), (2, 3, 4, 5)])
def test_the_digests_of_boxes_add_up_however_a_tensor_is_cut(shape, dtype, monkeypatch):
    monkeypatch.setattr(digest, "_AT_ONCE", 32)
    tensor, rng = drawn(*shape, dtype=dtype), random.Random(0)
    for _ in range(10):
        edges = [sorted({0, length, rng.randrange(length + 1), rng.randrange(length + 1)}) for length in shape]
        cut = itertools.product(*(itertools.pairwise(each) for each in edges))
        total = sum(
            box_digest(tensor[tuple(slice(*span) for span in box)], "w", shape, tuple(a for a, _ in box)) for box in cut
        )
        assert total & MASK == whole(tensor)


def test_it_is_what_the_page_says():
    tensor = torch.tensor([[1, 2], [3, 5]], dtype=torch.int64)
    seed = digest.xxhash.xxh3_64_intdigest(b"w")
    rows, columns = digest._factors(seed, 0, 2), digest._factors(seed ^ MASK, 0, 2)
    assert all(int(factor) % 2 for factor in np.concatenate([rows, columns]))
    expected = sum(int(tensor[r, c]) * int(rows[r]) * int(columns[c]) for r in range(2) for c in range(2))
    assert whole(tensor) == expected & MASK


@dtypes
def test_a_card_computes_the_same(dtype, monkeypatch):
    """Its products here, on the CPU; `tests/gpu/test_boxes.py` is for a card."""
    monkeypatch.setattr(digest, "_AT_ONCE_ON_DEVICE", 100)
    tensor = drawn(13, 24, dtype=dtype)
    rows, columns = (np.random.default_rng(0).integers(0, 2**64, length, np.uint64) for length in tensor.shape)
    assert digest._on_device(tensor, rows, columns) & MASK == digest._of_matrix(tensor, rows, columns) & MASK


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


def test_every_change_is_found():
    bits = drawn(8, 12).view(torch.int16)
    before = whole(bits)
    found = [whole(changed) != before for changed in changes(bits, random.Random(0)) if not torch.equal(changed, bits)]
    assert len(found) > 2000 and all(found)


def test_tensors_of_the_same_elements_differ_by_name_and_place():
    tensor = drawn(4, 6)
    assert whole(tensor) != whole(tensor, "v")
    assert box_digest(tensor, "w", (8, 6), (0, 0)) != box_digest(tensor, "w", (8, 6), (4, 0))
