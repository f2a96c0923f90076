"""Faulty variants of the journal and of what reads it, for `tests/simulation/mutants.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncgrpo.buffer import recovery
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.journal import log as journal_module
from asyncgrpo.journal.format import BatchIssued, BoundChanged, Committed, JournalRecord
from asyncgrpo.journal.history import History
from asyncgrpo.journal.log import Journal
from asyncgrpo.types import Lease

Change = tuple[Any, str, Any]
"""Of what, which attribute, and what it becomes."""
DISK_MUTANTS: dict[str, Callable[[], list[Change]]] = {}


def mutant(make: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    DISK_MUTANTS[make.__name__] = make
    return make


@mutant
def ack_before_durable() -> list[Change]:
    """A group is acknowledged once it is in memory."""

    def hasty(self: BufferService) -> None:
        for _, peer, ack in self._unacknowledged.values():
            self._server.send(peer, ack)
        self._unacknowledged.clear()

    return [(BufferService, "_acknowledge", hasty)]


@mutant
def torn_end_stays() -> list[Change]:
    """What a killed process left of its last write is not cut off."""
    return [(recovery, "repair", lambda history: None)]


@mutant
def manifest_after_step() -> list[Change]:
    """The manifest of a batch is written down once its step is in a checkpoint."""
    append = Journal.append

    def late(self: Journal, record: JournalRecord, body: Any = ()) -> None:
        held = self.__dict__.setdefault("held", [])
        if isinstance(record, BatchIssued):
            held.append(record)
            return
        while isinstance(record, Committed) and held:
            append(self, held.pop(0))
        append(self, record, body)

    return [(Journal, "append", late)]


@mutant
def snapshot_before_sync() -> list[Change]:
    """A checkpoint may hold a step whose manifest is not on the disk."""
    return [(Journal, "sync", lambda self: True)]


@mutant
def retired_too_early() -> list[Change]:
    """A checkpoint takes the bodies out of every segment but the last."""
    retire = Journal._retire

    def eager(self: Journal) -> None:
        unsettled, self._unsettled = self._unsettled, {}
        retire(self)
        self._unsettled = unsettled

    return [(Journal, "_retire", eager)]


@mutant
def retired_without_sync() -> list[Change]:
    """The old segment is replaced by one that is not on the disk yet."""
    take_out = journal_module._remove_bodies

    def careless(path: Path, disk: Any) -> None:
        sync = disk.sync
        disk.sync = lambda descriptor: None
        try:
            take_out(path, disk)
        finally:
            disk.sync = sync

    return [(journal_module, "_remove_bodies", careless)]


@mutant
def failed_sync_forgotten() -> list[Change]:
    """After a sync that failed, the next one is believed to cover what the failed one lost."""

    def trusting(self: Journal) -> None:
        self._descriptor = journal_module.os.open(self.path, journal_module.os.O_WRONLY | journal_module.os.O_APPEND)
        self._disk._paths[self._descriptor] = self.path  # type: ignore[attr-defined]
        self._num_written = len(self._waiting)
        self._sync()

    return [(Journal, "_begin_again", trusting)]


@mutant
def inherited_without_sync() -> list[Change]:
    """A start goes on from a segment that only its dead writer's machine remembers."""
    begin = Journal._begin_segment

    def forgetful(self: Journal) -> None:
        self._inherited = None
        begin(self)

    return [(Journal, "_begin_segment", forgetful)]


@mutant
def groups_of_lost_weights_kept() -> list[Change]:
    """A resume trains groups of weights that no longer exist."""
    return [(recovery, "is_on", lambda path, version: True)]


@mutant
def taken_is_trained() -> list[Change]:
    """A batch that was handed over before the crash counts as trained, whatever the checkpoint says."""

    def hopeful(history: History, path: Any) -> set[str]:
        return {i for found in history.found if isinstance(found.record, BatchIssued) for i in found.record.lease_ids}

    return [(recovery, "trained_on", hopeful)]


@mutant
def bound_not_written() -> list[Change]:
    """The journal is not told that the bound has changed."""
    append = Journal.append

    def silent(self: Journal, record: JournalRecord, body: Any = ()) -> None:
        if not isinstance(record, BoundChanged):
            append(self, record, body)

    return [(Journal, "append", silent)]


@mutant
def bound_starts_anew() -> list[Change]:
    """A resume forgets the bound in force."""
    return [(recovery, "bound_in_force", lambda history, checkpoint: None)]


@mutant
def recovered_under_the_bound_of_now() -> list[Change]:
    """A group that came back gets the bound in force, whatever it was leased under."""
    return [(recovery, "bound_of", lambda lease_id, max_lag, start: start.max_lag)]


@mutant
def recovered_is_issued_too() -> list[Change]:
    """A prompt whose group came back from the journal is leased again beside it."""
    restore = Buffer.restore

    def doubled(self: Buffer, *group: Any) -> None:
        restore(self, *group)
        self._prompts._claimed.clear()

    return [(Buffer, "restore", doubled)]


@mutant
def leases_while_blocked() -> list[Change]:
    """With a full disk the buffer hands over a batch whose manifest is not written."""
    completion = BufferService._reply_to_take

    def bold(self: BufferService, now_s: float) -> None:
        journal, self._journal = self._journal, _NeverBlocked(self._journal)
        try:
            completion(self, now_s)
        finally:
            self._journal = journal

    return [(BufferService, "_reply_to_take", bold)]


class _NeverBlocked:
    is_blocked = None

    def __init__(self, journal: Any) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)


@mutant
def evaluation_of_another_start() -> list[Change]:
    """A generator that outlived a restart completions an evaluation with the weights of before."""
    lease = Evaluations._lease

    def nameless(self: Evaluations, step: int, index: int, attempt: int) -> Lease:
        lineage, self._lineage = self._lineage, 0
        try:
            return lease(self, step, index, attempt)
        finally:
            self._lineage = lineage

    return [(Evaluations, "_lease", nameless)]
