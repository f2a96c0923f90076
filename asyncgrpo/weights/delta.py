"""Lossless deltas between two publications: the positions and new bits of the elements that differ.

A small step changes few bfloat16 weights. Elements are compared as integers, so NaN, infinities and -0.0 need no special case.
A delta holds pieces of tensors: blocks with the positions of their changes, and runs of which too many elements change.
Values are absolute, so applying a delta again is harmless. A delta names its base and applies to that base only; the digest of
the result is compared with that of what the learner has.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.digest import spread

BLOCK = 2**16
"""Elements that a 16-bit position can address."""
AT_ONCE = 16 * BLOCK
"""Elements compared at once: they and the scratch memory fit in a core's cache."""
SPARSE_UP_TO = 0.5
"""Largest size of positions and new bits, as a share of all bits of a run: single elements cost more to write than a run."""
LEAST_SAVING = 4
"""Smallest ratio of the bytes of the weights to those of a delta at which deltas are sent."""


class Span(NamedTuple):
    """One tensor in a publication."""

    start: int
    """Offset of its first byte."""
    num_bytes: int
    itemsize: int
    """Bytes of an element: 1, 2, 4 or 8. Starts and lengths are multiples of it."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """New bits of some elements of one tensor."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    """Offset of the first byte of the piece in the publication."""
    itemsize: int
    """Bytes of an element."""
    values: memoryview
    """New bits of each element, in order."""
    positions: memoryview = memoryview(b"")
    """[elements] uint16 from `start`, in elements; empty: consecutive elements."""

    @property
    def num_bytes(self) -> int:
        return len(self.values) + len(self.positions)

    def write(self, target: NDArray[np.uint8]) -> None:
        """Write the new bits into [num_bytes] bytes of a publication. Raises an error: they lie outside."""
        values = np.frombuffer(self.values, f"<u{self.itemsize}")
        if not self.positions:
            target[self.start : self.start + values.nbytes].view(values.dtype)[:] = values
            return
        block = target[self.start : self.start + BLOCK * self.itemsize]
        block = block[: len(block) // self.itemsize * self.itemsize].view(values.dtype)
        block[np.frombuffer(self.positions, "<u2")] = values


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """The changes from the weights `before` to the weights `after`."""

    before: PolicyVersion
    after: PolicyVersion
    pieces: tuple[Piece, ...]

    def apply(self, target: Tensor) -> None:
        """Update weights, [num_bytes] uint8 on the CPU, that hold `before` or are part old, part new.

        Raises:
            WeightsError: a piece lies outside of the weights. They are torn then.
        """
        flat = target.numpy()
        try:
            for _ in spread(lambda piece: piece.write(flat), self.pieces):
                pass
        except (TypeError, ValueError, IndexError) as error:
            raise WeightsError(f"a delta to {self.after} does not fit {len(flat)} bytes: {error}") from error


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Delta)


def to_bytes(delta: Delta) -> bytes:
    return _encoder.encode(delta)


def from_bytes(payload: bytes | memoryview) -> Delta:
    """Decode a payload of `to_bytes`; the pieces are views of it. Raises WeightsError: it is malformed."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsError(f"a delta of {len(payload)} bytes is malformed: {error}") from error


# -- making them -------------------------------------------------------------------------------------------------------


def follow(mirror: Tensor, new: Tensor, spans: Iterable[Span], most: int) -> tuple[Piece, ...] | None:
    """Update the mirror to `new` and return the changes; None: they exceed `most` bytes, and the mirror is part old, part new.

    If `new` is overwritten meanwhile, the mirror still agrees with the returned pieces.

    Args:
        mirror, new: [n] uint8 on the CPU, laid out alike.
    """
    old, now = mirror.numpy(), new.numpy()
    pieces: list[Piece] = []
    size = 0
    for some in spread(lambda part: list(_compare(now, old, part)), (part for span in spans for part in _parts(span))):
        for piece in some:
            size += piece.num_bytes
            if size > most:
                return None
            piece.write(old)
            pieces.append(piece)
    return tuple(pieces)


def _parts(span: Span) -> Iterator[Span]:
    size = AT_ONCE * span.itemsize
    for begin in range(0, span.num_bytes, size):
        yield span._replace(start=span.start + begin, num_bytes=min(size, span.num_bytes - begin))


def _compare(new: NDArray[np.uint8], base: NDArray[np.uint8], span: Span) -> Iterator[Piece]:
    """Yield the changes of up to `AT_ONCE` elements."""
    start, size = span.start, span.itemsize
    ours, theirs = new[start : start + span.num_bytes], base[start : start + span.num_bytes]
    positions = _differing(ours, theirs, size)
    if len(positions) * (size + 2) > SPARSE_UP_TO * span.num_bytes:
        yield Piece(start, size, memoryview(ours.tobytes()))
        return
    values, within = ours.view(f"<u{size}")[positions], (positions % BLOCK).astype("<u2")
    edges = np.searchsorted(positions, range(0, len(ours) // size + BLOCK, BLOCK)).tolist()
    for block, (first, end) in enumerate(itertools.pairwise(edges)):
        if first < end:
            place = start + block * BLOCK * size
            yield Piece(place, size, memoryview(values[first:end].tobytes()), memoryview(within[first:end].tobytes()))


def _differing(ours: NDArray[np.uint8], theirs: NDArray[np.uint8], itemsize: int) -> NDArray[np.int64]:
    """Return the positions of the elements that differ, ascending.

    Words of 8 bytes are compared first, if the length allows it. If few differ, elements are compared in those words only.
    """
    word = next(size for size in (8, 4, 2, 1) if len(ours) % size == 0 and size >= itemsize)
    new, base = ours.view(f"<u{word}"), theirs.view(f"<u{word}")
    unequal = new != base
    if np.count_nonzero(unequal) * 4 >= len(unequal):
        return np.flatnonzero(ours.view(f"<u{itemsize}") != theirs.view(f"<u{itemsize}"))
    words, per_word = np.flatnonzero(unequal), word // itemsize
    within = np.flatnonzero((new[words] ^ base[words]).view(f"<u{itemsize}"))
    return words[within // per_word] * per_word + within % per_word


class Packed(NamedTuple):
    """An encoded delta."""

    before: PolicyVersion
    after: PolicyVersion
    payload: bytes
