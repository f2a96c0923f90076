"""Reads and repairs the journal of a run: its segments, the whole records in them, and the damage.

Reading changes nothing and raises only when the folder cannot be read. The whole records around damage count, and the
damage is named by file and offset. Damage behind the last whole record of the last segment is the torn end of a write
that was never acknowledged; `repair` cuts it off. Other damage stays in the file as evidence.
"""

import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from asyncgrpo.errors import JournalError, WireError
from asyncgrpo.journal.format import Damage, Delivered, JournalRecord, RunStarted, Whole, scan, unpack_delivered
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

SUFFIX = ".journal"


def segment_path(folder: Path, number: int) -> Path:
    """The file of the segment with this number."""
    return folder / f"{number:08d}{SUFFIX}"


@dataclass(frozen=True)
class Found:
    """A record and where it stands on the disk."""

    record: JournalRecord
    lineage: int
    """The lineage of the start that wrote it."""
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
    damage: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    """The unfinished last write of a process that was killed; only in the last segment."""

    @property
    def has_bodies(self) -> bool:
        """Whether a group in it can still be read."""
        return any(found.body_bytes for found in self.found)


@dataclass
class History:
    """The whole journal of a run, oldest segment first."""

    folder: Path
    segments: list[Segment]

    @property
    def found(self) -> Iterator[Found]:
        """All whole records, oldest first."""
        for segment in self.segments:
            yield from segment.found

    @cached_property
    def starts(self) -> dict[int, RunStarted]:
        """The starts of the run by lineage."""
        return {found.record.lineage: found.record for found in self.found if isinstance(found.record, RunStarted)}

    @property
    def damage(self) -> list[str]:
        """A sentence for each damaged place; a torn end is not damage."""
        return [
            f"{segment.path}, offset {damage.offset}: {damage.end - damage.offset} bytes are no record"
            for segment in self.segments
            for damage in segment.damage
        ]

    def group(self, found: Found) -> tuple[Deliver, bytes] | None:
        """Read a delivered group; None where its body is gone or does not fit its header."""
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


def read_history(folder: Path) -> History:
    """Read the journal in `folder`; a missing folder is an empty history.

    Raises:
        JournalError: the folder or a file in it cannot be read.
    """
    try:
        paths = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())
        segments = [_read_segment(path, is_last=path == paths[-1]) for path in paths]
    except OSError as error:
        raise JournalError(f"the journal {folder} cannot be read: {error.strerror}") from error
    return History(folder, segments)


def read_run(run: Path) -> History:
    """Read the journal of the run in this folder.

    Raises:
        JournalError: there is no journal, or none of its records of a start is whole.
    """
    if not run.is_dir():
        raise JournalError(f"there is no run folder {run}")
    history = read_history(run / "journal")
    if not history.starts and history.damage:
        raise JournalError(f"the journal of {run} cannot be read: {history.damage[0]}")
    if not history.starts:
        raise JournalError(f"{run} has no journal (it ran before there was one, or with buffer.durability=memory)")
    return history


def _read_segment(path: Path, *, is_last: bool) -> Segment:
    segment = Segment(int(path.stem), path, path.stat().st_size)
    if not segment.num_bytes:
        return segment
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        lineage = 0
        for item in scan(data):
            if isinstance(item, Whole):
                lineage = item.record.lineage if isinstance(item.record, RunStarted) else lineage
                body_bytes = len(item.body)
                segment.found.append(Found(item.record, lineage, segment.number, item.end - body_bytes, body_bytes))
                item.body.release()
            elif is_last and item.end == segment.num_bytes:
                segment.torn = item
            else:
                segment.damage.append(item)
    return segment


def repair(history: History) -> None:
    """Repair the journal for a new start: log damage, cut off the torn end, remove the file of an unfinished rewrite.

    Raises:
        JournalError: the disk refused.
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
    """Cut a file after `num_bytes`, so that a crash does not bring the rest back. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
