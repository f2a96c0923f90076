"""Writes the journal: groups and what became of them, durable before they are acknowledged.

`append` never raises and never loses a record. What the disk refuses waits in memory and is tried again every second;
meanwhile the journal `is_blocked`. A record counts once it has reached the chosen durability:

    written          the operating system has it; it outlives the process, not the machine
    fsync_interval   the disk has it, within half a second
    fsync_each       the disk has it, record by record

A segment is not written any more once a later one exists, with one exception: when a checkpoint has made all its groups
useless, it is rewritten without their bodies. A journal that is kept for a replay keeps its bodies. What still counts of
the first such segments is written into a summary at each checkpoint, so that the next start need not read them.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from asyncgrpo import metrics
from asyncgrpo.journal.format import (
    BatchIssued,
    Committed,
    Delivered,
    Dropped,
    JournalRecord,
    RunStarted,
    Whole,
    delivered,
    pack,
    scan,
)
from asyncgrpo.journal.history import SUFFIX, SUMMARY, History, cut, read_segment, segment_path, surviving_path
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

Durability = Literal["memory", "written", "fsync_interval", "fsync_each"]

SYNC_EVERY_S = 0.5
RETRY_EVERY_S = 1.0
LOG_EVERY_S = 30.0
SEGMENT_BYTES = 64 * 2**20
MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""The most parts that the kernel takes in one call."""


class Disk:
    """The calls to the disk that can fail. Tests replace it by one that fails."""

    def create(self, path: Path) -> int:
        """Create an empty file, and sync its name to the disk. Returns its descriptor."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.sync_folder(path.parent)
            self.sync_folder(path.parent.parent)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`, or raise OSError after some of it."""
        rest = deque(memoryview(part) for part in parts if len(part))
        while rest:
            written = os.writev(descriptor, list(islice(rest, MAX_PARTS)))
            while rest and written >= len(rest[0]):
                written -= len(rest.popleft())
            if written:
                rest[0] = rest[0][written:]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_file(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, path: Path, num_bytes: int) -> None:
        cut(path, num_bytes)

    def sync_folder(self, folder: Path) -> None:
        Disk.sync_file(self, folder)


class InMemory:
    """The ledger of `durability: memory`: nothing is written, and a group counts as soon as it is here."""

    is_blocked: str | None = None
    position: int = 0

    def append(self, record: JournalRecord) -> None:
        pass

    def append_group(self, message: Deliver, payload: Buffer, max_lag: int, head: Buffer | None = None) -> None:
        pass

    def is_durable(self, position: int) -> bool:
        return True

    def tick(self) -> None:
        pass

    def sync(self) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Waiting:
    """A record that is not durable yet."""

    record: JournalRecord
    parts: list[Buffer]


class Journal:
    """The journal of one start of a run, as the module's text says. One thread writes it."""

    def __init__(
        self,
        history: History,
        run_started: RunStarted,
        durability: Durability,
        *,
        survivors: Collection[str] = (),
        keep: bool = False,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """
        Args:
            history: what earlier starts left, repaired.
            run_started: this start.
            survivors: lease ids of the groups in `history` that may still be trained; the others are of no use any more.
            keep: never remove bodies, so that every group stays for a replay.
            segment_bytes: a segment that has this many bytes is followed by the next.
        """
        assert durability != "memory", "InMemory is for this"
        self._folder = history.folder
        self._run_started = run_started
        self._durability = durability
        self._keep = keep
        self._now = clock
        self._disk = disk or Disk()
        self._segment_bytes = segment_bytes
        self._past = history.past
        self._summed_up = 0  # number of the last segment in the summary that this process wrote
        self._starts = history.starts | {run_started.lineage: run_started}
        self._number = max((s.number for s in history.segments), default=self._past.through) + 1
        # The last segment of an earlier process, which may have been killed before it synced.
        self._inherited = history.segments[-1].path if history.segments else None
        self._descriptor: int | None = None
        self._size = self._safe_size = 0  # bytes of the segment, and of its durable records
        self._waiting: deque[_Waiting] = deque()  # records that are not durable
        self._num_written = 0  # how many of them are written
        self._appended = self._num_durable = 0
        self._synced_s = self._tried_s = clock()
        self._logged_s: float | None = None
        self._trouble: str | None = None
        self._is_dirty = False
        self._issued: list[BatchIssued] = []
        self._with_bodies = {s.number for s in history.segments if s.has_bodies and not s.damage}
        self._unsettled = {  # lease id -> segment with its body
            found.record.lease_id: found.segment
            for found in history.found
            if isinstance(found.record, Delivered) and found.record.lease_id in survivors
        }
        self._attempt(self._begin_segment)

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The file of the segment that is written now."""
        return segment_path(self._folder, self._number)

    @property
    def is_blocked(self) -> str | None:
        """Why the journal cannot be written at the moment; None: it can."""
        return self._trouble

    @property
    def position(self) -> int:
        """The position of the record appended last, for `is_durable`."""
        return self._appended

    def append(self, record: JournalRecord, body: Sequence[Buffer] = ()) -> None:
        """Write a record, or keep it until the disk takes it."""
        self._waiting.append(_Waiting(record, pack(record, list(body))))
        self._appended += 1
        if self._trouble is None:
            self._attempt(self._write)

    def append_group(self, message: Deliver, payload: Buffer, max_lag: int, head: Buffer | None = None) -> None:
        """Write the record of a group that came; the arguments are those of `delivered`."""
        self.append(*delivered(message, payload, max_lag, head))

    def is_durable(self, position: int) -> bool:
        """Whether this record and all before it have reached the chosen durability."""
        return position <= self._num_durable

    def tick(self) -> None:
        """Do what is due: the sync of an interval, another attempt after a failure. Call it a few times a second."""
        now_s = self._now()
        if self._trouble is not None:
            if now_s - self._tried_s >= RETRY_EVERY_S:
                self._attempt(self._begin_again)
        elif self._durability == "fsync_interval" and self._is_dirty and now_s - self._synced_s >= SYNC_EVERY_S:
            self._attempt(self._sync)

    def sync(self) -> bool:
        """Sync everything to the disk now, whatever the durability. Returns whether it succeeded."""
        if self._trouble is None and self._is_dirty:
            self._attempt(self._sync)
        return self._trouble is None

    def close(self) -> None:
        """Sync and close the file."""
        self.sync()
        self._close_file()

    # -- inside: each may raise OSError --------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> None:
        self._tried_s = self._now()
        try:
            action()
        except OSError as error:
            self._close_file()
            self._num_written = 0  # only the durable records of the segment count; the others are written again
            self._trouble = f"{self.path}: {error.strerror or error}"
            metrics.journal_blocked.set(1)
            self._log_trouble()
        else:
            if self._trouble is not None:
                log.warning("the journal %s can be written again", self._folder)
            self._trouble, self._logged_s = None, None
            metrics.journal_blocked.set(0)

    def _log_trouble(self) -> None:
        if self._logged_s is None or self._tried_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._tried_s
            log.error("the journal cannot be written (%s): no group is acknowledged, no lease granted", self._trouble)

    def _begin_segment(self) -> None:
        self._size = self._safe_size = 0
        if self._inherited is not None:  # a group taken over must survive the end of the machine
            self._disk.sync_file(self._inherited)
            self._inherited = None
        self._descriptor = self._disk.create(self.path)
        self._put(pack(self._run_started))

    def _begin_again(self) -> None:
        """Begin another segment after a failure, and write there what was not durable; cut that off the old one."""
        if self._safe_size:
            self._disk.truncate(self.path, self._safe_size)
            self._number += 1
        self._begin_segment()
        self._write()

    def _write(self) -> None:
        while self._num_written < len(self._waiting):
            waiting = self._waiting[self._num_written]
            self._put(waiting.parts)
            self._num_written += 1
            self._track(waiting.record, self._number if len(waiting.parts) > 1 else None)
            if self._size >= self._segment_bytes:
                self._sync()
                self._close_file()
                self._number += 1
                self._begin_segment()
            elif self._durability == "fsync_each":
                self._sync()
            if isinstance(waiting.record, Committed):
                self._retire()
                self._sum_up(waiting.record)
        # Not before: a sync that fails at the end of a segment may take what is in it.
        if self._durability == "written":
            self._mark_durable()

    def _put(self, parts: Sequence[Buffer]) -> None:
        assert self._descriptor is not None
        num_bytes = sum(map(len, parts))
        self._is_dirty = True
        self._disk.write(self._descriptor, parts)
        self._size += num_bytes
        metrics.journal_bytes_total.inc(num_bytes)

    def _sync(self) -> None:
        assert self._descriptor is not None
        started_s = self._now()
        self._disk.sync(self._descriptor)
        self._synced_s = self._now()
        metrics.journal_sync_seconds.observe(self._synced_s - started_s)
        self._is_dirty = False
        self._mark_durable()

    def _mark_durable(self) -> None:
        for _ in range(self._num_written):
            self._waiting.popleft()
        self._num_durable += self._num_written
        self._num_written = 0
        self._safe_size = self._size

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # -- retirement ----------------------------------------------------------------------------------------------------

    def _track(self, record: JournalRecord, segment: int | None) -> None:
        """Keep track of which groups may still be trained from the journal."""
        match record:
            case Delivered(lease_id=lease_id) if segment is not None:
                self._unsettled[lease_id] = segment
                self._with_bodies.add(segment)
            case Dropped(lease_id=lease_id):
                self._unsettled.pop(lease_id, None)
            case BatchIssued():
                self._issued.append(record)
            case Committed(step=step):
                for issued in self._issued:
                    if issued.step <= step:
                        for lease_id in issued.lease_ids:
                            self._unsettled.pop(lease_id, None)
                self._issued = [issued for issued in self._issued if issued.step > step]

    def _retire(self) -> None:
        """Remove the bodies of segments whose groups are all of no use. What fails is tried at the next checkpoint."""
        retired = self._with_bodies - set(self._unsettled.values()) - {self._number}
        for number in sorted(retired) if not self._keep else ():
            try:
                _remove_bodies(segment_path(self._folder, number), self._disk)
            except OSError as error:
                log.warning("segment %d of the journal %s could not be retired: %s", number, self._folder, error)
            else:
                self._with_bodies.discard(number)

    def _sum_up(self, committed: Committed) -> None:
        """Write the summary of the first segments, all of whose groups are of no use. What fails is tried again."""
        num_waiting = {*self._unsettled.values(), *(() if self._keep else self._with_bodies), self._number}
        through, lineage = min(num_waiting) - 1, self._run_started.lineage
        if through <= self._summed_up:
            return
        at = PolicyVersion(lineage, committed.step)
        path, done_beyond = surviving_path(self._starts, at), set(committed.prompts.done_beyond)
        frontier = committed.prompts.frontier
        try:
            for number in range(self._past.through + 1, through + 1):
                if (file := segment_path(self._folder, number)).exists():
                    segment = read_segment(file)
                    self._past.add(segment, path, lineage, lambda index: index < frontier or index in done_beyond)
            _replace(self._folder / SUMMARY, self._past.packed(at), self._disk)
            self._summed_up = through
        except OSError as error:
            log.warning("the journal %s could not be summed up: %s", self._folder, error)


def _remove_bodies(path: Path, disk: Disk) -> None:
    """Rewrite a segment without the bodies of its groups. At every moment the old file or the new one is there."""
    parts: list[Buffer] = []
    for item in scan(path.read_bytes()):
        if not isinstance(item, Whole):
            raise OSError(f"damaged at offset {item.offset}")
        parts += pack(item.record)
    _replace(path, parts, disk)


def _replace(path: Path, parts: Sequence[Buffer], disk: Disk) -> None:
    """Write a file anew. At every moment the old one or the new one is there, whole."""
    temporary = path.with_suffix(f"{SUFFIX}.tmp")
    descriptor = disk.create(temporary)
    try:
        disk.write(descriptor, parts)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    disk.sync_folder(path.parent)


Ledger = InMemory | Journal
"""Where a buffer records what became of its groups."""
