"""After any crash the groups that were kept come back, or their prompts do; none is trained twice, none is skipped."""

from pathlib import Path

import pytest

from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.buffer.recovery import bring_back, earlier_failures, judge, reopen
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.journal.history import (
    BatchIssued,
    Committed,
    Delivered,
    Dropped,
    History,
    read_history,
    read_rest,
    surviving_path,
)
from asyncgrpo.journal.log import SEGMENT_BYTES
from asyncgrpo.types import Lease, PolicyVersion, Sampling
from tests.buffer.test_buffer import EagerBuffer, deliver, prompts
from tests.journal.journals import began

Checkpoint = tuple[PolicyVersion, PromptState]


def source_of(count: int, checkpoint: Checkpoint | None, seed: int = 0) -> PromptSource:
    source = PromptSource(prompts(count), seed=seed, shuffle=True, epochs=1)
    if checkpoint is not None:
        source.restore(checkpoint[1])
    return source


def untrained(whole: History, checkpoint: PolicyVersion | None) -> History:
    """A history without the groups that were dropped, or trained on the path to the checkpoint."""
    path, settled = surviving_path(whole.starts, checkpoint), set[str]()
    for record in (found.record for found in whole.found):
        if isinstance(record, Dropped):
            settled.add(record.lease_id)
        elif isinstance(record, BatchIssued) and record.step <= path.get(record.version.lineage, -1):
            settled.update(record.lease_ids)
    left = [f for f in whole.found if not isinstance(f.record, Delivered) or f.record.lease_id not in settled]
    return History(whole.folder, whole.segments, left)


def start(
    folder: Path, lineage: int, *, checkpoint: Checkpoint | None = None, count=12, segment_bytes=SEGMENT_BYTES,
    compatibility_key=None, max_attempts=100, seed=0, **config,
) -> tuple[Buffer, dict[str, int]]:  # fmt: skip
    """A start of a run with prompts 0 to count - 1, and what it got from the earlier ones: by the rest of the journal that it
    reads as by all of it."""
    settings_ = BufferConfig(**{"prompts_per_step": 2, "max_lag": 1, "durability": "written"} | config)
    source = source_of(count, checkpoint, seed)
    run_started = began(
        lineage,
        checkpoint and checkpoint[0],
        compatibility_key=compatibility_key or {"sampling": "warm"},
        max_lag=settings_.largest_max_lag,
        prompts=source.state(),
    )
    whole = read_history(folder)
    reopened = reopen(folder, run_started, source, settings_, segment_bytes=segment_bytes)
    assert reopened.failures == earlier_failures(whole, source)
    by_all = judge(untrained(whole, run_started.parent), source, run_started, settings_)
    assert [(v.record, v.reason, v.max_lag) for v in reopened.verdicts] == [
        (v.record, v.reason, v.max_lag) for v in by_all
    ]
    known = {"lineage": lineage, "journal": reopened.journal, "last_max_lag": reopened.max_lag}
    objective = AlgorithmConfig(group_size=2)
    buffer = EagerBuffer(settings_, objective, source, Sampling(), seed=0, max_attempts=max_attempts, **known)
    return buffer, bring_back(buffer, reopened)


def lease(buffer: Buffer) -> Lease:
    lease = buffer.lease("g", 0.0)
    assert lease is not None
    return lease


def payload(message) -> bytes:
    return bytes([message.prompt_index]) * 16


def accept(buffer: Buffer, lease: Lease, version: int, lineage: int = 1) -> None:
    message = deliver(lease, version, lineage=lineage)
    assert buffer.accept(message, payload(message)) is None


@pytest.fixture
def one_step_done(tmp_path: Path):
    """Start 1: groups 0 to 3 delivered at version 0, 0 and 1 trained in step 1, 4 and 5 delivered at version 1."""
    buffer, _ = start(tmp_path, 1)
    buffer.trained(PolicyVersion(1, 0))
    for _ in range(4):
        accept(buffer, lease(buffer), 0)
    assert [e.prompt_index for e in buffer.take(PolicyVersion(1, 0))] == [0, 1]
    before = buffer.prompts.state()
    buffer.trained(PolicyVersion(1, 1))
    for _ in range(2):
        accept(buffer, lease(buffer), 1)
    return tmp_path, before, buffer.prompts.state()


def test_under_other_settings_no_group_is_kept(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    at_1 = PolicyVersion(1, 1), prompts_at_1
    buffer, counts = start(folder, 2, checkpoint=at_1, compatibility_key={"sampling": "cold"})
    assert counts == {"incompatible": 4}
    buffer.trained(PolicyVersion(2, 1))
    assert [lease(buffer).prompt_index for _ in range(4)] == [2, 3, 4, 5]
    drops = [f.record for f in read_history(folder).found if isinstance(f.record, Dropped)]
    assert {(d.prompt_index, d.reason, d.is_final) for d in drops} == {(o, "incompatible", False) for o in (2, 3, 4, 5)}


def test_in_another_order_an_index_is_another_prompt(one_step_done):
    """Before the first checkpoint the seed may change."""
    folder, _, _ = one_step_done
    assert start(folder, 2, seed=1)[1] == {"incompatible": 6}


@pytest.mark.parametrize(
    ("settings", "counts", "taken"),
    [
        ({"max_lag": 0}, {"ready": 2, "stale": 2}, [4, 5]),
        ({"max_lag": 0, "policy": "train"}, {"ready": 4}, [2, 3]),  # lag is not bounded
    ],
)
def test_with_a_smaller_lag_only_what_can_be_trained_in_time_is_kept(one_step_done, settings, counts, taken):
    folder, _, prompts_at_1 = one_step_done
    buffer, found = start(folder, 2, checkpoint=(PolicyVersion(1, 1), prompts_at_1), **settings)
    assert found == counts
    assert [e.prompt_index for e in buffer.take(PolicyVersion(2, 1))] == taken


def test_a_part_without_a_journal_settles_what_was_waiting_and_breaks_no_path(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    buffer, counts = start(folder, 2, checkpoint=(PolicyVersion(1, 1), prompts_at_1), durability="memory")
    assert counts == {"incompatible": 4}
    buffer.trained(PolicyVersion(2, 1))
    for _ in range(2):
        accept(buffer, lease(buffer), 1, lineage=2)
    assert buffer.take(PolicyVersion(2, 1)) is not None
    buffer.trained(PolicyVersion(2, 2))
    at_2 = PolicyVersion(2, 2), buffer.prompts.state()
    buffer, counts = start(folder, 3, checkpoint=at_2)
    assert counts == {}, "also none of the step before"
    assert surviving_path(read_history(folder).starts, at_2[0]) == {1: 1, 2: 2, 3: 2}
    assert not [
        found for found in read_history(folder).found if found.lineage == 2 and isinstance(found.record, Delivered)
    ]


def test_a_start_keeps_only_the_records_that_matter(tmp_path: Path):
    folder = tmp_path / "journal"
    buffer, _ = start(folder, 1, count=1000, segment_bytes=500)
    buffer.trained(PolicyVersion(1, 0))
    for step in range(30):
        while buffer.count(State.READY) < 2:
            accept(buffer, lease(buffer), step)
        assert buffer.take(PolicyVersion(1, step)) is not None
        buffer.trained(PolicyVersion(1, step + 1))
        buffer.journal.append(Committed(step=step + 1, prompts=buffer.prompts.state()))
    checkpoint = PolicyVersion(1, 30), buffer.prompts.state()
    for _ in range(2):
        accept(buffer, lease(buffer), 30)
    buffer.journal.close()
    rest = read_rest(folder, checkpoint[0], lambda index: index < checkpoint[1].frontier)
    assert len(list(folder.glob("*.journal"))) > 30 and len(rest.found) == 4
    buffer, counts = start(folder, 2, checkpoint=checkpoint, count=1000)
    assert counts == {"ready": 2}
