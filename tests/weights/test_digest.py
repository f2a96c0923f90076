"""The digest of a tensor: one value for any split, and what it finds."""

import itertools
import random

import numpy as np
import pytest
import torch
import xxhash

from asyncgrpo.weights import digest as module
from asyncgrpo.weights.digest import box_digest, box_digests, run_digest, tensor_digest

MASK = 2**64 - 1

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])


def drawn_as(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def whole(tensor: torch.Tensor, name: str = "w") -> int:
    return tensor_digest(tensor, name)


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


@dtypes
def test_the_digest_of_a_box_is_what_the_page_says(dtype):
    tensor, seed = drawn_as(5, 24, dtype=dtype), module._seed("w")
    assert seed & MASK == xxhash.xxh3_64_intdigest(b"w")
    words = tensor.view(torch.uint8).numpy().view(np.uint32)
    rows, pairs = (module._factors(one, np.arange(24)) for one in (seed, ~seed))
    assert all(int(factor) % 2 for factor in np.concatenate([rows, pairs]))
    columns = [int(pairs[word // 2]) * (2**32 + 1 if word % 2 else 1) for word in range(words.shape[1])]
    expected = sum(int(bits) * int(rows[r]) * columns[w] for (r, w), bits in np.ndenumerate(words))
    assert whole(tensor) == expected & MASK


def test_the_value_never_changes():
    """Two releases at the two ends of a publication, and the replay of a run, must agree."""
    assert int(module._factors(0, np.arange(2))[1]) & MASK == 0xE220A8397B1DCDAF, (
        "the first number of splitmix64 from seed 0"
    )
    assert whole(torch.arange(256, dtype=torch.uint8).view(8, 32)) == 0x704DF97309F00FC0


@dtypes
def test_a_card_computes_the_same(dtype, monkeypatch):
    """Its products here, on the CPU; `tests/gpu/test_boxes.py` is for a card."""
    monkeypatch.setattr(module, "_AT_ONCE_ON_DEVICE", 100)
    tensor = drawn_as(13, 24, dtype=dtype)
    for first in (0, 1):  # whole words, and words that are cut
        results = []
        for compute, numbers in ((module._on_device, torch.arange), (module._on_cpu, np.arange)):
            width, columns = module._columns(1, tensor, first, numbers, in_pairs=numbers is np.arange)
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


def test_rows_that_follow_each_other_are_digested_together(monkeypatch):
    """The kernels of a convolution have a row each: one by one, those of [8192, 1, 4] took 0.12 s on a CPU."""
    calls, on_cpu = [], module._on_cpu
    monkeypatch.setattr(module, "_on_cpu", lambda *given: calls.append(1) or on_cpu(*given))
    tensor, shape = drawn_as(6, 3, 2, 4), (6, 3, 2, 4)
    boxes = [box_digest(tensor[span], "w", shape, (span.start, 0, 0, 0)) for span in (slice(0, 2), slice(2, 6))]
    assert sum(boxes) & MASK == whole(tensor.flatten(0, 2)) and len(calls) == 3
    assert whole(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == whole(tensor), (
        "of other strides, without a copy"
    )
    assert len(calls) == 3 + 6 * 3 + 1


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
