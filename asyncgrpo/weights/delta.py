"""Lossless deltas between two publications: the positions and new bits of the elements that differ.

A small step changes few bfloat16 weights. A delta holds pieces: runs of up to `PIECE` elements of one tensor, compared as
integers, so NaN, infinities and -0.0 need no special case. A piece without changes is left out, one with few is sparse, one
with many is dense. A sparse piece lists 16-bit positions within blocks of 2^16 elements, and the count of every block.

    payload = header | one record per piece | bodies         little-endian, every array aligned to 8 bytes
    sparse body = changes in each block [u32] | positions [u16] | new bits       dense body = new bits

Values are absolute, so applying a delta is idempotent. A delta names its base and applies to that base only.
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
from asyncgrpo.weights.digest import spread

BLOCK = 2**16
"""Elements that a 16-bit position can address."""
PIECE = 16 * BLOCK
"""Elements compared at once: they and the scratch memory fit in a core's cache."""
SPARSE_UP_TO = 0.5
"""Largest size of a sparse piece, as a share of its dense size: single elements cost more to write than a run."""
LEAST_SAVING = 4
"""Smallest ratio of the bytes of the weights to those of a delta at which deltas are sent."""
SKIPPED, MOST_SKIPPED = 4, 256
"""Number of versions that skip the comparison after one that changed too much, at first and at most."""

_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RECORD = np.dtype([("place", "<u8"), ("elements", "<u4"), ("changed", "<u4"), ("itemsize", "<u4"), ("sparse", "<u4")])
_HEADER = np.dtype(
    [("format", "S8"), ("before", "<u8", 3), ("after", "<u8", 3), ("num_bytes", "<u8"), ("num_pieces", "<u8")]
)
_FORMAT = b"delta 1"


class Span(NamedTuple):
    """One tensor, or a shard of one, in a flat byte array."""

    start: int
    """Offset of its first byte in the array."""
    num_bytes: int
    itemsize: int
    """Bytes of an element: 1, 2, 4 or 8. Starts, lengths and places are multiples of it."""
    place: int
    """Offset of its first byte in the whole publication."""


class State(NamedTuple):
    """The weights that an arena holds."""

    version: PolicyVersion
    digest: str
    """See `weights.digest`: 16 hex digits."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The changes of consecutive elements of one tensor."""

    place: int
    """Offset of its first byte in the publication."""
    elements: int
    values: NDArray[Any]
    """[changed] new bits, unsigned integers of the element's size; of all elements if the piece is dense."""
    positions: NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, "<u2"))
    """[changed] positions within their blocks; empty if the piece is dense."""
    counts: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, "<u4"))
    """[blocks] number of changes in every block."""

    @property
    def is_sparse(self) -> bool:
        return len(self.counts) > 0

    @property
    def num_bytes(self) -> int:
        """Size of its body in a payload, bytes."""
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
    """The changes from the weights `before` to the weights `after`."""

    before: State
    after: State
    num_bytes: int
    """Size of the whole publication, bytes."""
    pieces: tuple[Piece, ...]
    payload: NDArray[np.uint8] | None = None
    """The payload that it was decoded from."""

    @property
    def changed(self) -> int:
        """Number of elements sent: the changed ones, and all others of dense pieces."""
        return sum(len(piece.values) for piece in self.pieces)

    @property
    def packed_bytes(self) -> int:
        """Size of its payload, bytes."""
        return _HEADER.itemsize + sum(_RECORD.itemsize + piece.num_bytes for piece in self.pieces)

    def to_bytes(self) -> NDArray[np.uint8]:
        """Encode the delta as the payload that `from_bytes` reads: [packed_bytes] uint8."""
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
        """Decode a payload of `to_bytes`. The arrays of the delta are views of `payload`.

        Every length, place and position is checked, so that the delta writes nothing outside `num_bytes`.

        Raises:
            WireError: the payload is not a valid delta.
        """
        return _Reader(payload).delta()


# -- encoding ----------------------------------------------------------------------------------------------------------


def encode(new: Tensor, base: Tensor, spans: Iterable[Span]) -> tuple[Piece, ...]:
    """Return the pieces of `spans` in which `new` differs from `base`, see `compare`."""
    return tuple(compare(new, base, spans))


def compare(new: Tensor, base: Tensor, spans: Iterable[Span]) -> Iterator[Piece]:
    """Yield the pieces of `spans` in which `new` differs from `base`, in order.

    Every learner rank can compare its own shards: the concatenated pieces of all ranks are those of the whole.
    Several threads compare a few pieces ahead. The caller may write to the bytes of a piece that it has received.

    Args:
        new: [n] uint8, on the CPU or a GPU, which contains the spans.
        base: [n] uint8 on the same device, laid out like `new`.
    """
    pieces = spread(lambda part: _compare(new, base, part), (part for span in spans for part in _parts(span)))
    return (piece for piece in pieces if piece is not None)


def follow(mirror: Tensor, new: Tensor, spans: Iterable[Span], most: int) -> tuple[Piece, ...] | None:
    """Update the mirror to `new` and return the changes; None: they exceed `most` bytes, and the mirror is part old, part new.

    If `new` is overwritten meanwhile, the mirror still agrees with the returned pieces.

    Args:
        mirror, new: [n] uint8 on the CPU, laid out alike; the place of each span equals its start.
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
    """Exponential backoff of comparisons: after each version that changed too much, twice as many versions are skipped."""

    def __init__(self) -> None:
        self._left, self._next = 0, SKIPPED

    def is_due(self) -> bool:
        """Return True if the next version is to be compared. Call it once per version."""
        self._left = max(self._left - 1, 0)
        return not self._left

    def note(self, *, pays: bool) -> None:
        """Note that a compared version changed little enough for a delta (`pays`), or too much."""
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
    """Return the changes of up to `PIECE` elements; None: there are none."""
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
    """Return the positions of the elements that differ, ascending; None: more than `most`.

    Words of 8 bytes are compared first, if the length allows it. If few differ, elements are compared in those words only.
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
    """Do as `_differing` on the tensors' device, and return the bits to send too. Only results are copied to the host."""
    new, base = ours.view(_SIGNED[itemsize]), theirs.view(_SIGNED[itemsize])
    positions = (new != base).nonzero()[:, 0]
    if len(positions) > most:
        return None, new.cpu().numpy().view(_UNSIGNED[itemsize])
    return positions.cpu().numpy(), new[positions].cpu().numpy().view(_UNSIGNED[itemsize])


# -- applying ----------------------------------------------------------------------------------------------------------


def apply(delta: Delta, target: Tensor, holds: State) -> None:
    """Update weights in place from `delta.before` to `delta.after`.

    Args:
        target: [num_bytes] uint8 on the CPU.
        holds: state of the target. After an interrupted call it stays the base: only the same delta can be applied again.

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
    """The latest deltas, kept for generators that missed some of them."""

    def __init__(self, max_deltas: int, max_bytes: int) -> None:
        """
        Args:
            max_deltas: largest number of deltas.
            max_bytes: largest total size of their payloads.
        """
        self._max_deltas, self._max_bytes = max_deltas, max_bytes
        self._deltas: deque[Delta] = deque()
        self.num_bytes = 0
        """Total size of the payloads."""

    def add(self, delta: Delta) -> None:
        """Append the newest delta. If its base is not the state after the last one, the earlier deltas are dropped."""
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
        """Return the deltas from `state` to the newest weights, in order; None: some are not kept, or together they are
        larger than a whole publication."""
        deltas = list(self._deltas)
        if deltas and state == deltas[-1].after:
            return []
        begin = next((index for index, delta in enumerate(deltas) if delta.before == state), None)
        if begin is None or sum(delta.packed_bytes for delta in deltas[begin:]) > deltas[-1].num_bytes:
            return None
        return deltas[begin:]


# -- the payload -------------------------------------------------------------------------------------------------------


class _Reader:
    """Decodes a payload and validates every number in it."""

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
            raise WireError(f"a piece has invalid elements: {itemsize} bytes at {place}, form {is_sparse}")
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
            raise WireError(f"the blocks of a piece do not add up to its {changed} changes")
        if counts[-1] and positions[changed - int(counts[-1]) :].max() >= in_last:
            raise WireError(f"a position is beyond its block of {in_last} elements")
        return Piece(place, elements, self._take(_UNSIGNED[itemsize], changed), positions, counts)

    def _take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the next `count` numbers."""
        size = count * dtype.itemsize
        if self._at + _padded(size) > len(self._bytes):
            raise WireError(f"a delta of {len(self._bytes)} bytes is truncated: {size} more begin at {self._at}")
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
