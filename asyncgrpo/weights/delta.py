"""What changed between two publications, without loss: the new bits of the elements that differ, and where they are.

A small step leaves most bits of bfloat16 weights as they were. A delta holds pieces: runs of up to `PIECE` elements of one
tensor, each compared as integers, so NaN, infinities and -0.0 are bits like any others. A piece without a change is left
out; one with few is sparse, one with many is dense. A sparse piece lists positions within blocks of 2^16 elements as 16
bits each, and how many there are in every block.

    payload = header | a record for each piece | bodies      numbers are little-endian, every array starts at 8 bytes
    sparse body = changes in each block [u32] | positions [u16] | new bits       dense body = new bits

Values are absolute: to apply a delta twice is to apply it once. A delta names its base, and fits nothing else.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.threads import spread

BLOCK = 2**16
"""Elements that a position of 16 bits can name."""
PIECE = 16 * BLOCK
"""Elements compared at once: they and the scratch stay in a core's cache."""
SPARSE_UP_TO = 0.5
"""A piece is sparse if that takes at most this share of its bytes: single elements cost more to write than a run."""
LEAST_SAVING = 4
"""Deltas are sent if they have at least so many times fewer bytes than the weights."""
SKIPPED, MOST_SKIPPED = 4, 256
"""Versions that are not compared, at first and at most."""

_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RECORD = np.dtype([("place", "<u8"), ("elements", "<u4"), ("changed", "<u4"), ("itemsize", "<u4"), ("sparse", "<u4")])
_HEADER = np.dtype(
    [("format", "S8"), ("before", "<u8", 3), ("after", "<u8", 3), ("num_bytes", "<u8"), ("num_pieces", "<u8")]
)
_FORMAT = b"delta 1"


class Span(NamedTuple):
    """One tensor, or a shard of one, in a flat run of bytes."""

    start: int
    """Its first byte there."""
    num_bytes: int
    itemsize: int
    """Bytes of an element: 1, 2, 4 or 8. All starts, lengths and places are multiples of it."""
    place: int
    """Its first byte in the whole publication."""


class State(NamedTuple):
    """The weights that an arena holds."""

    version: PolicyVersion
    digest: str
    """See `weights.digest`: 16 hex digits."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The changes of consecutive elements of one tensor."""

    place: int
    """Its first byte in the publication."""
    elements: int
    values: NDArray[Any]
    """[changed] new bits, unsigned integers of the element's size; of all elements where the piece is dense."""
    positions: NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, "<u2"))
    """[changed] positions within their blocks; empty: the piece is dense."""
    counts: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, "<u4"))
    """[blocks] changes in every block."""

    @property
    def is_sparse(self) -> bool:
        return len(self.counts) > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its body in a payload."""
        return sum(_padded(part.nbytes) for part in self._body())

    def write(self, target: NDArray[np.uint8]) -> None:
        """Write the new bits into [num_bytes] bytes of a publication."""
        run = target[self.place :][: self.elements * self.values.itemsize].view(self.values.dtype)
        if self.is_sparse:
            blocks = np.arange(len(self.counts), dtype=np.int64) * BLOCK
            run[np.repeat(blocks, self.counts) + self.positions] = self.values
        else:
            run[:] = self.values

    def _body(self) -> tuple[NDArray[Any], ...]:
        return self.counts, self.positions, self.values


@dataclass(frozen=True, eq=False)
class Delta:
    """All that changed from the weights `before` to those `after`."""

    before: State
    after: State
    num_bytes: int
    """Bytes of the whole publication."""
    pieces: tuple[Piece, ...]
    payload: NDArray[np.uint8] | None = None
    """What it was read from."""

    @property
    def changed(self) -> int:
        """Elements that are sent: those that changed, and the others of dense pieces."""
        return sum(len(piece.values) for piece in self.pieces)

    @property
    def packed_bytes(self) -> int:
        """Bytes of its payload."""
        return _HEADER.itemsize + sum(_RECORD.itemsize + piece.num_bytes for piece in self.pieces)

    def to_bytes(self) -> NDArray[np.uint8]:
        """[packed_bytes] uint8: the payload that `from_bytes` reads."""
        if self.payload is not None:
            return self.payload
        payload = np.zeros(self.packed_bytes, np.uint8)
        header = np.array(
            (_FORMAT, _numbers(self.before), _numbers(self.after), self.num_bytes, len(self.pieces)), _HEADER
        )
        records = [
            (piece.place, piece.elements, len(piece.values), piece.values.itemsize, piece.is_sparse)
            for piece in self.pieces
        ]
        at = 0
        for part in (
            header[None],
            np.array(records, _RECORD),
            *(part for piece in self.pieces for part in piece._body()),
        ):
            payload[at : at + part.nbytes] = part.view(np.uint8)
            at += _padded(part.nbytes)
        return payload

    @classmethod
    def from_bytes(cls, payload: bytes | bytearray | memoryview | NDArray[np.uint8]) -> "Delta":
        """The inverse of `to_bytes`; its arrays are views of `payload`.

        Every length, place and position is checked: what this returns writes nothing outside `num_bytes`.

        Raises:
            WireError: the payload is no delta.
        """
        return _Reader(payload).delta()


# -- encoding ----------------------------------------------------------------------------------------------------------


def encode(new: Tensor, base: Tensor, spans: Iterable[Span]) -> tuple[Piece, ...]:
    """The pieces of `spans` in which `new` differs from `base`: see `compare`."""
    return tuple(compare(new, base, spans))


def compare(new: Tensor, base: Tensor, spans: Iterable[Span]) -> Iterator[Piece]:
    """The pieces of `spans` in which `new` differs from `base`, one after the other.

    Every learner rank can do so for its shards: the pieces of all ranks, one after the other, are those of the whole.
    Several threads compare a few pieces ahead; whoever takes a piece may write where it lies.

    Args:
        new: [n] uint8, on the CPU or a GPU; the spans lie in it.
        base: [n] uint8 on the same device, laid out like `new`.
    """
    pieces = spread(lambda part: _compare(new, base, part), (part for span in spans for part in _parts(span)))
    return (piece for piece in pieces if piece is not None)


def follow(mirror: Tensor, new: Tensor, spans: Iterable[Span], most: int) -> tuple[Piece, ...] | None:
    """Make the mirror what `new` is. Returns what changed; None: more than `most` bytes, and the mirror is part old, part new.

    If somebody writes over `new` meanwhile, the mirror still becomes what the pieces say.

    Args:
        mirror, new: [n] uint8 on the CPU, laid out alike; the place of each span is its start.
    """
    pieces, size = [], 0
    for piece in compare(new, mirror, spans):
        size += piece.num_bytes
        if size > most:
            return None
        piece.write(mirror.numpy())
        pieces.append(piece)
    return tuple(pieces)


class Skips:
    """Which versions are compared: after one that changed too much a few are not, then twice as many, and so on."""

    def __init__(self) -> None:
        self._left, self._next = 0, SKIPPED

    def is_due(self) -> bool:
        """Whether the next version is to be compared. Asked once about each."""
        self._left = max(self._left - 1, 0)
        return not self._left

    def note(self, *, pays: bool) -> None:
        """What was compared changed little enough, or too much."""
        if pays:
            self._next = SKIPPED
        else:
            self._left, self._next = self._next, min(2 * self._next, MOST_SKIPPED)


def _parts(span: Span) -> Iterator[Span]:
    size = PIECE * span.itemsize
    for begin in range(0, span.num_bytes, size):
        yield span._replace(
            start=span.start + begin, place=span.place + begin, num_bytes=min(size, span.num_bytes - begin)
        )


def _compare(new: Tensor, base: Tensor, span: Span) -> Piece | None:
    """The changes of up to `PIECE` elements; None: there are none."""
    ours, theirs = (flat[span.start : span.start + span.num_bytes] for flat in (new, base))
    elements = span.num_bytes // span.itemsize
    most = int(SPARSE_UP_TO * span.num_bytes / (_UNSIGNED[2].itemsize + span.itemsize))
    if new.device.type == "cpu":
        positions = _differing(ours.numpy(), theirs.numpy(), span.itemsize, most)
        values = ours.numpy().view(_UNSIGNED[span.itemsize])
        values = values.copy() if positions is None else values[positions]
    else:
        positions, values = _differing_on_device(ours, theirs, span.itemsize, most)
    if positions is None:
        return Piece(span.place, elements, values)
    if not len(positions):
        return None
    counts = np.bincount(positions >> 16, minlength=-(-elements // BLOCK)).astype("<u4")
    return Piece(span.place, elements, values, positions.astype("<u2"), counts)


def _differing(
    ours: NDArray[np.uint8], theirs: NDArray[np.uint8], itemsize: int, most: int
) -> NDArray[np.int64] | None:
    """Positions of the elements that differ, ascending; None: more than `most`.

    Words of 8 bytes are compared first, where the length allows it. If few of them differ, only in those elements are.
    """
    word = next(size for size in (8, 4, 2, 1) if len(ours) % size == 0 and size >= itemsize)
    new, base = ours.view(_UNSIGNED[word]), theirs.view(_UNSIGNED[word])
    unequal = new != base
    if np.count_nonzero(unequal) * 4 < len(unequal):
        words, per_word = np.flatnonzero(unequal), word // itemsize
        within = np.flatnonzero((new[words] ^ base[words]).view(_UNSIGNED[itemsize]))
        positions = words[within // per_word] * per_word + within % per_word
        return positions if len(positions) <= most else None
    unequal = ours.view(_UNSIGNED[itemsize]) != theirs.view(_UNSIGNED[itemsize])
    return np.flatnonzero(unequal) if np.count_nonzero(unequal) <= most else None


def _differing_on_device(
    ours: Tensor, theirs: Tensor, itemsize: int, most: int
) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
    """`_differing` where the tensors are, and the bits to send; only these are copied to the host."""
    new, base = ours.view(_SIGNED[itemsize]), theirs.view(_SIGNED[itemsize])
    positions = (new != base).nonzero()[:, 0]
    if len(positions) > most:
        return None, new.cpu().numpy().view(_UNSIGNED[itemsize])
    return positions.cpu().numpy(), new[positions].cpu().numpy().view(_UNSIGNED[itemsize])


# -- applying ----------------------------------------------------------------------------------------------------------


def apply(delta: Delta, target: Tensor, holds: State) -> None:
    """Make the weights `delta.after` of those `delta.before`.

    Args:
        target: [num_bytes] uint8 on the CPU, changed in place.
        holds: what the target holds. If this call does not return, it is still to be named as the base: the same delta
            can be applied again, and no other.

    Raises:
        WeightsError: the target does not hold the base. Nothing has been written.
    """
    if holds != delta.before:
        raise WeightsError(
            f"a delta from {delta.before.version} ({delta.before.digest}) to {delta.after.version} does not fit weights "
            f"{holds.version} ({holds.digest})"
        )
    if len(target) != delta.num_bytes:
        raise WeightsError(f"a delta of {delta.num_bytes} bytes does not fit weights of {len(target)}")
    flat = target.numpy()
    for _ in spread(lambda piece: piece.write(flat), delta.pieces):
        pass


class Chain:
    """The last deltas, for generators that missed some of them."""

    def __init__(self, max_deltas: int, max_bytes: int) -> None:
        """
        Args:
            max_deltas: kept at most.
            max_bytes: of their payloads, all together.
        """
        self._max_deltas, self._max_bytes = max_deltas, max_bytes
        self._deltas: deque[Delta] = deque()
        self.num_bytes = 0
        """Of the payloads of all that are kept."""

    def add(self, delta: Delta) -> None:
        """Keep the newest delta. If it does not begin where the last one ends, those before it are of no use."""
        if self._deltas and self._deltas[-1].after != delta.before:
            self.clear()
        self._deltas.append(delta)
        self.num_bytes += delta.packed_bytes
        while self._deltas and (len(self._deltas) > self._max_deltas or self.num_bytes > self._max_bytes):
            self.num_bytes -= self._deltas.popleft().packed_bytes

    def clear(self) -> None:
        self._deltas.clear()
        self.num_bytes = 0

    def since(self, state: State) -> list[Delta] | None:
        """The deltas that lead from `state` to the newest weights, in order; None: they are not kept, or more than a
        whole publication."""
        deltas = list(self._deltas)
        if deltas and state == deltas[-1].after:
            return []
        begin = next((index for index, delta in enumerate(deltas) if delta.before == state), None)
        if begin is None or sum(delta.packed_bytes for delta in deltas[begin:]) > deltas[-1].num_bytes:
            return None
        return deltas[begin:]


# -- the payload -------------------------------------------------------------------------------------------------------


class _Reader:
    """Takes a payload apart, and believes nothing that it says."""

    def __init__(self, payload: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        self._bytes = np.frombuffer(payload, np.uint8)
        self._at = 0

    def delta(self) -> Delta:
        header = self._take(_HEADER, 1)[0]
        if header["format"] != _FORMAT:
            raise WireError(f"a delta begins with {_FORMAT!r}, not with {bytes(header['format'])!r}")
        num_bytes = int(header["num_bytes"])
        records = self._take(_RECORD, int(header["num_pieces"])).tolist()
        pieces = tuple(self._piece(num_bytes, *record) for record in records)
        if self._at != len(self._bytes):
            raise WireError(f"a delta of {self._at} bytes has {len(self._bytes)}")
        before, after = _state(header["before"].tolist()), _state(header["after"].tolist())
        return Delta(before, after, num_bytes, pieces, payload=self._bytes)

    def _piece(self, limit: int, place: int, elements: int, changed: int, itemsize: int, is_sparse: int) -> Piece:
        if itemsize not in _UNSIGNED or is_sparse > 1 or place % itemsize:
            raise WireError(f"no piece has elements of {itemsize} bytes at {place} in form {is_sparse}")
        if not 0 < changed <= elements or place + elements * itemsize > limit:
            raise WireError(f"a piece has {changed} of {elements} elements from byte {place} on, of {limit} bytes")
        if not is_sparse:
            if changed != elements:
                raise WireError(f"a dense piece has {changed} of its {elements} elements")
            return Piece(place, elements, self._take(_UNSIGNED[itemsize], changed))
        counts = self._take(_UNSIGNED[4], -(-elements // BLOCK))
        positions = self._take(_UNSIGNED[2], changed)
        in_last = elements - BLOCK * (len(counts) - 1)
        if int(counts.sum(dtype=np.uint64)) != changed:
            raise WireError(f"the blocks of a piece have other than its {changed} changes")
        if counts[-1] and positions[changed - int(counts[-1]) :].max() >= in_last:
            raise WireError(f"a position is not below {in_last}, the length of its block")
        return Piece(place, elements, self._take(_UNSIGNED[itemsize], changed), positions, counts)

    def _take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """The next `count` numbers."""
        size = count * dtype.itemsize
        if self._at + _padded(size) > len(self._bytes):
            raise WireError(f"a delta of {len(self._bytes)} bytes says that {size} more begin at {self._at}")
        part = self._bytes[self._at : self._at + size].view(dtype)
        self._at += _padded(size)
        return part


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _numbers(state: State) -> tuple[int, int, int]:
    return state.version.lineage, state.version.number, int(state.digest, 16)


def _state(numbers: Sequence[int]) -> State:
    lineage, number, digest = numbers
    return State(PolicyVersion(lineage, number), f"{digest:016x}")
