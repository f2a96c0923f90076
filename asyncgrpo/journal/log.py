"""Writes the journal: groups and their outcomes, durable before they are acknowledged.

`append` never raises and never loses a record. Records that the disk refuses are kept in memory and retried every second.
Until then the journal `is_blocked`. A record is durable once it has reached the configured level:

    written          the operating system has it; it survives the process, not the machine
    fsync_interval   the disk has it, within half a second
    fsync_each       the disk has it, record by record

A segment is final once a later one exists, with one exception: when a checkpoint has settled all its groups, it is
rewritten without their bodies, one segment in each `tick`. A journal that is kept for a replay keeps its bodies.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from asyncgrpo import metrics
from asyncgrpo.host import sync
from asyncgrpo.journal.history import (
    SUFFIX,
    BatchIssued,
    Committed,
    Delivered,
    Dropped,
    History,
    JournalRecord,
    RunStarted,
    Whole,
    cut,
    pack,
    scan,
    segment_path,
)
from asyncgrpo.wire.codec import Buffer

log = logging.getLogger(__name__)

Durability = Literal["memory", "written", "fsync_interval", "fsync_each"]

SYNC_EVERY_S = 0.5
RETRY_EVERY_S = 1.0
LOG_EVERY_S = 30.0
SEGMENT_BYTES = 64 * 2**20
MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""Maximum number of parts in one call of the kernel."""


class Disk:
    """Disk operations that can fail. Tests replace them by ones that do."""

    def create(self, path: Path) -> int:
        """Create an empty file, sync its directory entry, and return its descriptor."""
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
        """Write all of `parts`; raises OSError after a partial write."""
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
        sync(path)

    def truncate(self, path: Path, num_bytes: int) -> None:
        cut(path, num_bytes)

    def sync_folder(self, folder: Path) -> None:
        sync(folder)


class InMemory:
    """The ledger of `durability: memory`: nothing is written, and every group is durable on arrival."""

    is_blocked: str | None = None
    position: int = 0

    def append(self, record: JournalRecord, body: Sequence[Buffer] = ()) -> None:
        pass

    def is_durable(self, position: int) -> bool:
        return True

    def tick(self) -> None:
        pass

    def sync(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Journal:
    """The journal of one start of a run: see the module's docstring. One thread writes it."""

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
            history: of earlier starts, repaired.
            survivors: lease ids of the groups in `history` that may still be trained.
            keep: never remove bodies, so that every group stays for a replay.
            segment_bytes: size at which a segment ends.
        """
        assert durability != "memory", "InMemory is for this"
        self._folder = history.folder
        self._run_started, self._durability, self._keep = run_started, durability, keep
        self._now, self._disk, self._segment_bytes = clock, disk or Disk(), segment_bytes
        self._number = max((s.number for s in history.segments), default=0) + 1
        # Last segment of an earlier process, which may have been killed before it synced.
        self._inherited = history.segments[-1].path if history.segments else None
        self._descriptor: int | None = None
        self._size = self._safe_size = 0  # bytes of the segment, and of its durable records
        self._waiting: deque[tuple[JournalRecord, list[Buffer]]] = deque()  # records that are not durable
        self._num_written = 0  # the written ones among them
        self._num_durable = 0
        self.position = 0
        """Position of the last appended record, for `is_durable`."""
        self._synced_s = self._tried_s = clock()
        self._logged_s: float | None = None
        self.is_blocked: str | None = None
        """The error for which the journal cannot be written; None: it can be."""
        self._is_dirty = False
        self._issued: list[BatchIssued] = []
        self._with_bodies = {s.number for s in history.segments if s.has_bodies and not s.damage}
        self._settled: deque[int] = deque()  # segments to be rewritten without bodies
        self._unsettled = {  # lease id -> segment with its body
            found.record.lease_id: found.segment
            for found in history.found
            if isinstance(found.record, Delivered) and found.record.lease_id in survivors
        }
        self._attempt(self._begin_segment)

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """File of the current segment."""
        return segment_path(self._folder, self._number)

    def append(self, record: JournalRecord, body: Sequence[Buffer] = ()) -> None:
        """Write a record, or keep it in memory until the disk accepts it."""
        self._waiting.append((record, pack(record, list(body))))
        self.position += 1
        if self.is_blocked is None:
            self._attempt(self._write)

    def is_durable(self, position: int) -> bool:
        """Return True if this record and all before it have reached the configured durability."""
        return position <= self._num_durable

    def tick(self) -> None:
        """Sync if the interval is over, retry after a failure, or rewrite a settled segment. Call it a few times a second."""
        now_s = self._now()
        if self.is_blocked is not None:
            if now_s - self._tried_s >= RETRY_EVERY_S:
                self._attempt(self._begin_again)
        elif self._durability == "fsync_interval" and self._is_dirty and now_s - self._synced_s >= SYNC_EVERY_S:
            self._attempt(self._sync)
        self._retire()

    def sync(self) -> bool:
        """Sync everything now, at any durability. Return True if that succeeded."""
        if self.is_blocked is None and self._is_dirty:
            self._attempt(self._sync)
        return self.is_blocked is None

    def close(self) -> None:
        """Sync and close the file, and rewrite all settled segments."""
        self.sync()
        self._close_file()
        while self._settled:
            self._retire()

    # -- inside: each may raise OSError --------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> None:
        self._tried_s = self._now()
        try:
            action()
        except OSError as error:
            self._close_file()
            self._num_written = 0  # only durable records of the segment count; the others are written again
            self.is_blocked = f"{self.path}: {error.strerror or error}"
            metrics.journal_blocked.set(1)
            if self._logged_s is None or self._tried_s - self._logged_s >= LOG_EVERY_S:
                self._logged_s, why = self._tried_s, self.is_blocked
                log.error("the journal cannot be written (%s): no group is acknowledged, no lease granted", why)
        else:
            if self.is_blocked is not None:
                log.warning("the journal %s can be written again", self._folder)
            self.is_blocked, self._logged_s = None, None
            metrics.journal_blocked.set(0)

    def _begin_segment(self) -> None:
        self._size = self._safe_size = 0
        if self._inherited is not None:  # an inherited group must survive the end of the machine
            self._disk.sync_file(self._inherited)
            self._inherited = None
        self._descriptor = self._disk.create(self.path)
        self._put(pack(self._run_started))

    def _begin_again(self) -> None:
        """Truncate the segment to its durable records and write the others to a new one, after a failure."""
        if self._safe_size:
            self._disk.truncate(self.path, self._safe_size)
            self._number += 1
        self._begin_segment()
        self._write()

    def _write(self) -> None:
        while self._num_written < len(self._waiting):
            record, parts = self._waiting[self._num_written]
            self._put(parts)
            self._num_written += 1
            self._track(record, self._number if len(parts) > 1 else None)
            if self._size >= self._segment_bytes:
                self._sync()
                self._close_file()
                self._number += 1
                self._begin_segment()
            elif self._durability == "fsync_each":
                self._sync()
            if isinstance(record, Committed):
                self._note_settled()
        # Not earlier: a failed sync at the end of a segment may lose records in it.
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
        """Track the groups that may still be trained from the journal."""
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

    def _note_settled(self) -> None:
        if not self._keep:
            self._settled = deque(sorted(self._with_bodies - set(self._unsettled.values()) - {self._number}))

    def _retire(self) -> None:
        """Remove the bodies of one settled segment. The next checkpoint retries failures."""
        if self._settled:
            number = self._settled.popleft()
            try:
                _remove_bodies(segment_path(self._folder, number), self._disk)
            except OSError as error:
                log.warning("segment %d of the journal %s could not be retired: %s", number, self._folder, error)
            else:
                self._with_bodies.discard(number)


def _remove_bodies(path: Path, disk: Disk) -> None:
    """Rewrite a segment without the bodies of its groups, atomically."""
    parts: list[Buffer] = []
    for item in scan(path.read_bytes()):
        if not isinstance(item, Whole):
            raise OSError(f"damaged at offset {item.offset}")
        parts += pack(item.record)
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
"""Records the outcomes of a buffer's groups."""
