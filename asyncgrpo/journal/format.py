"""The records of the journal and their format in bytes. No files, no clock.

A record has a small header, and a body if it is a delivered group:

    magic (4)  bytes of header (4)  bytes of body (4)  xxh3 of all that follows and of the lengths (8)  header  body

Each record can be read without the others: the digest shows a damaged one, and the magic leads to the next whole one.
The digest covers every byte, so a damaged record is never misread.
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
    """Base of the records; the struct's name is its tag."""


class RunStarted(_RecordBase, frozen=True):
    """A start of the run. It is the first record of every segment, so that a segment can be read without the others."""

    format: int
    lineage: int
    parent: PolicyVersion | None
    """The checkpoint that it goes on from, by lineage and step. None: it begins with the model's folder."""
    compatibility_key: dict[str, str]
    """What must be equal for a group of one start to be trained by another, by name."""
    max_lag: int
    """The bound in force when it began."""
    prompts: PromptState
    config: dict[str, Any] = {}
    """The whole configuration as plain values, for a replay; empty where an older release wrote the journal."""
    policy: str = "wait"
    """`buffer.policy`, which says what lag `max_lag` bounds."""
    max_lag_is_auto: bool = False
    """Whether `max_lag` changes by itself (`BoundChanged`), and groups of earlier starts keep that of their lease too."""


class Delivered(_RecordBase, frozen=True):
    """A group that was kept. The body is its `Deliver` in two frames, until the group is of no use any more."""

    lease_id: str
    prompt_index: int
    tokens: int
    """Sampled tokens of all its completions."""
    versions: tuple[PolicyVersion, ...]
    """All versions that sampled in it, each once, oldest first."""
    head_bytes: int
    """Bytes of the first frame in the body; the rest is the payload."""
    max_lag: int | None = None
    """The bound in force at its lease; None: that of the start that wrote it."""


class BatchIssued(_RecordBase, frozen=True):
    """The manifest of a batch. It is written before the learner gets the batch."""

    step: int
    """Optimizer steps done once it is trained; a checkpoint of this step or a later one holds it."""
    version: PolicyVersion
    """The weights from which the step starts."""
    lease_ids: tuple[str, ...]
    """In the order of the batch."""


class Dropped(_RecordBase, frozen=True):
    """A group that is not trained, or a lease whose group did not come."""

    lease_id: str
    prompt_index: int
    reason: str
    is_final: bool
    """Whether the prompt is done; else it is issued again."""


class Interrupted(_RecordBase, frozen=True):
    """The end of a generator that worked on these prompts. Their leases are free again."""

    generator_id: str
    prompt_indices: tuple[int, ...]


class BoundChanged(_RecordBase, frozen=True):
    """Another bound on staleness, for the groups leased from now on: `buffer.max_lag` is `auto`, or a person changed it."""

    version: PolicyVersion
    """The weights that are served."""
    max_lag: int


class Committed(_RecordBase, frozen=True):
    """A checkpoint that is on the disk."""

    step: int
    prompts: PromptState


class Settled(_RecordBase, frozen=True):
    """The head of the summary of the first segments, in a file of its own. The records that still count follow it."""

    through: int
    """Number of the last segment that it sums up."""
    at: PolicyVersion
    """The checkpoint, by lineage and step, that holds what was trained of their groups."""
    num_records: int


JournalRecord = RunStarted | Delivered | BatchIssued | Dropped | Interrupted | BoundChanged | Committed | Settled

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[JournalRecord] = msgspec.msgpack.Decoder(JournalRecord)


def delivered(
    message: Deliver, payload: Buffer, max_lag: int | None = None, head: Buffer | None = None
) -> tuple[Delivered, list[Buffer]]:
    """The record of a delivered group, and its body in two parts.

    Args:
        max_lag: the bound in force at its lease; None: that of the start that writes the record.
        head: the frame that brought the message, which is then written as it came; None: there was none, it is encoded.
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
    """Unpack the group of a `Delivered` that still has its body. Raises WireError."""
    view = memoryview(body)
    message, payload = decode([view[: record.head_bytes], view[record.head_bytes :]])
    assert isinstance(message, Deliver), message
    return message, bytes(payload)


def pack(record: JournalRecord, body: tuple[Buffer, ...] | list[Buffer] = ()) -> list[Buffer]:
    """Pack a record into the parts that are written one after the other."""
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
    """A record that is undamaged."""

    offset: int
    end: int
    record: JournalRecord
    body: memoryview


@dataclass(frozen=True)
class Damage:
    """Bytes that are no record. If no whole record follows, they are what a crash left of the last write."""

    offset: int
    end: int


def scan(data: Buffer | mmap.mmap) -> Iterator[Whole | Damage]:
    """The whole records of a segment and the damage between them, in order."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        found: Whole | Damage | None = _whole_at(view, offset)
        if found is None:
            found = Damage(offset, _next_whole(data, view, offset + 1))
        yield found
        offset = found.end


def _next_whole(data: Buffer | mmap.mmap, view: memoryview, start: int) -> int:
    """The offset of the first whole record from `start` on; the end of the bytes if there is none."""
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
        return None  # another release wrote it
    return Whole(offset, end, record, view[body_at:end])
