"""Reads and repairs the journal of a run: its segments, their whole records, and damage.

Reading changes nothing and raises only if the folder cannot be read. Whole records around damage are kept, and damage is
reported by file and offset. Damage behind the last whole record of the last segment is the torn end of a write that was
never acknowledged: `repair` truncates it. Other damage stays in the file as evidence.

A start reads only what may still matter (`read_rest`). `Past` summarizes the first segments whose groups are all trained or
dropped; the journal writes it beside them at each checkpoint.
"""

import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from asyncgrpo.errors import JournalError, WireError
from asyncgrpo.journal.format import (
    BatchIssued,
    BoundChanged,
    Damage,
    Delivered,
    Dropped,
    Interrupted,
    JournalRecord,
    RunStarted,
    Settled,
    Whole,
    pack,
    scan,
    unpack_delivered,
)
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

SUFFIX = ".journal"
SUMMARY = "settled.summary"
"""Name of the file beside the segments with the `Past` of the newest checkpoint."""


def segment_path(folder: Path, number: int) -> Path:
    """Return the file of the segment with this number."""
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
    damage: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    """Unfinished last write of a killed process, in the last segment only."""

    @property
    def has_bodies(self) -> bool:
        """True if a group in it can still be read."""
        return any(found.body_bytes for found in self.found)

    @property
    def damage_messages(self) -> list[str]:
        """One sentence per damaged place."""
        return [
            f"{self.path}, offset {damage.offset}: {damage.end - damage.offset} bytes without a record"
            for damage in self.damage
        ]


class Past:
    """Summary of the first segments of a journal, whose groups are all settled: some kB for any number of segments.

    A group is settled if it was dropped, or trained on the path to a checkpoint.
    """

    def __init__(self) -> None:
        self.through = 0
        """Number of the last summarized segment."""
        self._of_path: list[RunStarted | BoundChanged] = []
        self._dropped: list[Dropped] = []
        self._interruptions: Counter[int] = Counter()  # by prompt index, since its last completion

    def add(self, segment: "Segment", path: Mapping[int, int], lineage: int, is_done: Callable[[int], bool]) -> None:
        """Add the next segment.

        Args:
            path: from `surviving_path`, to a checkpoint that settles the groups of the segment.
            lineage: of this checkpoint.
            is_done: returns True for a prompt index that is done in it.
        """
        known = self.starts
        for found in segment.found:
            match record := found.record:
                case RunStarted() if record.lineage not in known:
                    known[record.lineage] = record
                    self._of_path.append(msgspec.structs.replace(record, config={}))
                case BoundChanged(version=version) if is_on(path, version) or version.lineage == lineage:
                    # Only the last change on the path matters.
                    self._of_path = [
                        one for one in self._of_path if isinstance(one, RunStarted) or not is_on(path, one.version)
                    ]
                    self._of_path.append(record)
                case Dropped(is_final=False):
                    self._dropped.append(record)
                case Interrupted(prompt_indices=indices):
                    self._interruptions.update(indices)
                case Delivered(prompt_index=index):
                    self._interruptions.pop(index, None)
        self._dropped = [record for record in self._dropped if not is_done(record.prompt_index)]
        self._interruptions = Counter({i: n for i, n in self._interruptions.items() if not is_done(i)})
        self.through = segment.number

    @property
    def starts(self) -> dict[int, RunStarted]:
        """Starts by lineage, without their configuration."""
        return {one.lineage: one for one in self._of_path if isinstance(one, RunStarted)}

    @property
    def records(self) -> list[JournalRecord]:
        """The records that still matter, oldest first."""
        indices = tuple(self._interruptions.elements())
        interrupted = [Interrupted(generator_id="", prompt_indices=indices)] if indices else []
        return [*self._of_path, *self._dropped, *interrupted]

    def packed(self, at: PolicyVersion) -> list[Buffer]:
        """Return the parts of its file; `at` is the checkpoint."""
        records = self.records
        head = Settled(through=self.through, at=at, num_records=len(records))
        return [part for record in (head, *records) for part in pack(record)]

    @classmethod
    def unpack(cls, data: bytes) -> tuple["Past", PolicyVersion] | None:
        """Return the summary and its checkpoint; None if the file is damaged."""
        records = [item.record if isinstance(item, Whole) else None for item in scan(data)]
        head = records[0] if records else None
        if not isinstance(head, Settled) or len(records) != head.num_records + 1:
            return None
        past = cls()
        past.through = head.through
        for record in records[1:]:
            match record:
                case RunStarted() | BoundChanged():
                    past._of_path.append(record)
                case Dropped():
                    past._dropped.append(record)
                case Interrupted(prompt_indices=indices):
                    past._interruptions.update(indices)
                case _:
                    return None
        return past, head.at


@dataclass
class History:
    """The journal of a run, oldest segment first. `read_rest` replaces the first segments by their summary."""

    folder: Path
    segments: list[Segment]
    past: Past = field(default_factory=Past)
    past_damage: list[str] = field(default_factory=list)

    @property
    def found(self) -> Iterator[Found]:
        """Whole records, oldest first."""
        for record in self.past.records:
            yield Found(record, 0, 0, 0, 0)
        for segment in self.segments:
            yield from segment.found

    @cached_property
    def starts(self) -> dict[int, RunStarted]:
        """Starts of the run by lineage."""
        return {found.record.lineage: found.record for found in self.found if isinstance(found.record, RunStarted)}

    @property
    def damage(self) -> list[str]:
        """One sentence per damaged place. A torn end is not damage."""
        return [*self.past_damage, *(sentence for segment in self.segments for sentence in segment.damage_messages)]

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
    """Return True if these weights are on the path."""
    return version.number <= path.get(version.lineage, -1)


def read_history(folder: Path) -> History:
    """Read the journal in `folder`. A missing folder is an empty history.

    Raises:
        JournalError: the folder or a file in it cannot be read.
    """
    with _reading(folder):
        return History(folder, list(read_segments(folder)))


def read_rest(
    folder: Path, checkpoint: PolicyVersion | None, is_done: Callable[[int], bool], *, keep: bool = False
) -> History:
    """Read the part of the journal that a start needs, and summarize the first segments whose groups are all settled.

    Segments that the summary file covers are not opened, unless the start resumes from another path. Without a summary file
    every segment is read, one at a time.

    Args:
        checkpoint: that the start resumes from; None: it begins with the model's folder.
        is_done: returns True for a prompt index that is done in it.
        keep: bodies of settled groups are kept, so a segment with bodies may be summarized.
    Raises:
        JournalError: the folder or a file in it cannot be read.
    """
    with _reading(folder):
        paths = _paths(folder)
        past, newer = _read_past(folder), paths
        starts: dict[int, RunStarted] = {}
        if past is not None:
            newer = [path for path in paths if int(path.stem) > past[0].through]
            starts = past[0].starts | _starts_in(newer)
        if past is None or not is_on(surviving_path(starts, checkpoint), past[1]):
            past, newer, starts = None, paths, _starts_in(paths)
        history, path = History(folder, [], past[0] if past else Past()), surviving_path(starts, checkpoint)
        open_in = _OpenGroups(path)
        for segment in map(read_segment, newer, [False] * (len(newer) - 1) + [True]):
            open_in.note(segment)
            history.segments.append(segment)
            while len(history.segments) > 1 and open_in.are_none_in(first := history.segments[0]):
                if first.has_bodies and not first.damage and not keep:
                    break  # its bodies must be removed first
                history.past.add(first, path, checkpoint.lineage if checkpoint else 0, is_done)
                history.past_damage += history.segments.pop(0).damage_messages
        return history


class _OpenGroups:
    """Counts the unsettled groups of each segment: neither trained on the path nor dropped."""

    def __init__(self, path: Mapping[int, int]) -> None:
        self._path = path
        self._segment_of: dict[str, int] = {}
        self._count: Counter[int] = Counter()

    def note(self, segment: Segment) -> None:
        for found in segment.found:
            match record := found.record:
                case Delivered(lease_id=lease_id):
                    self._end(lease_id)
                    self._segment_of[lease_id] = segment.number
                    self._count[segment.number] += 1
                case Dropped(lease_id=lease_id):
                    self._end(lease_id)
                case BatchIssued() if record.step <= self._path.get(record.version.lineage, -1):
                    for lease_id in record.lease_ids:
                        self._end(lease_id)

    def _end(self, lease_id: str) -> None:
        if (number := self._segment_of.pop(lease_id, None)) is not None:
            self._count[number] -= 1

    def are_none_in(self, segment: Segment) -> bool:
        return not self._count[segment.number]


def _read_past(folder: Path) -> tuple[Past, PolicyVersion] | None:
    """Read the summary and its checkpoint; None if it is missing or damaged."""
    try:
        found = Past.unpack((folder / SUMMARY).read_bytes())
    except FileNotFoundError:
        return None
    if found is None:
        log.warning("%s is damaged: reading the whole journal instead", folder / SUMMARY)
    return found


def _starts_in(paths: Iterable[Path]) -> dict[int, RunStarted]:
    """Return the starts that wrote these segments, by lineage, from the first record of each segment."""
    starts = {}
    for path in paths:
        with _mapped(path) as data:
            whole = next((item for item in scan(data) if isinstance(item, Whole)), None)
            if whole is not None:
                whole.body.release()
                if isinstance(whole.record, RunStarted):
                    starts[whole.record.lineage] = whole.record
    return starts


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


def read_segments(folder: Path) -> Iterator[Segment]:
    """Read the segments of the journal in `folder` one at a time, oldest first. Raises OSError."""
    paths = _paths(folder)
    for path in paths:
        yield read_segment(path, path == paths[-1])


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(f"the journal {folder} cannot be read: {error.strerror}") from error


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
    with _reading(folder):
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
                body_bytes = len(item.body)
                segment.found.append(Found(item.record, lineage, segment.number, item.end - body_bytes, body_bytes))
                item.body.release()
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
