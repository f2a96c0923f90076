"""Records of the journal and their byte format. It uses no files and no clock.

A record has a small header. A delivered group also has a body:

    magic (4)  bytes of header (4)  bytes of body (4)  xxh3 of the lengths, header and body (8)  header  body

Each record can be read without the others: the digest detects a damaged one, and the magic marks the next whole one. The
digest covers every byte, so a damaged record is never misread.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from asyncgrpo.data.prompts import PromptState
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.codec import DIGEST_BYTES, Buffer, decode, encode
from asyncgrpo.wire.rollouts import Deliver

MAGIC = b"\xa6AGJ"
_LENGTHS = struct.Struct("<II")
_FRAME_BYTES = len(MAGIC) + _LENGTHS.size + DIGEST_BYTES
FORMAT = 1


class _RecordBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of the records. The struct's name is its tag."""


class RunStarted(_RecordBase, frozen=True):
    """A start of the run: the first record of every segment, so that a segment can be read alone."""

    format: int
    lineage: int
    parent: PolicyVersion | None
    """Checkpoint that it resumed from, by lineage and step; None: it began with the model's folder."""
    compatibility_key: dict[str, str]
    """Settings by name that must be equal for a group of one start to be trained by another."""
    max_lag: int
    """Bound in force at its beginning."""
    prompts: PromptState
    config: dict[str, Any] = {}
    """The whole configuration as plain values, for a replay; empty in journals of older releases."""
    policy: str = "wait"
    """`buffer.policy`: it decides which lag `max_lag` bounds."""
    max_lag_is_auto: bool = False
    """True if the run changes `max_lag` (`BoundChanged`), and groups of earlier starts keep the bound of their lease."""


class Delivered(_RecordBase, frozen=True):
    """An accepted group. The body is its `Deliver` in two frames; it is removed once the group is not needed any more."""

    lease_id: str
    prompt_index: int
    tokens: int
    """Sampled tokens of all its completions."""
    versions: tuple[PolicyVersion, ...]
    """All versions that sampled in it, sorted, oldest first."""
    head_bytes: int
    """Bytes of the first frame in the body; the rest is the payload."""
    max_lag: int | None = None
    """Bound in force at its lease; None: that of the start that wrote the record."""


class BatchIssued(_RecordBase, frozen=True):
    """The manifest of a batch, written before the learner gets the batch."""

    step: int
    """Number of the optimizer step; a checkpoint of this step or a later one contains it."""
    version: PolicyVersion
    """Weights at the start of the step."""
    lease_ids: tuple[str, ...]
    """In the order of the batch."""


class Dropped(_RecordBase, frozen=True):
    """An untrained group, or a lease without a group."""

    lease_id: str
    prompt_index: int
    reason: str
    is_final: bool
    """True if the prompt is done; otherwise it is issued again."""


class Interrupted(_RecordBase, frozen=True):
    """The end of a generator with these prompts in flight. Their leases are freed."""

    generator_id: str
    prompt_indices: tuple[int, ...]


class BoundChanged(_RecordBase, frozen=True):
    """A new bound on lag for later leases: `buffer.max_lag` is `auto`, or the operator changed it."""

    version: PolicyVersion
    """The learner's version at the change."""
    max_lag: int


class Committed(_RecordBase, frozen=True):
    """A checkpoint on disk."""

    step: int
    prompts: PromptState


JournalRecord = RunStarted | Delivered | BatchIssued | Dropped | Interrupted | BoundChanged | Committed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[JournalRecord] = msgspec.msgpack.Decoder(JournalRecord)


def delivered(
    message: Deliver, payload: Buffer, max_lag: int | None = None, head: Buffer | None = None
) -> tuple[Delivered, list[Buffer]]:
    """Return the record of a delivered group and its body in two parts.

    Args:
        max_lag: the bound in force at its lease; None: that of the start that writes the record.
        head: the frame of the message, written as received; None: it is encoded here.
    """
    if head is None:
        head = encode(message, payload)[0]
    record = Delivered(
        lease_id=message.lease_id,
        prompt_index=message.prompt_index,
        tokens=message.num_tokens,
        versions=tuple(message.versions),
        head_bytes=len(head),
        max_lag=max_lag,
    )
    return record, [head, payload]


def unpack_delivered(record: Delivered, body: Buffer) -> tuple[Deliver, bytes]:
    """Unpack the group of a `Delivered` whose body is still there. Raises WireError."""
    view = memoryview(body)
    message, payload = decode([view[: record.head_bytes], view[record.head_bytes :]])
    assert isinstance(message, Deliver), message
    return message, bytes(payload)


def pack(record: JournalRecord, body: tuple[Buffer, ...] | list[Buffer] = ()) -> list[Buffer]:
    """Pack a record into the parts to write, in order."""
    header = _encoder.encode(record)
    lengths = _LENGTHS.pack(len(header), sum(map(len, body)))
    return [MAGIC + lengths + _digest(lengths, header, *body) + header, *body]


def _digest(*parts: Buffer) -> bytes:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


@dataclass(frozen=True)
class Whole:
    """An undamaged record."""

    offset: int
    end: int
    record: JournalRecord
    body: memoryview


@dataclass(frozen=True)
class Damage:
    """Bytes without a whole record. At the end of a segment they are the torn last write."""

    offset: int
    end: int


def scan(data: Buffer | mmap.mmap) -> Iterator[Whole | Damage]:
    """Yield the whole records of a segment and the damage between them, in order."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        found: Whole | Damage | None = _whole_at(view, offset)
        if found is None:
            found = Damage(offset, _next_whole(data, view, offset + 1))
        yield found
        offset = found.end


def _next_whole(data: Buffer | mmap.mmap, view: memoryview, start: int) -> int:
    """Return the offset of the first whole record from `start` on; the number of bytes if there is none."""
    text = bytes(data) if isinstance(data, memoryview) else data
    while (start := text.find(MAGIC, start)) >= 0:
        if _whole_at(view, start) is not None:
            return start
        start += 1
    return len(view)


def _whole_at(view: memoryview, offset: int) -> Whole | None:
    lengths_at = offset + len(MAGIC)
    digest_at = lengths_at + _LENGTHS.size
    header_at = offset + _FRAME_BYTES
    if header_at > len(view) or view[offset:lengths_at] != MAGIC:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack_from(view, lengths_at)
    body_at, end = header_at + header_bytes, header_at + header_bytes + body_bytes
    if end > len(view):
        return None
    if _digest(view[lengths_at:digest_at], view[header_at:body_at], view[body_at:end]) != view[digest_at:header_at]:
        return None
    try:
        record = _decoder.decode(view[header_at:body_at])
    except msgspec.MsgspecError:
        return None  # written by another release
    return Whole(offset, end, record, view[body_at:end])
