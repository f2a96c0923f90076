"""The sum of a tensor: one value wherever its words lie, and what it finds."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo.weights import sums
from asyncgrpo.weights.sums import _on_device as on_device
from asyncgrpo.weights.sums import tiles, word_sum

MASK = 2**64 - 1
WORDS = st.integers(0, MASK)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_words(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint64).view(np.uint8))


def as_defined(tensor: torch.Tensor) -> int:
    """The formula of the module's page, in Python's integers."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    folded = [word ^ word >> 31 for word in words]
    return sum(f + 2 * f * f for f in folded) & MASK


# -- one value ---------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("shape", [(), (3,), (64,), (7, 9), (300, 4)])
def test_it_is_what_the_page_says(dtype, shape, monkeypatch):
    monkeypatch.setattr(sums, "TILE_BYTES", 256)
    assert word_sum(drawn(*shape, dtype=dtype)) == as_defined(drawn(*shape, dtype=dtype))


def test_what_does_not_begin_at_a_word_or_lies_otherwise_is_read_as_it_is():
    tensor = drawn(9, 8)
    assert word_sum(tensor.reshape(-1)[3:43]) == as_defined(tensor.reshape(-1)[3:43].clone())
    assert word_sum(tensor.t()) == as_defined(tensor.t().contiguous())
    assert word_sum(torch.empty(0)) == 0 == word_sum(torch.zeros(5))


def test_it_is_the_same_in_the_code_for_cards():
    ((_, tile),) = tiles(drawn(64, 33))
    assert on_device(torch.from_numpy(tile.view(np.int64))) & MASK == word_sum(drawn(64, 33))


@dtypes
def test_what_moves_splits_and_fuses_tensors_keeps_the_sum(dtype):
    one, other = drawn(12, 16, dtype=dtype), drawn(20, 16, dtype=dtype, seed=1)
    whole = word_sum(one) + word_sum(other) & MASK
    fused = torch.cat([one, other])
    assert word_sum(fused) == whole
    assert word_sum(fused[torch.randperm(32)]) == whole
    assert sum(map(word_sum, fused.split(8, dim=1))) & MASK == whole, "columns, as over processes"
    assert word_sum(torch.nn.functional.pad(fused, (0, 0, 0, 4))) == whole, "rows of zeros"


# -- what it finds -----------------------------------------------------------------------------------------------------


@given(before=WORDS, after=WORDS)
def test_every_change_within_a_word(before, after):
    assert (word_sum(of_words([before])) == word_sum(of_words([after]))) == (before == after)


@pytest.mark.parametrize("word", [0, 0x3F803F803F803F80, 0x3F8000003F800000, 0x123456789ABCDEF0])
def test_every_flip_of_one_bit_in_each_of_two_equal_words(word):
    same = word_sum(of_words([word, word]))
    flips = [2**place for place in range(64)]
    changed = [word_sum(of_words([word ^ one, word ^ other])) for one, other in itertools.product(flips, flips)]
    assert same not in changed


@dtypes
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "random"])
def test_one_unit_up_in_some_places_and_down_in_as_many_others(dtype, is_constant):
    """As an update of a small learning rate is: a sum that was linear in the elements would not see it."""
    tensor = torch.ones(64, dtype=dtype) if is_constant else drawn(64, dtype=dtype)
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    before = word_sum(tensor)
    for up, down in itertools.permutations(range(16), 2):
        for count in (1, 2, 3):
            changed = bits.clone()
            changed[up : up + 16 * count : 16] += 1
            changed[down : down + 16 * count : 16] -= 1
            if not torch.equal(changed.sort().values, bits.sort().values):
                assert word_sum(changed) != before, (up, down, count)


@dtypes
def test_all_signs_changed(dtype):
    for tensor in (torch.ones(4096, dtype=dtype), drawn(4096, dtype=dtype)):
        assert word_sum(-tensor) != word_sum(tensor)
        last_of_each_word = tensor.clone()
        last_of_each_word[8 // tensor.element_size() - 1 :: 8 // tensor.element_size()] *= -1
        assert word_sum(last_of_each_word) != word_sum(tensor)
