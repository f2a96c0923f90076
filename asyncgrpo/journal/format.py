"""What the journal says, and how it says it in bytes. No files, no clock.

A record is a small header, which the ledger is made of, and a body, which only a delivered group has:

    magic (4)  bytes of header (4)  bytes of body (4)  xxh3 of all that follows and of the lengths (8)  header  body

Each record stands for itself: a damaged one is found by its digest and named, and the next whole one is found by its
magic. What remains is never misread: every byte is under a digest.
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


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of the records; the struct's name is its tag."""


class RunStarted(_Record, frozen=True):
    """A start of the run. The first record of every segment, so that a segment can be read without the others."""

    format: int
    lineage: int
    parent: PolicyVersion | None
    """The checkpoint it goes on from: its lineage and step. None: the model's folder."""
    compatibility_key: dict[str, str]
    """What must be the same for a group of one start to be trained by another, by name."""
    max_lag: int
    prompts: PromptState
    config: dict[str, Any] = {}
    """The whole configuration, as plain values, for a replay; empty where an older release wrote the journal."""
    policy: str = "wait"
    """`buffer.policy`: which lag `max_lag` bounds."""


class Delivered(_Record, frozen=True):
    """A group came and was kept. The body is the `Deliver` as it travels, until the group is settled."""

    lease_id: str
    prompt_index: int
    tokens: int
    """Sampled tokens of all its completions."""
    versions: tuple[PolicyVersion, ...]
    """All that sampled in it, each once, oldest first."""
    head_bytes: int
    """Of the body, its first frame; the rest is the payload."""


class BatchIssued(_Record, frozen=True):
    """The manifest of a batch: written before the learner gets it."""

    step: int
    """Optimizer steps done once it is trained; a checkpoint of this step or a later one holds it."""
    version: PolicyVersion
    """The weights that the step starts from."""
    lease_ids: tuple[str, ...]
    """In the order of the batch."""


class Dropped(_Record, frozen=True):
    """A group, or a lease of which no group came, is not to be trained."""

    lease_id: str
    prompt_index: int
    reason: str
    is_final: bool
    """The prompt is done; else it is issued again."""


class Interrupted(_Record, frozen=True):
    """A generator ended while it worked on these prompts. Their leases are free again."""

    generator_id: str
    prompt_indices: tuple[int, ...]


class Committed(_Record, frozen=True):
    """A checkpoint is on disk."""

    step: int
    prompts: PromptState


Record = RunStarted | Delivered | BatchIssued | Dropped | Interrupted | Committed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def delivered(message: Deliver, payload: Buffer) -> tuple[Delivered, list[Buffer]]:
    """The record of a delivered group, and its body in two parts."""
    head, body = encode(message, payload)
    versions = {span.version for rollout in message.rollouts for span in rollout.spans}
    record = Delivered(
        lease_id=message.lease_id,
        prompt_index=message.prompt_index,
        tokens=sum(rollout.num_tokens for rollout in message.rollouts),
        versions=tuple(sorted(versions)),
        head_bytes=len(head),
    )
    return record, [head, body]


def delivered_again(record: Delivered, body: Buffer) -> tuple[Deliver, bytes]:
    """The group of a `Delivered` that still has its body. Raises WireError."""
    view = memoryview(body)
    message, payload = decode([view[: record.head_bytes], view[record.head_bytes :]])
    assert isinstance(message, Deliver), message
    return message, bytes(payload)


def pack(record: Record, body: tuple[Buffer, ...] | list[Buffer] = ()) -> list[Buffer]:
    """A record in the parts in which it is to be written."""
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
    """A record that is as it was written."""

    offset: int
    end: int
    record: Record
    body: memoryview


@dataclass(frozen=True)
class Damage:
    """Bytes that are no record. With nothing whole behind them they are what a crash left of the last write."""

    offset: int
    end: int


def scan(data: Buffer | mmap.mmap) -> Iterator[Whole | Damage]:
    """Everything in the bytes of a segment, in order: records, and between them what is damaged."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        found: Whole | Damage | None = _whole_at(view, offset)
        if found is None:
            found = Damage(offset, _next_whole(data, view, offset + 1))
        yield found
        offset = found.end


def _next_whole(data: Buffer | mmap.mmap, view: memoryview, start: int) -> int:
    """Where the first whole record from `start` on begins; the end of the bytes if there is none."""
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
        return None  # of another release
    return Whole(offset, end, record, view[body_at:end])
