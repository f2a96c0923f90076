"""Deltas make of one publication exactly the next one, whatever changed, and read nothing that is none."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.delta import BLOCK, PIECE, Chain, Delta, Span, State, apply, encode
from asyncgrpo.weights.delta import _differing as differing
from asyncgrpo.weights.delta import _differing_on_device as differing_on_device
from asyncgrpo.weights.digest import add_digests, digest

ALIGNMENT = 16
SMALL = [(5, torch.bfloat16), (700, torch.float32), (33, torch.float8_e4m3fn), (64, torch.bfloat16), (9, torch.int64)]
"""Elements and dtype of some tensors."""
SPECIAL = {
    torch.bfloat16: torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf], dtype=torch.bfloat16),
    torch.float32: torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf]),
}


def spans_of(tensors: Sequence[tuple[int, torch.dtype]]) -> list[Span]:
    """Where tensors lie in an arena."""
    spans, start = [], 0
    for elements, dtype in tensors:
        spans.append(Span(start, elements * dtype.itemsize, dtype.itemsize, start))
        start += -(-spans[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return spans


def size_of(spans: Sequence[Span]) -> int:
    return -(-(spans[-1].start + spans[-1].num_bytes) // ALIGNMENT) * ALIGNMENT


def drawn(spans: Sequence[Span], seed: int) -> torch.Tensor:
    """An arena of random bits, which hold every kind of NaN; zeros between the tensors."""
    arena = torch.zeros(size_of(spans), dtype=torch.uint8)
    random = np.random.default_rng(seed)
    for span in spans:
        bits = torch.from_numpy(random.integers(0, 256, span.num_bytes, dtype=np.uint8))
        arena[span.start : span.start + span.num_bytes] = bits
    return arena


def changed(arena: torch.Tensor, span: Span, positions: Sequence[int] | np.ndarray) -> torch.Tensor:
    """A copy in which the last bit of these elements is another."""
    copy = arena.clone()
    elements = copy[span.start : span.start + span.num_bytes].view(-1, span.itemsize)
    elements[torch.as_tensor(np.asarray(positions, np.int64)), 0] ^= 1
    return copy


def state(arena: torch.Tensor, number: int) -> State:
    return State(PolicyVersion(1, number), add_digests([digest(arena)]))


def delta_of(new: torch.Tensor, base: torch.Tensor, spans: Sequence[Span], number: int = 1) -> Delta:
    """From publication `number` - 1 to `number`, sent and received."""
    sent = Delta(state(base, number - 1), state(new, number), len(new), encode(new, base, spans))
    payload = sent.to_bytes()
    assert len(payload) == sent.packed_bytes
    return Delta.from_bytes(payload)


def assert_makes(delta: Delta, base: torch.Tensor, new: torch.Tensor) -> None:
    target = base.clone()
    apply(delta, target, delta.before)
    assert torch.equal(target, new)
    assert state(target, delta.after.version.number) == delta.after


# -- nothing is lost ---------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    shares=st.lists(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 1]), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_updates(seed, shares):
    """Two generators follow: one takes every delta, one comes back after all of them."""
    spans, random = spans_of(SMALL), np.random.default_rng(seed)
    newest = drawn(spans, seed)
    follows, rejoins, chain = newest.clone(), newest.clone(), Chain(max_deltas=8, max_bytes=2**30)
    held = first = state(newest, 0)
    for number, share in enumerate(shares, 1):
        base, other = newest, drawn(spans, seed + number)
        taken = torch.from_numpy(random.random(len(newest) // 8) < share).repeat_interleave(8)
        newest = torch.where(taken, other, base)
        for at, dtype in ((1, torch.float32), (3, torch.bfloat16)):
            tensor = newest[spans[at].start : spans[at].start + spans[at].num_bytes].view(dtype)
            place = int(random.integers(0, len(tensor) - 5))
            tensor[place : place + 5] = SPECIAL[dtype].roll(number)
        delta = delta_of(newest, base, spans, number)
        apply(delta, follows, held)
        held = delta.after
        chain.add(delta)
    assert torch.equal(follows, newest) and state(follows, len(shares)) == held
    missed = chain.since(first)
    assert (missed is None) == (chain.num_bytes > len(newest))
    for delta in missed or []:
        apply(delta, rejoins, first)
        first = delta.after
    assert missed is None or (torch.equal(rejoins, newest) and first == held)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 1.0])
def test_every_share_of_changes(dtype, share):
    elements = BLOCK + 4321
    spans = spans_of([(elements, dtype)])
    base = drawn(spans, 0)
    new = changed(base, spans[0], np.flatnonzero(np.random.default_rng(1).random(elements) < share))
    delta = delta_of(new, base, spans)
    assert_makes(delta, base, new)
    assert delta.packed_bytes <= len(new) + 256, "never much more than the whole"
    assert share > 0 or not delta.pieces


@pytest.mark.parametrize("one", [torch.nan, 0.0, torch.inf])
def test_numbers_that_compare_as_no_number_does(one):
    """NaN is not equal to itself and 0.0 is to -0.0, but bits are bits."""
    spans = spans_of([(1000, torch.bfloat16)])
    base = torch.full((1000,), one, dtype=torch.bfloat16).view(torch.uint8)
    base = torch.cat([base, torch.zeros(size_of(spans) - len(base), dtype=torch.uint8)])
    assert encode(base.clone(), base, spans) == ()
    new = base.clone()
    new[:2000].view(torch.int16)[7] ^= -(2**15)  # the sign
    delta = delta_of(new, base, spans)
    assert delta.changed == 1
    assert_makes(delta, base, new)


@pytest.mark.parametrize(
    "positions",
    [
        [0],
        [BLOCK - 1],
        [BLOCK],
        [0, 3 * BLOCK - 1],
        [PIECE - 1, PIECE],
        [2 * PIECE + BLOCK + 10],
        [5, 2 * PIECE + BLOCK],
    ],
)
def test_positions_far_apart(positions):
    spans = spans_of([(2 * PIECE + BLOCK + 11, torch.bfloat16), (7, torch.float32)])
    base = drawn(spans, 0)
    new = changed(base, spans[0], positions)
    delta = delta_of(new, base, spans)
    assert delta.changed == len(positions)
    assert_makes(delta, base, new)


def test_one_in_a_hundred_takes_45_times_fewer_bytes():
    spans = spans_of([(elements, torch.bfloat16) for elements in (3_000_000, 64, 400_000, 64, 400_000, 64)])
    base = drawn(spans, 0)
    random, new = np.random.default_rng(1), base
    for span in spans:
        new = changed(new, span, np.flatnonzero(random.random(span.num_bytes // 2) < 0.01))
    delta = delta_of(new, base, spans)
    assert_makes(delta, base, new)
    assert len(new) / delta.packed_bytes >= 45


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_that_encode_their_shards_make_the_delta_of_the_whole(num_ranks):
    """Each rank has its rows of every tensor, one after the other, and nothing else."""
    spans = spans_of([(21 * 1000, torch.bfloat16), (21 * 4, torch.float32), (42, torch.float8_e4m3fn)])
    base = drawn(spans, 0)
    new = changed(changed(base, spans[0], range(0, 21000, 100)), spans[2], range(42))
    pieces = []
    for rank in range(num_ranks):
        shards, start = [], 0
        for span in spans:
            elements = span.num_bytes // span.itemsize
            first, last = (elements * r // num_ranks * span.itemsize for r in (rank, rank + 1))
            shards.append(Span(start, last - first, span.itemsize, span.place + first))
            start += -(-(last - first) // 8) * 8
        ours, theirs = torch.zeros(start, dtype=torch.uint8), torch.zeros(start, dtype=torch.uint8)
        for shard in shards:
            for flat, whole in ((ours, new), (theirs, base)):
                flat[shard.start : shard.start + shard.num_bytes] = whole[shard.place : shard.place + shard.num_bytes]
        pieces += encode(ours, theirs, shards)
    joined = Delta(state(base, 0), state(new, 1), len(new), tuple(pieces))
    assert_makes(Delta.from_bytes(joined.to_bytes()), base, new)
    whole = delta_of(new, base, spans)
    assert joined.changed == whole.changed
    assert joined.packed_bytes - whole.packed_bytes <= 64 * len(spans) * (num_ranks - 1)


def test_a_piece_with_few_changes_is_sparse_and_one_with_many_is_dense():
    spans = spans_of([(PIECE, torch.bfloat16), (PIECE, torch.bfloat16), (PIECE, torch.bfloat16)])
    base = drawn(spans, 0)
    new = changed(changed(base, spans[0], range(0, PIECE, 5)), spans[2], range(0, PIECE, 3))
    first, third = encode(new, base, spans)
    assert (first.place, first.is_sparse, third.place, third.is_sparse) == (0, True, spans[2].start, False)


@pytest.mark.parametrize("most", [0, 10, 1000])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.9])
def test_the_code_for_cards_finds_the_same(share, itemsize, most):
    span = Span(0, 808, itemsize, 0)
    base = drawn([span], 0)
    count = 808 // itemsize
    new = changed(base, span, np.flatnonzero(np.random.default_rng(0).random(count) < share))[:808]
    base = base[:808]
    here = differing(new.numpy(), base.numpy(), itemsize, most)
    there, values = differing_on_device(new, base, itemsize, most)
    if here is None:
        assert there is None and values.tobytes() == new.numpy().tobytes()
    else:
        assert np.array_equal(there, here)
        assert np.array_equal(values, new.numpy().view(f"<u{itemsize}")[here])


# -- what a delta is applied to ----------------------------------------------------------------------------------------


def pair() -> tuple[list[Span], torch.Tensor, torch.Tensor]:
    """A base and what came after it, in which every kind of piece is."""
    spans = spans_of(SMALL)
    base = drawn(spans, 0)
    return spans, base, changed(changed(changed(base, spans[0], range(5)), spans[1], [3, 600]), spans[4], [8])


def test_a_delta_can_be_applied_again():
    """After a crash in the middle, for example: bits are absolute."""
    spans, base, new = pair()
    delta = delta_of(new, base, spans)
    target = base.clone()
    delta.pieces[0].write(target.numpy())
    for _ in range(2):
        apply(delta, target, delta.before)
        assert torch.equal(target, new)


def test_another_base_is_refused():
    spans, base, new = pair()
    delta = delta_of(new, base, spans)
    for holds in (
        delta.after,
        delta.before._replace(digest="0" * 16),
        delta.before._replace(version=PolicyVersion(2, 0)),
    ):
        target = base.clone()
        with pytest.raises(WeightsError, match=f"a delta from 1.0 .* to 1.1 does not fit weights {holds.version}"):
            apply(delta, target, holds)
        assert torch.equal(target, base)


@pytest.mark.parametrize("size", [-16, 16])
def test_another_size_is_refused(size):
    spans, base, new = pair()
    delta = delta_of(new, base, spans)
    target = torch.zeros(len(base) + size, dtype=torch.uint8)
    with pytest.raises(WeightsError, match="does not fit weights of"):
        apply(delta, target, delta.before)
    assert not target.any()


# -- the chain ---------------------------------------------------------------------------------------------------------


def deltas(count: int) -> list[Delta]:
    """Of publications 0 to `count`, a few changes each."""
    spans = spans_of([(20_000, torch.bfloat16)])
    arenas = [drawn(spans, 0)]
    for number in range(count):
        arenas.append(changed(arenas[-1], spans[0], range(number, 20_000, 500)))
    return [delta_of(new, base, spans, number) for number, (base, new) in enumerate(itertools.pairwise(arenas), 1)]


def chain_of(links: Sequence[Delta], max_deltas: int = 100, max_bytes: int = 2**30) -> Chain:
    chain = Chain(max_deltas, max_bytes)
    for link in links:
        chain.add(link)
    return chain


def test_a_chain_leads_from_any_of_its_states_to_the_newest():
    links = deltas(4)
    chain = chain_of(links)
    for number, link in enumerate(links):
        assert chain.since(link.before) == links[number:]
    assert chain.since(links[-1].after) == []
    assert chain.since(links[0].before._replace(digest="f" * 16)) is None
    assert Chain(1, 1).since(links[0].before) is None


def test_a_chain_forgets_its_oldest_deltas():
    links = deltas(4)
    by_count = chain_of(links, max_deltas=3)
    assert by_count.since(links[0].before) is None and by_count.since(links[1].before) == links[1:]
    by_bytes = chain_of(links, max_bytes=2 * links[0].packed_bytes)
    assert by_bytes.since(links[1].before) is None and by_bytes.since(links[2].before) == links[2:]
    assert by_bytes.num_bytes == sum(link.packed_bytes for link in links[2:])
    assert chain_of(links, max_bytes=10).since(links[-1].before) is None
    assert chain_of(links, max_bytes=10).num_bytes == 0


def test_a_chain_has_no_gap():
    links = deltas(4)
    chain = chain_of([links[0], links[1], links[3]])
    assert chain.since(links[0].before) is None
    assert chain.since(links[3].before) == [links[3]]
    assert chain.num_bytes == links[3].packed_bytes


def test_a_chain_longer_than_the_whole_is_no_help():
    spans = spans_of([(20_000, torch.bfloat16)])
    arenas = [drawn(spans, seed) for seed in range(4)]
    links = [delta_of(new, base, spans, n) for n, (base, new) in enumerate(itertools.pairwise(arenas), 1)]
    chain = chain_of(links)
    assert chain.since(links[0].before) is None


# -- payloads that are none --------------------------------------------------------------------------------------------


def test_whatever_is_no_delta_is_refused_and_nothing_is_written_outside():
    """10,000 payloads with bytes flipped, overwritten, cut out, added or exchanged."""
    spans, base, new = pair()
    payload, random = delta_of(new, base, spans).to_bytes(), np.random.default_rng(0)
    refused = accepted = 0
    guard = 4096
    memory = torch.zeros(len(base) + 2 * guard, dtype=torch.uint8)
    for _ in range(10_000):
        try:
            delta = Delta.from_bytes(mutated(payload, random))
        except WireError:
            refused += 1
            continue
        accepted += 1
        if delta.num_bytes == len(base):
            apply(delta, memory[guard:-guard], delta.before)
            assert not memory[:guard].any()
            assert not memory[-guard:].any()
        else:
            with pytest.raises(WeightsError):
                apply(delta, memory[guard:-guard], delta.before)
    assert refused > 1000 and accepted > 1000


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


SPARSE = 72 + 24
"""The body of the first piece below begins here: header, one record."""


@pytest.mark.parametrize(
    ("at", "number", "size", "message"),
    [
        (0, 0, 8, "a delta begins with"),
        (64, 2**60, 8, "more begin at"),
        (64, 2, 8, "more begin at|a piece has"),
        (56, 16, 8, "a piece has"),
        (72, 2**63, 8, "a piece has"),
        (72, 1, 8, "a piece has invalid elements"),
        (80, 2**32 - 1, 4, "a piece has"),
        (80, 2, 4, "a position is beyond"),
        (84, 0, 4, "a piece has"),
        (84, 3, 4, "the blocks of a piece"),
        (88, 3, 4, "a piece has invalid elements"),
        (92, 2, 4, "a piece has invalid elements"),
        (92, 0, 4, "a dense piece has"),
        (SPARSE, 3, 4, "the blocks of a piece"),
        (SPARSE + 10, 700, 2, "a position is beyond"),
    ],
)
def test_every_number_of_a_payload_is_checked(at, number, size, message):
    spans = spans_of([(700, torch.bfloat16)])
    base = drawn(spans, 0)
    payload = delta_of(changed(base, spans[0], [3, 699]), base, spans).to_bytes()
    Delta.from_bytes(payload)
    payload[at : at + size] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)
    with pytest.raises(WireError, match=message):
        Delta.from_bytes(payload)


@pytest.mark.parametrize("size", [0, 1, 71, 72, 100])
def test_a_payload_that_ends_early_is_refused(size):
    spans, base, new = pair()
    payload = bytes(delta_of(new, base, spans).to_bytes())
    with pytest.raises(WireError):
        Delta.from_bytes(payload[:size])


def test_a_payload_that_goes_on_is_refused():
    spans, base, new = pair()
    payload = bytes(delta_of(new, base, spans).to_bytes())
    with pytest.raises(WireError, match=f"a delta of {len(payload)} bytes has {len(payload) + 8}"):
        Delta.from_bytes(payload + bytes(8))


def test_a_payload_at_an_odd_address_is_read():
    spans, base, new = pair()
    payload = bytes(delta_of(new, base, spans).to_bytes())
    assert_makes(Delta.from_bytes(memoryview(b"x" + payload)[1:]), base, new)
