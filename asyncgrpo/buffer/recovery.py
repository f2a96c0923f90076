"""Recovery of groups that earlier starts left in the journal.

A learner that resumes from a checkpoint makes new weights under a new lineage. Weights that an earlier start made after
that checkpoint are gone. A group that they sampled is `ahead`: the version numbers of the new lineage cannot express its
age. Every other group lies on the path to the checkpoint and is trained if the bound on lag allows it.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.buffer.admission import AutoLag
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.group_health import BLAMED, EarlierFailures
from asyncgrpo.config.schema import BufferConfig
from asyncgrpo.data.images import Images
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import (
    BoundChanged,
    Delivered,
    Dropped,
    Found,
    History,
    Interrupted,
    RunStarted,
    is_on,
    read_rest,
    repair,
    surviving_path,
)
from asyncgrpo.journal.log import InMemory, Journal, Ledger
from asyncgrpo.types import PolicyVersion

log = logging.getLogger(__name__)


@dataclass
class Verdict:
    """Decision on a group of an earlier start."""

    found: Found
    record: Delivered
    reason: str | None
    """Reason why the group is not trained; None: it is ready."""
    max_lag: int
    """Bound on its lag, optimizer steps."""

    @property
    def deadline(self) -> int:
        """Number of the last version at which a step may take it."""
        return self.record.versions[0].number + self.max_lag


@dataclass(frozen=True)
class Reopened:
    """The journal of a new start, and what earlier starts left in it."""

    journal: Ledger
    history: History
    verdicts: list[Verdict]
    failures: EarlierFailures
    max_lag: int | None = None
    """Bound in force, with `buffer.max_lag: auto`; None: no earlier start has recorded one."""


def reopen(
    folder: Path, run_started: RunStarted, prompts: PromptSource, config: BufferConfig, **of_journal: Any
) -> Reopened:
    """Read and repair the journal in `folder`, decide on its groups, and continue writing it.

    With `buffer.durability: memory` a journal of earlier starts records this start and the drop of their groups, and no more:
    later starts need both.

    Args:
        run_started: this start.
        prompts: restored from the checkpoint that this start resumes from.
        of_journal: further arguments of the `Journal`: `clock`, `disk`, `segment_bytes`.
    Raises:
        JournalError: the folder cannot be read. (A failed write is retried.)
    """
    history, durability = read_rest(folder, run_started.parent, prompts.is_done), config.durability
    if durability == "memory":
        if not history.segments:
            return Reopened(InMemory(), history, [], EarlierFailures())
        durability = "written"
    repair(history)
    if config.max_lag == "auto":
        auto = AutoLag(config.auto_lag.max, bound_in_force(history, run_started.parent))
        run_started = msgspec.structs.replace(run_started, max_lag=auto.max_lag)
    verdicts = judge(history, prompts, run_started, config)
    survivors = {verdict.record.lease_id for verdict in verdicts if verdict.reason is None}
    journal = Journal(history, run_started, durability, survivors=survivors, keep=config.keep_journal, **of_journal)
    return Reopened(journal, history, verdicts, earlier_failures(history, prompts), run_started.max_lag)


def bring_back(buffer: Buffer, reopened: Reopened, images: Images | None = None) -> dict[str, int]:
    """Restore the trainable groups and the failures of prompts that earlier starts left, and drop all other groups.

    Args:
        images: of the run, which are looked at before they are trained on.
    Returns:
        Number of groups by `ready` or the reason of the drop.
    Raises:
        DataError: an image of a trainable group is missing or was altered.
    """
    buffer.restore_failures(reopened.failures)
    counts: Counter[str] = Counter()
    for verdict in reopened.verdicts:
        record, reason = verdict.record, verdict.reason
        group = reopened.history.group(verdict.found) if reason is None else None
        if group is not None:
            if images is not None:
                images.check(group[0].prompt)
            buffer.restore(*group, verdict.max_lag)
        else:
            buffer.drop_recovered(record.lease_id, record.prompt_index, record.tokens, reason or "damaged")
        counts["ready" if group is not None else reason or "damaged"] += 1
    if buffer.config.durability == "memory":
        buffer.journal.close()
        buffer.journal = InMemory()
    if counts:
        log.info("untrained groups of earlier starts: %s", dict(counts))
    return dict(counts)


# -- which groups are trained ------------------------------------------------------------------------------------------


def bound_in_force(history: History, checkpoint: PolicyVersion | None) -> int | None:
    """Return the bound on lag at the end of the surviving path; None if `buffer.max_lag` was never `auto`.

    Args:
        history: of `read_rest`, which keeps one record of each start.
    """
    path, max_lag = surviving_path(history.starts, checkpoint), None
    for found in history.found:
        match found.record:
            case RunStarted(lineage=lineage, max_lag_is_auto=True) if lineage in path:
                max_lag = found.record.max_lag
            case BoundChanged(version=version) if is_on(path, version):
                max_lag = found.record.max_lag
    return max_lag


def bound_of(lease_id: str, max_lag: int, start: RunStarted) -> int:
    """Return the bound that applies to a group: that of its lease, capped by a fixed bound of a later start.

    Args:
        lease_id, max_lag: as in its `Delivered`.
        start: the start that trains it.
    """
    is_its_own = int(lease_id.partition(".")[0]) == start.lineage
    return max_lag if start.max_lag_is_auto or is_its_own else min(max_lag, start.max_lag)


def judge(history: History, prompts: PromptSource, run_started: RunStarted, config: BufferConfig) -> list[Verdict]:
    """Return a verdict on every group of a history that `read_rest` has read, in order of arrival.

    The reasons: `superseded` (the prompt is done, or a later group is of the same prompt), `incompatible` (sampled or
    scored under other settings, or this start keeps no journal), `ahead` (sampled by weights that are gone), `damaged`, `stale`.

    Args:
        prompts: restored from the checkpoint.
        run_started, config: this start.
    """
    path = surviving_path(history.starts, run_started.parent)
    step = 0 if run_started.parent is None else run_started.parent.number
    verdicts = [
        Verdict(found, record, None, bound_of(record.lease_id, record.max_lag, run_started))
        for found in history.found
        if isinstance(record := found.record, Delivered)
    ]
    ready: dict[int, Verdict] = {}  # by prompt index
    for one in verdicts:
        start, index = history.starts.get(one.found.lineage), one.record.prompt_index
        if not prompts.is_wanted(index):
            one.reason = "superseded"
        elif (
            start is None
            or config.durability == "memory"
            or start.compatibility_key != run_started.compatibility_key
            or start.prompts.order != run_started.prompts.order  # its index is another prompt now
        ):
            one.reason = "incompatible"
        elif not all(is_on(path, version) for version in one.record.versions):
            one.reason = "ahead"
        elif not one.found.body_bytes:
            one.reason = "damaged"
        else:
            if (earlier := ready.get(index)) is not None:
                earlier.reason = "superseded"
            ready[index] = one
    # Under `wait` no group is late unless `max_lag` or P decreased, because admission bounds them (`admission.py`).
    place = 0
    for one in sorted(ready.values(), key=lambda v: (v.deadline, v.record.prompt_index)):
        if config.policy == "train" or place < (one.deadline - step + 1) * config.prompts_per_step:
            place += 1
        else:  # too old before P groups a step would train it
            one.reason = "stale"
    return verdicts


FAILED_ATTEMPTS = BLAMED | {"lease_timeout", "incomplete", "unscored", "lineage", "stale", "cancelled"}
"""Reasons of a drop that count as an attempt of the prompt."""


def earlier_failures(history: History, prompts: PromptSource) -> EarlierFailures:
    """Return the failures of the prompts that are still wanted, over all starts.

    Starts whose weights are gone count too: a prompt that crashed their generators may crash others.
    """
    earlier = EarlierFailures()
    for found in history.found:
        match found.record:
            case Dropped(prompt_index=index, reason=reason) if reason in FAILED_ATTEMPTS and prompts.is_wanted(index):
                earlier.attempts[index] += 1
                earlier.blamed[index] += reason in BLAMED
            case Interrupted(prompt_indices=indices):
                earlier.interruptions.update(filter(prompts.is_wanted, indices))
            case Delivered(prompt_index=index):
                earlier.interruptions.pop(index, None)
    return earlier
