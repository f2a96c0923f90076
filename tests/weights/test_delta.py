"""Deltas make of one publication exactly the next one, whatever changed, and write nothing outside of it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Layout
from asyncgrpo.weights.delta import (
    AT_ONCE,
    BLOCK,
    Delta,
    Piece,
    follow,
    from_bytes,
    to_bytes,
)
from tests.weights.changing import LAYOUT, change, drawn

SMALL = [(5, torch.bfloat16), (700, torch.float32), (33, torch.float8_e4m3fn), (64, torch.bfloat16), (9, torch.int64)]
"""Elements and dtype of some tensors."""


def layout_of(tensors: Sequence[tuple[int, torch.dtype]]) -> Layout:
    names = (str(dtype).removeprefix("torch.") for _, dtype in tensors)
    return Layout([TensorInfo(name="", shape=(n,), dtype=dtype) for (n, _), dtype in zip(tensors, names, strict=True)])


def changed(arena: torch.Tensor, layout: Layout, number: int, positions: Sequence[int] | np.ndarray) -> torch.Tensor:
    """A copy in which the last bit of these elements of one tensor is another."""
    copy, span = arena.clone(), layout.spans[number]
    elements = copy[span.start : span.start + span.num_bytes].view(-1, span.itemsize)
    elements[torch.as_tensor(np.asarray(positions, np.int64)), 0] ^= 1
    return copy


def at(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


def pieces_of(new: torch.Tensor, base: torch.Tensor, layout: Layout) -> tuple[Piece, ...]:
    pieces = follow(mirror := base.clone(), new, layout.spans, 2**40)
    assert pieces is not None and torch.equal(mirror, new), "the mirror follows"
    return pieces


def sent(new: torch.Tensor, base: torch.Tensor, layout: Layout, number: int = 1) -> bytes:
    """The payload from publication `number` - 1 to `number`."""
    return to_bytes(Delta(at(number - 1), at(number), pieces_of(new, base, layout)))


def assert_makes(payload: bytes | memoryview, base: torch.Tensor, new: torch.Tensor) -> None:
    target = base.clone()
    from_bytes(payload).apply(target)
    assert torch.equal(target, new)


# -- nothing is lost ---------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    shares=st.lists(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 1]), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_sequence_of_updates(seed, shares):
    random, newest = np.random.default_rng(seed), drawn(seed)
    follows = newest.clone()
    for number, share in enumerate(shares, 1):
        base, newest = newest, newest.clone()
        change(newest, share, random, lambda below: int(random.integers(0, below)))
        from_bytes(sent(newest, base, LAYOUT, number)).apply(follows)
        assert torch.equal(follows, newest)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.1, 0.5, 1.0])
def test_every_share_of_changes(dtype, share):
    elements = BLOCK + 4321
    layout = layout_of([(elements, dtype)])
    base = drawn(0, layout)
    new = changed(base, layout, 0, np.flatnonzero(np.random.default_rng(1).random(elements) < share))
    payload = sent(new, base, layout)
    assert_makes(payload, base, new)
    assert len(payload) <= len(new) + 256, "never much more than the whole"
    assert share > 0 or not from_bytes(payload).pieces


@pytest.mark.parametrize(
    "positions",
    [[0, BLOCK - 1], [BLOCK], [AT_ONCE - 1, AT_ONCE], [5, 2 * AT_ONCE + BLOCK, 2 * AT_ONCE + BLOCK + 10]],
)
def test_positions_far_apart(positions):
    layout = layout_of([(2 * AT_ONCE + BLOCK + 11, torch.bfloat16), (7, torch.float32)])
    base = drawn(0, layout)
    new = changed(base, layout, 0, positions)
    assert sum(len(piece.values) for piece in pieces_of(new, base, layout)) == 2 * len(positions)
    assert_makes(sent(new, base, layout), base, new)


def test_one_in_a_hundred_takes_45_times_fewer_bytes():
    layout = layout_of([(elements, torch.bfloat16) for elements in (3_000_000, 64, 400_000, 64, 400_000, 64)])
    base = drawn(0, layout)
    random, new = np.random.default_rng(1), base
    for number, span in enumerate(layout.spans):
        new = changed(new, layout, number, np.flatnonzero(random.random(span.num_bytes // 2) < 0.01))
    assert len(new) / len(sent(new, base, layout)) >= 45


def test_a_delta_that_is_too_large_is_given_up():
    layout, base, new = pair()
    size = sum(piece.num_bytes for piece in pieces_of(new, base, layout))
    assert follow(base.clone(), new, layout.spans, size) is not None
    assert follow(base.clone(), new, layout.spans, size - 1) is None


# -- what a delta is applied to ----------------------------------------------------------------------------------------


def pair() -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """A base and what came after it, with sparse and dense pieces."""
    layout = layout_of(SMALL)
    base = new = drawn(0, layout)
    for number, positions in ((0, range(5)), (1, [3, 600]), (4, [8])):
        new = changed(new, layout, number, positions)
    return layout, base, new


def test_a_delta_can_be_applied_again():
    layout, base, new = pair()
    delta = from_bytes(sent(new, base, layout))
    target = base.clone()
    delta.pieces[0].write(target.numpy())
    for _ in range(2):
        delta.apply(target)
        assert torch.equal(target, new)


# -- payloads that are none --------------------------------------------------------------------------------------------


def test_whatever_is_no_delta_is_refused_and_nothing_is_written_outside():
    """10,000 payloads with bytes flipped, overwritten, cut out, added or exchanged."""
    layout, base, new = pair()
    payload, random = np.frombuffer(sent(new, base, layout), np.uint8), np.random.default_rng(0)
    refused, guard = 0, 4096
    memory = torch.zeros(len(base) + 2 * guard, dtype=torch.uint8)
    for _ in range(10_000):
        try:
            from_bytes(mutated(payload, random).tobytes()).apply(memory[guard:-guard])
        except WeightsError:
            refused += 1
        assert not memory[:guard].any() and not memory[-guard:].any()
    assert 1000 < refused < 9000


def mutated(payload: np.ndarray, random: np.random.Generator) -> np.ndarray:
    kind, (low, high) = random.integers(0, 5), np.sort(random.integers(0, len(payload) + 1, 2))
    copy = payload.copy()
    if kind == 0:
        copy[random.integers(0, len(copy))] ^= 1 << random.integers(0, 8)
    elif kind == 1:  # a number of any size
        at = 8 * random.integers(0, len(copy) // 8)
        copy[at : at + 8] = np.frombuffer(int(2 ** random.uniform(0, 64)).to_bytes(8, "little"), np.uint8)
    elif kind == 2:
        return np.delete(copy, slice(low, high))
    elif kind == 3:
        return np.insert(copy, low, random.integers(0, 256, random.integers(1, 64), dtype=np.uint8))
    else:
        copy[low:high] = copy[low:high][::-1]
    return copy


@pytest.mark.parametrize(
    "piece",
    [
        Piece(-2, 2, memoryview(b"ab")),
        Piece(98, 2, memoryview(b"abcd")),
        Piece(0, 3, memoryview(b"abc")),
        Piece(0, 2, memoryview(b"abc")),
        Piece(0, 2, memoryview(b"ab"), memoryview(b"\x32\x00")),
        Piece(0, 2, memoryview(b"abcd"), memoryview(b"\x01\x00")),
        Piece(0, 2, memoryview(b"ab"), memoryview(b"\x01\x00\x02")),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(piece):
    memory = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(WeightsError):
        from_bytes(to_bytes(Delta(at(0), at(1), (piece,)))).apply(memory)
    assert not memory.any()
