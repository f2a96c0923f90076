"""The records of the journal of a run: their byte format, and how its segments are read and repaired.

A record has a small header. A delivered group also has a body:

    magic (4)  bytes of header (4)  bytes of body (4)  xxh3 of the lengths, header and body (8)  header  body

Each record can be read without the others: the digest detects a damaged one, and the magic marks the next whole one. The
digest covers every byte, so a damaged record is never misread.

Reading changes nothing and raises only if the folder cannot be read. Whole records around damage are kept, and damage is
reported by file and offset. Damage behind the last whole record of the last segment is the torn end of a write that was
never acknowledged: `repair` truncates it. Other damage stays in the file as evidence.

A start reads every segment once, and keeps only the records that may still matter (`read_rest`).
"""

import logging
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.data.prompts import PromptState
from asyncgrpo.errors import JournalError, WireError
from asyncgrpo.host import entries, refused_as, sync
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.codec import DIGEST_BYTES, Buffer, decode, digest_of, encode
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

# -- records and their bytes -------------------------------------------------------------------------------------------

MAGIC = b"\xa6AGJ"
_LENGTHS = struct.Struct("<II")
_FRAME_BYTES = len(MAGIC) + _LENGTHS.size + DIGEST_BYTES


class _RecordBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of the records. The struct's name is its tag."""


class RunStarted(_RecordBase, frozen=True):
    """A start of the run: the first record of every segment, so that a segment can be read alone."""

    lineage: int
    parent: PolicyVersion | None
    """Checkpoint that it resumed from, by lineage and step; None: it began with the model's folder."""
    compatibility_key: dict[str, str]
    """Settings by name that must be equal for a group of one start to be trained by another."""
    max_lag: int
    """Bound in force at its beginning."""
    prompts: PromptState
    config: dict[str, Any]
    """The whole configuration as plain values, for a replay."""
    policy: str
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
    max_lag: int
    """Bound in force at its lease."""


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
    message: Deliver, payload: Buffer, max_lag: int, head: Buffer | None = None
) -> tuple[Delivered, list[Buffer]]:
    """Return the record of a delivered group and its body in two parts.

    Args:
        max_lag: the bound in force at its lease.
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
    return [MAGIC + lengths + digest_of(lengths, header, *body) + header, *body]


@dataclass(frozen=True)
class Whole:
    """An undamaged record."""

    offset: int
    end: int
    record: JournalRecord
    body_bytes: int
    """Bytes of its body, the last ones before `end`."""


@dataclass(frozen=True)
class Damage:
    """Bytes without a whole record. At the end of a segment they are the torn last write."""

    offset: int
    end: int


def scan(data: bytes | mmap.mmap) -> Iterator[Whole | Damage]:
    """Yield the whole records of a segment and the damage between them, in order."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        found: Whole | Damage | None = _whole_at(view, offset)
        if found is None:
            found = Damage(offset, _next_whole(data, view, offset + 1))
        yield found
        offset = found.end


def _next_whole(data: bytes | mmap.mmap, view: memoryview, start: int) -> int:
    """Return the offset of the first whole record from `start` on; the number of bytes if there is none."""
    while (start := data.find(MAGIC, start)) >= 0:
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
    if digest_of(view[lengths_at:digest_at], view[header_at:body_at], view[body_at:end]) != view[digest_at:header_at]:
        return None
    try:
        record = _decoder.decode(view[header_at:body_at])
    except ValueError:
        return None  # written by another release
    return Whole(offset, end, record, body_bytes)


# -- reading and repairing ---------------------------------------------------------------------------------------------

SUFFIX = ".journal"


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{SUFFIX}"


@dataclass(frozen=True)
class Found:
    """A record and its location."""

    record: JournalRecord
    lineage: int
    """Lineage of the start that wrote it."""
    segment: int
    body_at: int
    body_bytes: int


@dataclass
class Segment:
    """One file of the journal."""

    number: int
    path: Path
    num_bytes: int
    found: list[Found] = field(default_factory=list)
    has_bodies: bool = False
    """True if a group in it can still be read."""
    damage: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    """Unfinished last write of a killed process, in the last segment only."""

    @property
    def damage_messages(self) -> list[str]:
        return [
            f"{self.path}, offset {damage.offset}: {damage.end - damage.offset} bytes without a record"
            for damage in self.damage
        ]


@dataclass
class History:
    """The journal of a run."""

    folder: Path
    segments: list[Segment]
    """Oldest first."""
    found: list[Found]
    """Whole records, oldest first; of `read_rest` those that may still matter."""

    @cached_property
    def starts(self) -> dict[int, RunStarted]:
        """Starts of the run by lineage."""
        return {found.record.lineage: found.record for found in self.found if isinstance(found.record, RunStarted)}

    @property
    def damage(self) -> list[str]:
        """One sentence per damaged place. A torn end is not damage."""
        return [sentence for segment in self.segments for sentence in segment.damage_messages]

    def group(self, found: Found) -> tuple[Deliver, bytes] | None:
        """Read a delivered group; None if its body was removed or does not match its header."""
        record = found.record
        assert isinstance(record, Delivered), record
        if not found.body_bytes:
            return None
        path = segment_path(self.folder, found.segment)
        try:
            with open(path, "rb") as file:
                file.seek(found.body_at)
                return unpack_delivered(record, file.read(found.body_bytes))
        except (OSError, WireError) as error:
            log.error("%s, offset %d: the group %s cannot be read: %s", path, found.body_at, record.lease_id, error)
            return None


def surviving_path(starts: Mapping[int, RunStarted], checkpoint: PolicyVersion | None) -> dict[int, int]:
    """Return the last step of each lineage whose weights still exist.

    Args:
        starts: of the run, by lineage.
        checkpoint: the end of the path; None: the model's folder.
    """
    path: dict[int, int] = {}
    at = checkpoint
    while at is not None:
        path[at.lineage] = at.number
        start = starts.get(at.lineage)
        if start is None:
            break  # that start kept no journal, so its parent is unknown
        at = start.parent
    # A start that resumed from weights on the path served them first, even if its own weights are gone.
    for lineage, start in sorted(starts.items()):
        if start.parent is None and at is None:
            path.setdefault(lineage, 0)
        elif start.parent is not None and is_on(path, start.parent):
            path.setdefault(lineage, start.parent.number)
    return path


def is_on(path: Mapping[int, int], version: PolicyVersion) -> bool:
    return version.number <= path.get(version.lineage, -1)


def read_history(folder: Path) -> History:
    """Read the journal in `folder`. A missing folder is an empty history.

    Raises:
        JournalError: the folder or a file in it cannot be read.
    """
    with refused_as(JournalError, f"the journal {folder} cannot be read"):
        segments = list(read_segments(folder))
    return History(folder, segments, [found for segment in segments for found in segment.found])


def read_rest(folder: Path, checkpoint: PolicyVersion | None, is_done: Callable[[int], bool]) -> History:
    """Read what a start needs: without the records of groups that were dropped, or trained on the path to the checkpoint.

    Segments are read one at a time, so a journal of millions of groups needs little memory.

    Args:
        checkpoint: that the start resumes from; None: it begins with the model's folder.
        is_done: returns True for a prompt index that is done in it.
    Raises:
        JournalError: the folder or a file in it cannot be read.
    """
    starts: dict[int, Found] = {}
    kept: list[Found] = []
    waiting: dict[str, Found] = {}  # delivered groups by lease id
    interruptions: Counter[int] = Counter()  # of a prompt since its last completion
    history = History(folder, [], [])
    with refused_as(JournalError, f"the journal {folder} cannot be read"):
        path = surviving_path(_starts_in(_paths(folder)), checkpoint)
        for segment in read_segments(folder):
            history.segments.append(segment)
            for found in segment.found:
                match record := found.record:
                    case RunStarted(lineage=lineage):
                        if starts.setdefault(lineage, found) is found:
                            kept.append(found)
                    case BoundChanged():
                        kept.append(found)
                    case Delivered(lease_id=lease_id, prompt_index=index):
                        waiting[lease_id] = found
                        interruptions.pop(index, None)
                    case Dropped(lease_id=lease_id, prompt_index=index):
                        waiting.pop(lease_id, None)
                        if not is_done(index):
                            kept.append(found)
                    case BatchIssued(version=version) if is_on(path, PolicyVersion(version.lineage, record.step)):
                        for lease_id in record.lease_ids:
                            waiting.pop(lease_id, None)
                    case Interrupted(prompt_indices=indices):
                        interruptions.update(index for index in indices if not is_done(index))
            segment.found = []
    left = Interrupted(generator_id="", prompt_indices=tuple(interruptions.elements()))
    history.found = [*kept, *waiting.values(), Found(left, 0, 0, 0, 0)]
    return history


def _starts_in(paths: Iterable[Path]) -> dict[int, RunStarted]:
    """Return the starts that wrote these segments, by lineage, from the first record of each segment."""
    starts = {}
    for path in paths:
        with _mapped(path) as data:
            whole = next((item for item in scan(data) if isinstance(item, Whole)), None)
            if whole is not None and isinstance(whole.record, RunStarted):
                starts[whole.record.lineage] = whole.record
    return starts


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in entries(folder) if path.suffix == SUFFIX and path.stem.isdigit())


def read_segments(folder: Path) -> Iterator[Segment]:
    """Read the segments of the journal in `folder` one at a time, oldest first. Raises OSError."""
    paths = _paths(folder)
    for path in paths:
        yield read_segment(path, path == paths[-1])


def read_run(run: Path) -> History:
    """Read the journal of the run in this folder.

    Raises:
        JournalError: the journal is missing, or holds no whole record of a start.
    """
    starts_of(run)
    return read_history(run / "journal")


def starts_of(run: Path) -> dict[int, RunStarted]:
    """Return the starts of the run in this folder by lineage. Raises JournalError as `read_run` does."""
    if not run.is_dir():
        raise JournalError(f"run folder {run} does not exist")
    folder = run / "journal"
    with refused_as(JournalError, f"the journal {folder} cannot be read"):
        starts = _starts_in(_paths(folder))
        damage = [] if starts else [one for segment in read_segments(folder) for one in segment.damage_messages]
    if damage:
        raise JournalError(f"the journal of {run} cannot be read: {damage[0]}")
    if not starts:
        raise JournalError(f"{run} has no journal (it ran before there was one, or with buffer.durability=memory)")
    return starts


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """Map the bytes of a segment; an empty file cannot be mapped and yields an empty string."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def read_segment(path: Path, is_last: bool = False) -> Segment:
    """Read one segment. Raises OSError."""
    segment, lineage = Segment(int(path.stem), path, path.stat().st_size), 0
    with _mapped(path) as data:
        for item in scan(data):
            if isinstance(item, Whole):
                lineage = item.record.lineage if isinstance(item.record, RunStarted) else lineage
                body_at = item.end - item.body_bytes
                segment.found.append(Found(item.record, lineage, segment.number, body_at, item.body_bytes))
                segment.has_bodies |= item.body_bytes > 0
            elif is_last and item.end == segment.num_bytes:
                segment.torn = item
            else:
                segment.damage.append(item)
    return segment


def repair(history: History) -> None:
    """Repair the journal for a new start: log damage, truncate the torn end, remove unfinished rewrites.

    Raises:
        JournalError: a file cannot be changed.
    """
    for sentence in history.damage:
        log.error("the journal is damaged: %s; its groups are generated again", sentence)
    try:
        for left in history.folder.glob(f"*{SUFFIX}.tmp"):
            left.unlink()
        for segment in history.segments:
            if segment.torn is not None:
                log.warning("%s: cut a torn end of %d bytes", segment.path, segment.num_bytes - segment.torn.offset)
                cut(segment.path, segment.torn.offset)
    except OSError as error:
        raise JournalError(f"the journal {history.folder} cannot be repaired: {error}") from error


def cut(path: Path, num_bytes: int) -> None:
    """Truncate a file to `num_bytes` and sync it, so that a crash does not restore the rest. Raises OSError."""
    os.truncate(path, num_bytes)
    sync(path)
