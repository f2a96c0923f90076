"""Groups and what became of them, on the disk before anyone is told: the buffer's memory of record.

`append` never raises and never loses: what the disk refuses waits in memory, is tried again every second, and meanwhile
the journal `is_blocked`. A record counts once it has reached the chosen durability:

    written          handed to the operating system; outlives our process, not the machine
    fsync_interval   on the disk, within half a second
    fsync_each       on the disk, one by one

Segments are never written again once a later one exists, except to take out the bodies of groups that a checkpoint
has made useless: then only what the ledger needs is left of them. A journal that is kept for a replay keeps its bodies.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from asyncgrpo import metrics
from asyncgrpo.journal.format import (
    BatchIssued,
    Committed,
    Delivered,
    Dropped,
    Record,
    RunStarted,
    Whole,
    delivered,
    pack,
    scan,
)
from asyncgrpo.journal.history import SUFFIX, History, cut, segment_path
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

Durability = Literal["memory", "written", "fsync_interval", "fsync_each"]

SYNC_EVERY_S = 0.5
RETRY_EVERY_S = 1.0
SAY_EVERY_S = 30.0
SEGMENT_BYTES = 64 * 2**20
MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""Parts that the kernel takes in one call."""


class Disk:
    """The calls that can fail. Tests put a failing one here."""

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file whose name is on the disk as well."""
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


class Ledger(Protocol):
    """Where a buffer says what became of groups."""

    def append(self, record: Record) -> None: ...

    def append_group(self, message: Deliver, payload: Buffer) -> None: ...

    def is_durable(self, position: int) -> bool: ...

    def tick(self) -> None: ...

    def sync(self) -> bool: ...

    def close(self) -> None: ...

    @property
    def position(self) -> int: ...

    @property
    def is_blocked(self) -> str | None: ...


class InMemory:
    """`durability: memory`: nothing is written down, and a group counts as soon as it is here."""

    is_blocked: str | None = None
    position: int = 0

    def append(self, record: Record) -> None:
        pass

    def append_group(self, message: Deliver, payload: Buffer) -> None:
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

    record: Record
    parts: list[Buffer]


class Journal:
    """The journal of one start of a run, for one writer. See the module's text."""

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
            history: what earlier starts left, mended.
            began: of this start.
            survivors: lease ids of the groups in `history` that may yet be trained; the others are of no use any more.
            keep: never take bodies out, so that every group stays for a replay.
            segment_bytes: a segment that has reached them is followed by another.
        """
        assert durability != "memory", "InMemory is for this"
        self._folder = history.folder
        self._run_started = run_started
        self._durability = durability
        self._keep = keep
        self._now = clock
        self._disk = disk or Disk()
        self._segment_bytes = segment_bytes
        self._number = max((s.number for s in history.segments), default=0) + 1
        # The last segment of a process that may have been killed before it synced.
        self._inherited = history.segments[-1].path if history.segments else None
        self._descriptor: int | None = None
        self._size = self._safe_size = 0  # bytes of the segment; those of durable records
        self._waiting: deque[_Waiting] = deque()  # not durable
        self._num_written = 0  # of these
        self._appended = self._num_durable = 0
        self._synced_s = self._tried_s = clock()
        self._said_s: float | None = None
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
        """The segment that is written now."""
        return segment_path(self._folder, self._number)

    @property
    def is_blocked(self) -> str | None:
        """Why nothing can be written at the moment; None when all is well."""
        return self._trouble

    @property
    def position(self) -> int:
        """Of the record appended last, for `is_durable`."""
        return self._appended

    def append(self, record: Record, body: Sequence[Buffer] = ()) -> None:
        """Write a record down, or keep it until the disk takes it."""
        self._waiting.append(_Waiting(record, pack(record, list(body))))
        self._appended += 1
        if self._trouble is None:
            self._attempt(self._write)

    def append_group(self, message: Deliver, payload: Buffer) -> None:
        """The same, of a group that came."""
        self.append(*delivered(message, payload))

    def is_durable(self, position: int) -> bool:
        """Whether this record and all before it have reached the chosen durability."""
        return position <= self._num_durable

    def tick(self) -> None:
        """What time brings: the sync of an interval, another attempt after a failure. Call it a few times a second."""
        now_s = self._now()
        if self._trouble is not None:
            if now_s - self._tried_s >= RETRY_EVERY_S:
                self._attempt(self._begin_again)
        elif self._durability == "fsync_interval" and self._is_dirty and now_s - self._synced_s >= SYNC_EVERY_S:
            self._attempt(self._sync)

    def sync(self) -> bool:
        """Put everything on the disk now, whatever the durability. Returns whether it is there."""
        if self._trouble is None and self._is_dirty:
            self._attempt(self._sync)
        return self._trouble is None

    def close(self) -> None:
        """Sync and let go of the file."""
        self.sync()
        self._let_go()

    # -- inside: each may raise OSError --------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> None:
        self._tried_s = self._now()
        try:
            action()
        except OSError as error:
            self._let_go()
            self._num_written = 0  # of the segment only what is durable stands; the rest is written anew
            self._trouble = f"{self.path}: {error.strerror or error}"
            metrics.journal_blocked.set(1)
            self._complain()
        else:
            if self._trouble is not None:
                log.warning("the journal %s can be written again", self._folder)
            self._trouble, self._said_s = None, None
            metrics.journal_blocked.set(0)

    def _complain(self) -> None:
        if self._said_s is None or self._tried_s - self._said_s >= SAY_EVERY_S:
            self._said_s = self._tried_s
            log.error("the journal cannot be written (%s): no group is acknowledged, no lease granted", self._trouble)

    def _begin_segment(self) -> None:
        self._size = self._safe_size = 0
        if self._inherited is not None:  # a group that we take over must not be lost to the end of the machine
            self._disk.sync_file(self._inherited)
            self._inherited = None
        self._descriptor = self._disk.create(self.path)
        self._put(pack(self._run_started))

    def _begin_again(self) -> None:
        """After a failure nothing is known of what was not durable: cut it off, and write it into another segment."""
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
            self._note(waiting.record, self._number if len(waiting.parts) > 1 else None)
            if self._size >= self._segment_bytes:
                self._sync()
                self._let_go()
                self._number += 1
                self._begin_segment()
            elif self._durability == "written":
                self._are_durable()
            elif self._durability == "fsync_each":
                self._sync()
            if isinstance(waiting.record, Committed) and not self._keep:
                self._retire()

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
        self._are_durable()

    def _are_durable(self) -> None:
        for _ in range(self._num_written):
            self._waiting.popleft()
        self._num_durable += self._num_written
        self._num_written = 0
        self._safe_size = self._size

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # -- retirement ----------------------------------------------------------------------------------------------------

    def _note(self, record: Record, segment: int | None) -> None:
        """Which groups may still be trained from the journal."""
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
        """Take the bodies out of segments in which no group is of any use. What fails is tried at the next checkpoint."""
        for number in sorted(self._with_bodies - set(self._unsettled.values()) - {self._number}):
            try:
                _take_bodies_out(segment_path(self._folder, number), self._disk)
            except OSError as error:
                log.warning("segment %d of the journal %s could not be retired: %s", number, self._folder, error)
            else:
                self._with_bodies.discard(number)


def _take_bodies_out(path: Path, disk: Disk) -> None:
    """Rewrite a segment without the bodies of its groups; the old file or the new one is there, never neither."""
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
