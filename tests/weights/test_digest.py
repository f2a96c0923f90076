"""The digest of a publication: one value for any split and device, and what it finds."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.weights.digest import TILE_WORDS, add_digests, digest
from asyncgrpo.weights.digest import _on_device as on_device
from asyncgrpo.weights.digest import _rectangles as rectangles

ROW = TILE_WORDS * 8
MASK = 2**64 - 1
WORDS = st.integers(0, MASK)
NEAR = ROW - 8 * 8
"""So many bytes into the publication, 16 words lie on both sides of the end of a row."""


def drawn(num_words: int, seed: int = 0) -> torch.Tensor:
    """[8 num_words] uint8, random."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_words * 8, dtype=np.uint8))


def of_words(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint64).view(np.uint8))


def splitmix64(place: int) -> int:
    z = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def as_defined(flat: torch.Tensor, start: int) -> int:
    """The formula of the module's page, in Python's integers."""
    total = 0
    for place, word in enumerate(flat.numpy().view(np.uint64).tolist(), start // 8):
        row, column = divmod(place, TILE_WORDS)
        total += (splitmix64(2**32 + row) | 1) * (splitmix64(column) | 1) * (word ^ word >> 31)
    return total & MASK


# -- one value ---------------------------------------------------------------------------------------------------------


def test_the_value_never_changes():
    """Two releases at the two ends of a publication must agree."""
    counted = torch.arange(256, dtype=torch.uint8)
    assert digest(counted) == 0x8B3FFDE179EC4386
    assert digest(counted, NEAR) == 0xFE08AE96198F2876
    assert digest(torch.zeros(64, dtype=torch.uint8)) == 0
    assert digest(torch.full((3 * ROW + 8,), 255, dtype=torch.uint8), 8) == 0x89BE62BA00000000


@pytest.mark.parametrize("start", [0, 8, NEAR, 5 * ROW, 5 * ROW + NEAR])
def test_it_is_what_the_page_says(start):
    assert digest(drawn(64), start) == as_defined(drawn(64), start)


def test_it_is_the_same_in_the_code_for_cards(monkeypatch):
    monkeypatch.setattr("asyncgrpo.weights.digest._ROWS_ON_DEVICE", 2)
    flat = drawn(5 * TILE_WORDS + 5)  # more rows than one step takes
    for start in (0, 8, NEAR):
        words = flat.view(torch.int64)
        assert on_device(words, rectangles(start // 8, len(words))) & MASK == digest(flat, start)


@given(cuts=st.lists(st.integers(0, 3 * TILE_WORDS), max_size=6))
@settings(max_examples=25, deadline=None)
def test_the_parts_add_up_to_the_whole(cuts):
    flat, start = drawn(3 * TILE_WORDS), NEAR
    edges = sorted({0, *cuts, 3 * TILE_WORDS})
    parts = [digest(flat[8 * a : 8 * b], start + 8 * a) for a, b in itertools.pairwise(edges)]
    assert add_digests(parts) == add_digests([digest(flat, start)])
    assert add_digests(reversed(parts)) == add_digests(parts)


def test_an_empty_part_adds_nothing():
    assert digest(torch.empty(0, dtype=torch.uint8), 24) == 0
    assert add_digests([]) == "0" * 16


@pytest.mark.parametrize(("size", "start"), [(12, 0), (16, 4), (7, 1)])
def test_what_is_no_whole_words_is_refused(size, start):
    with pytest.raises(ValueError, match=f"{size} bytes at {start} are no words of 8 bytes"):
        digest(torch.zeros(size, dtype=torch.uint8), start)


# -- what it finds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, NEAR])
@pytest.mark.parametrize("flat", [drawn(16), torch.zeros(128, dtype=torch.uint8)], ids=["random", "zeros"])
def test_every_flip_of_a_bit(flat, start):
    seen = {digest(flat, start)}
    for byte, bit in itertools.product(range(len(flat)), range(8)):
        flipped = flat.clone()
        flipped[byte] ^= 1 << bit
        seen.add(digest(flipped, start))
    assert len(seen) == 1 + 16 * 64, "no two of them are the same either"


@given(before=WORDS, after=WORDS, place=st.integers(0, 2**40))
def test_every_change_within_a_word(before, after, place):
    assert (digest(of_words([before]), 8 * place) == digest(of_words([after]), 8 * place)) == (before == after)


@given(word=WORDS)
def test_a_word_and_its_complement(word):
    """A shift that repeats the sign would give both one value."""
    assert digest(of_words([word])) != digest(of_words([word ^ MASK]))


@pytest.mark.parametrize("bit", [0, 15, 31, 32, 47, 62, 63])
@pytest.mark.parametrize("places", [range(24), range(0, 24 * TILE_WORDS, TILE_WORDS)], ids=["a row", "a column"])
def test_one_bit_flipped_in_two_words(bit, places):
    """Without the fold, bit 63 of any two words could be flipped unseen."""
    before = drawn(1)
    flipped = before.clone()
    flipped[bit // 8] ^= 1 << bit % 8
    changes = [(digest(flipped, 8 * place) - digest(before, 8 * place)) & MASK for place in places]
    assert all((one + other) & MASK for one, other in itertools.combinations(changes, 2))


@pytest.mark.parametrize("places", [range(24), range(0, 24 * TILE_WORDS, TILE_WORDS)], ids=["a row", "a column"])
def test_words_that_changed_places(places):
    words = [drawn(1, seed) for seed in range(24)]
    for (one, here), (other, there) in itertools.combinations(zip(words, places, strict=True), 2):
        as_they_were = digest(one, 8 * here) + digest(other, 8 * there)
        swapped = digest(other, 8 * here) + digest(one, 8 * there)
        assert (as_they_were - swapped) & MASK


def test_tensors_that_changed_places():
    flat, size = drawn(4 * TILE_WORDS), ROW // 2
    tensors = list(flat.split(size))
    seen = {digest(torch.cat([*tensors[:k], tensors[k + 1], tensors[k], *tensors[k + 2 :]])) for k in range(7)}
    assert len(seen | {digest(flat)}) == 8


def test_parts_that_moved():
    """By a word, by a row, by many, and round the end."""
    flat = drawn(TILE_WORDS)
    starts = [0, 8, 16, 4096, ROW - 8, ROW, ROW + 8, 2 * ROW, 64 * ROW, 2**34]
    assert len({digest(flat, start) for start in starts}) == len(starts)
    assert digest(flat.roll(8)) != digest(flat)


def test_zeros_that_moved():
    flat, zeros = drawn(64), torch.zeros(8, dtype=torch.uint8)
    seen = {digest(torch.cat([flat[: 8 * k], zeros, flat[8 * k :]])) for k in range(65)}
    assert len(seen) == 65


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_tensor_of_the_other_sign(dtype):
    tensor = torch.randn(4 * 1024).to(dtype)
    signs = tensor.view(torch.uint8).clone()
    signs.view(-1, dtype.itemsize)[:, -1] ^= 0x80
    assert digest(signs) != digest(tensor.view(torch.uint8))


def test_a_tensor_that_was_left_as_it_was():
    """A layer that no engine updated: the publication before it, in one place."""
    before, after = drawn(1024, 0), drawn(1024, 1)
    stale = after.clone()
    stale[512:1024] = before[512:1024]
    assert digest(stale) != digest(after)
