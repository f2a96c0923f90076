"""Which groups of earlier starts are trained by this one: those that are complete, not trained, and of weights that were.

A learner that goes on from a checkpoint makes new weights under a new lineage. Weights that an earlier start made after
that checkpoint are gone, and a group that they sampled is `ahead`: no version number of the new lineage says how old it
is. Everything else is a fact of the path that led to the checkpoint, and is trained if the rule of lag allows it.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncgrpo.buffer.admission import POLICIES
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.group_health import BLAMED, NOTHING, Past
from asyncgrpo.config.schema import BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.format import BatchIssued, Delivered, Dropped, Interrupted, RunStarted
from asyncgrpo.journal.history import Found, History, read_history, repair
from asyncgrpo.journal.log import SEGMENT_BYTES, Disk, InMemory, Journal, Ledger
from asyncgrpo.types import PolicyVersion

log = logging.getLogger(__name__)

Rule = Literal["keep", "drop"]
"""`buffer.after_resume`."""


def surviving_path(starts: Mapping[int, RunStarted], checkpoint: PolicyVersion | None) -> dict[int, int]:
    """For each lineage whose weights are still there: up to which step they are.

    Args:
        starts: those of the run, by lineage.
        checkpoint: where the path ends; None: at the model's folder.
    """
    path: dict[int, int] = {}
    at = checkpoint
    while at is not None:
        path[at.lineage] = at.number
        start = starts.get(at.lineage)
        if start is None:
            break  # it kept no journal: what came before it is not known
        at = start.parent
    # A start that went on from weights on the path served them as its first, whatever became of its own.
    for lineage, start in sorted(starts.items()):
        if start.parent is None and at is None:
            path.setdefault(lineage, 0)
        elif start.parent is not None and is_on(path, start.parent):
            path.setdefault(lineage, start.parent.number)
    return path


def is_on(path: Mapping[int, int], version: PolicyVersion) -> bool:
    """Whether these weights are on the path."""
    return version.number <= path.get(version.lineage, -1)


def trained_on(history: History, path: Mapping[int, int]) -> set[str]:
    """Lease ids of the groups that the path was trained on."""
    return {
        lease_id
        for found in history.found
        if isinstance(record := found.record, BatchIssued) and record.step <= path.get(record.version.lineage, -1)
        for lease_id in record.lease_ids
    }


@dataclass(frozen=True)
class Verdict:
    """What becomes of a group of an earlier start."""

    found: Found
    record: Delivered
    reason: str | None
    """Why it is not trained; None: it is ready."""


def judge(
    history: History,
    prompts: PromptSource,
    *,
    checkpoint: PolicyVersion | None,
    compatibility_key: Mapping[str, str],
    rule: Rule,
    max_lag: int,
    groups_per_step: int,
    policy: str = "wait",
) -> list[Verdict]:
    """A verdict on every group that is neither trained on the path nor dropped, in order of arrival.

    The reasons: `superseded` (the prompt is done, or a later group answers it), `resume` (by the rule `drop`), `terms`
    (sampled or scored under other settings), `ahead` (of weights that are gone), `damaged`, `stale`.

    Args:
        prompts: restored from the checkpoint.
        terms: of this start.
        policy: of this start, a name in `policies.POLICIES`.
    """
    path = surviving_path(history.starts, checkpoint)
    step = 0 if checkpoint is None else checkpoint.number
    settled = trained_on(history, path)
    settled |= {found.record.lease_id for found in history.found if isinstance(found.record, Dropped)}
    open_: dict[str, tuple[Found, Delivered]] = {}
    for found in history.found:
        if isinstance(found.record, Delivered) and found.record.lease_id not in settled:
            open_[found.record.lease_id] = found, found.record

    reasons: dict[str, str | None] = {}
    by_prompt_index: dict[int, str] = {}
    for lease_id, (found, record) in open_.items():
        reasons[lease_id] = reason = _reason(found, record, history, prompts, path, compatibility_key, rule)
        if reason is None:
            if (earlier := by_prompt_index.get(record.prompt_index)) is not None:
                reasons[earlier] = "superseded"
            by_prompt_index[record.prompt_index] = lease_id
    ready = [open_[i][1] for i in by_prompt_index.values()]
    if POLICIES[policy].is_in_order:
        late = _cannot_be_in_time_in_order(ready, prompts, step, max_lag, groups_per_step)
    else:
        late = _cannot_be_in_time(ready, step, max_lag, groups_per_step, POLICIES[policy].counts_from)
    reasons |= dict.fromkeys(late, "stale")
    return [Verdict(found, record, reasons[lease_id]) for lease_id, (found, record) in open_.items()]


def _reason(
    found: Found,
    record: Delivered,
    history: History,
    prompts: PromptSource,
    path: Mapping[int, int],
    compatibility_key: Mapping[str, str],
    rule: Rule,
) -> str | None:
    if not prompts.is_wanted(record.prompt_index):
        return "superseded"
    if rule == "drop":
        return "resume"
    start = history.starts.get(found.lineage)
    if start is None or start.compatibility_key != compatibility_key:
        return "incompatible"
    if not all(is_on(path, version) for version in record.versions):
        return "ahead"
    return None if found.body_bytes else "damaged"


FAILED_ATTEMPTS = BLAMED | {"lease_timeout", "incomplete", "unscored", "lineage", "stale", "cancelled"}
"""Reasons of a drop that count as an attempt of the prompt."""


def past_of(history: History, prompts: PromptSource) -> Past:
    """What the prompts that are still wanted have behind them, over all starts: what a prompt did to a generator under
    weights that are gone it may do again."""
    past = Past(Counter(), Counter(), Counter())
    for found in history.found:
        match found.record:
            case Dropped(prompt_index=prompt_index, reason=reason) if reason in FAILED_ATTEMPTS and prompts.is_wanted(
                prompt_index
            ):
                past.attempts[prompt_index] += 1
                past.blamed[prompt_index] += reason in BLAMED
            case Interrupted(prompt_indices=prompt_indices):
                past.interruptions.update(
                    prompt_index for prompt_index in prompt_indices if prompts.is_wanted(prompt_index)
                )
            case Delivered(prompt_index=prompt_index):
                past.interruptions.pop(prompt_index, None)
    return past


def _cannot_be_in_time(
    records: list[Delivered],
    step: int,
    max_lag: int,
    groups_per_step: int,
    counts_from: Literal["oldest", "newest"] | None,
) -> Collection[str]:
    """Those that P groups a step would not train before they are too old, though they are ready now.

    Where the learner waits there are none, unless `max_lag` or P became smaller: admission bounds them
    (`buffer/staleness.py`).
    """
    if counts_from is None:
        return []
    late, place, decisive = [], 0, 0 if counts_from == "oldest" else -1
    for record in sorted(records, key=lambda r: (r.versions[decisive], r.prompt_index)):
        steps_left = record.versions[decisive].number + max_lag - step
        if place < (steps_left + 1) * groups_per_step:
            place += 1
        else:
            late.append(record.lease_id)
    return late


def _cannot_be_in_time_in_order(
    records: list[Delivered], prompts: PromptSource, step: int, max_lag: int, groups_per_step: int
) -> Collection[str]:
    """The same where a group waits for all prompts before it, also for those that are to be generated again.

    Those were filtered or dropped after the checkpoint, and others took their slots, further from their turn than the
    slots reach. With these in them the prompts before them would find none free, and nothing would be trained any more.
    """
    late, place, prompt_index = [], 0, prompts.state().frontier
    for record in sorted(records, key=lambda r: r.prompt_index):
        place += sum(map(prompts.is_wanted, range(prompt_index, record.prompt_index)))
        prompt_index = record.prompt_index
        if place >= (record.versions[0].number + max_lag - step + 1) * groups_per_step:
            late.append(record.lease_id)
    return late


@dataclass(frozen=True)
class Reopened:
    """The journal of a new start, and what the earlier ones left to it."""

    journal: Ledger
    history: History
    verdicts: list[Verdict]
    past: Past


def reopen(
    folder: Path,
    run_started: RunStarted,
    prompts: PromptSource,
    config: BufferConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    disk: Disk | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Reopened:
    """Read, mend and go on with the journal in `folder`.

    Args:
        began: this start.
        prompts: restored from the checkpoint that it goes on from.
        clock, disk, segment_bytes: of the `Journal`.
    Raises:
        JournalError: the folder cannot be read. (That it cannot be written is waited for.)
    """
    if config.durability == "memory":
        return Reopened(InMemory(), History(folder, []), [], NOTHING)
    history = read_history(folder)
    repair(history)
    verdicts = judge(
        history,
        prompts,
        checkpoint=run_started.parent,
        compatibility_key=run_started.compatibility_key,
        rule=config.after_resume,
        max_lag=config.max_lag,
        groups_per_step=config.prompts_per_step,
        policy=config.policy,
    )
    survivors = {verdict.record.lease_id for verdict in verdicts if verdict.reason is None}
    journal = Journal(
        history,
        run_started,
        config.durability,
        survivors=survivors,
        keep=config.keep_journal,
        clock=clock,
        disk=disk,
        segment_bytes=segment_bytes,
    )
    return Reopened(journal, history, verdicts, past_of(history, prompts))


def bring_back(buffer: Buffer, reopened: Reopened) -> dict[str, int]:
    """Make the groups ready that may be trained and drop the others. Returns their counts: `ready`, or the reason.

    What prompts have behind them comes back as well.
    """
    buffer.remember(reopened.past)
    counts: Counter[str] = Counter()
    for verdict in reopened.verdicts:
        record, reason = verdict.record, verdict.reason
        group = reopened.history.group(verdict.found) if reason is None else None
        if group is not None:
            buffer.restore(*group)
        else:
            buffer.disown(record.lease_id, record.prompt_index, record.tokens, reason or "damaged")
        counts["ready" if group is not None else reason or "damaged"] += 1
    if counts:
        log.info("groups of earlier starts that no step has trained: %s", dict(counts))
    return dict(counts)
