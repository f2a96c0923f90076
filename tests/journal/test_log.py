"""What the journal acknowledged is there again, whatever is cut, flipped, killed or full."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncgrpo.journal.history import (
    BatchIssued,
    Committed,
    Damage,
    Delivered,
    Dropped,
    pack,
    read_history,
    repair,
)
from asyncgrpo.journal.log import Disk
from asyncgrpo.types import PolicyVersion
from tests.journal.journals import Clock, began, delivered, failing_disk, group, groups_in, journal


def records():
    yield began(), ()
    for prompt_index in range(3):
        yield delivered(*group(prompt_index))
    yield Dropped(lease_id="1.2.0", prompt_index=2, reason="stale", is_final=False), ()
    yield BatchIssued(step=1, version=PolicyVersion(1, 0), lease_ids=("1.0.0", "1.1.0")), ()
    yield Committed(step=1, prompts=began().prompts), ()


def small_journal() -> tuple[bytes, list[int], list[object]]:
    data, ends, written = b"", [], []
    for record, body in records():
        data += b"".join(map(bytes, pack(record, list(body))))
        ends.append(len(data))
        written.append(record)
    return data, ends, written


def test_cut_at_every_byte_it_reopens_to_what_was_whole_and_goes_on(tmp_path: Path):
    data, ends, written = small_journal()
    path = tmp_path / "journal" / "00000001.journal"
    path.parent.mkdir()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        history = read_history(path.parent)
        whole = sum(end <= length for end in ends)
        assert [found.record for found in history.found] == written[:whole]
        assert history.damage == []
        repair(history)
        assert path.stat().st_size == ([0, *ends])[whole]
    again = journal(path.parent, lineage=2)
    again.append(*delivered(*group(7, lineage=2)))
    again.close()
    assert sorted(groups_in(read_history(path.parent))) == [0, 1, 2, 7]


@pytest.mark.parametrize("bit", [0, 7])
def test_with_any_byte_flipped_the_damaged_record_is_named_and_every_other_one_is_there(tmp_path: Path, bit: int):
    data, ends, written = small_journal()
    path = tmp_path / "00000001.journal"
    starts = [0, *ends[:-1]]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        index = next(i for i, end in enumerate(ends) if position < end)
        history = read_history(tmp_path)
        assert [found.record for found in history.found] == written[:index] + written[index + 1 :]
        segment = history.segments[0]
        if index == len(ends) - 1:  # not to be told from a torn write
            assert segment.torn == Damage(starts[index], len(data)) and not segment.damage
        else:
            assert segment.damage == [Damage(starts[index], ends[index])]
            assert f"{path}, offset {starts[index]}" in history.damage[0]
        assert set(groups_in(history)) == {0, 1, 2} - {index - 1}


def test_a_torn_end_in_a_segment_that_is_not_the_last_is_damage(tmp_path: Path):
    data, ends, _ = small_journal()
    (tmp_path / "00000001.journal").write_bytes(data[:-1])
    (tmp_path / "00000002.journal").write_bytes(data)
    history = read_history(tmp_path)
    assert history.segments[0].damage == [Damage(ends[-2], len(data) - 1)]
    repair(history)
    assert (tmp_path / "00000001.journal").stat().st_size == len(data) - 1, "damage is evidence and stays"


@pytest.mark.parametrize("durability", ["written", "fsync_interval", "fsync_each"])
def test_a_full_disk_makes_nothing_durable_is_said_every_30_s_and_recovers_by_itself(tmp_path, durability, caplog):
    clock = Clock()
    disk = failing_disk(tmp_path / "j", clock)
    log = journal(tmp_path / "j", durability=durability, clock=clock, disk=disk)
    for prompt_index in range(8):
        disk.full_until = math.inf if prompt_index >= 3 else 0.0
        log.append(*delivered(*group(prompt_index)))
    assert log.is_blocked is not None and "No space left" in log.is_blocked and str(tmp_path) in log.is_blocked
    durable = sum(log.is_durable(position) for position in range(1, 9))
    assert durable < 8
    for _ in range(45):  # half a minute and more, while nothing fits
        clock.now_s += 1.0
        log.tick()
        assert log.is_blocked is not None and not log.is_durable(8)
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 2 and all(str(tmp_path) in r.getMessage() for r in errors)
    disk.full_until = 0.0
    clock.now_s += 1.0
    log.tick()
    assert log.is_blocked is None
    log.append(*delivered(*group(8)))
    clock.now_s += 1.0
    log.tick()
    assert log.is_durable(9)
    history = read_history(tmp_path / "j")
    assert history.damage == []
    assert sorted(groups_in(history)) == [*range(9)]


def test_after_a_failed_sync_everything_since_the_last_good_one_is_written_again(tmp_path: Path):
    clock = Clock()
    disk = failing_disk(tmp_path / "j", clock)
    log = journal(tmp_path / "j", durability="fsync_interval", clock=clock, disk=disk)
    log.append(*delivered(*group(0)))
    assert log.sync()
    log.append(*delivered(*group(1)))
    disk.fails_until = math.inf
    assert not log.sync() and not log.is_durable(2)
    (tmp_path / "j" / "00000001.journal").write_bytes(  # the kernel may have thrown the pages away: here it did
        (tmp_path / "j" / "00000001.journal").read_bytes()[:-20]
    )
    disk.fails_until = 0.0
    clock.now_s += 1.0
    log.tick()
    assert log.is_blocked is None and log.sync() and log.is_durable(2)
    history = read_history(tmp_path / "j")
    assert history.damage == [] and set(groups_in(history)) == {0, 1}


def test_bodies_of_trained_and_dropped_groups_are_given_up_and_the_ledger_stays(tmp_path: Path):
    log = journal(tmp_path / "j", segment_bytes=1000)
    for prompt_index in range(12):
        log.append(*delivered(*group(prompt_index)))
        log.append(
            BatchIssued(
                step=prompt_index + 1, version=PolicyVersion(1, prompt_index), lease_ids=(f"1.{prompt_index}.0",)
            )
        )
    before = [f.record for f in read_history(tmp_path / "j").found]
    log.append(Committed(step=8, prompts=began().prompts))
    log.append(Dropped(lease_id="1.8.0", prompt_index=8, reason="stale", is_final=False))
    log.append(Committed(step=8, prompts=began().prompts))
    log.close()
    history = read_history(tmp_path / "j")
    kept = set(groups_in(history))
    assert {9, 10, 11} <= kept and len(kept) <= 6, "only whole segments are retired"
    assert [f.record for f in history.found][: len(before)] == before
    assert history.damage == []


def test_a_checkpoint_settles_the_groups_of_its_own_step(tmp_path: Path):
    log = journal(tmp_path / "j", segment_bytes=1)
    for number in range(3):
        log.append(*delivered(*group(number)))
        log.append(BatchIssued(step=number + 1, version=PolicyVersion(1, number), lease_ids=(f"1.{number}.0",)))
    log.append(Committed(step=2, prompts=began().prompts))
    for left in ({0, 1, 2}, {1, 2}, {2}, {2}):  # one segment in a tick, because a step may have hundreds
        assert set(groups_in(read_history(tmp_path / "j"))) == left
        log.tick()


def test_the_segment_that_is_written_keeps_its_bodies(tmp_path: Path):
    log = journal(tmp_path / "j")
    log.append(*delivered(*group(0)))
    log.append(BatchIssued(step=1, version=PolicyVersion(1, 0), lease_ids=("1.0.0",)))
    log.append(Committed(step=1, prompts=began().prompts))
    log.append(*delivered(*group(1)))
    assert set(groups_in(read_history(tmp_path / "j"))) == {0, 1}, "another file in its place would lose what follows"


@pytest.mark.parametrize("at_most", [1, 10**9])
def test_what_a_call_wrote_in_part_is_written_to_its_end(tmp_path: Path, monkeypatch, at_most: int):
    """A call may take less than it was given, and it is given no more parts than it takes."""
    writev, limit = os.writev, os.sysconf("SC_IOV_MAX")
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [b"".join(parts)[:at_most]]))
    disk = Disk()
    descriptor = disk.create(tmp_path / "folder" / "file")
    many = [b"%d" % i for i in range(2 * limit if at_most > 5 else 9)]
    parts = [b"", b"ab", b"c", b"", memoryview(b"defghij"), *many]
    disk.write(descriptor, parts)
    os.close(descriptor)
    assert (tmp_path / "folder" / "file").read_bytes() == b"".join(parts)


def test_a_new_start_keeps_the_bodies_of_survivors_only_and_a_journal_that_is_kept_loses_none(tmp_path: Path):
    log = journal(tmp_path / "j", segment_bytes=1)
    for prompt_index in range(4):
        log.append(*delivered(*group(prompt_index)))
    log.close()
    for arguments, left in (({"keep": True}, {0, 1, 2, 3}), ({"survivors": {"1.2.0"}}, {2})):
        again = journal(tmp_path / "j", lineage=2, **arguments)
        again.append(Committed(step=1, prompts=began().prompts))
        again.close()
        assert set(groups_in(read_history(tmp_path / "j"))) == left


WRITER = """
import sys
from pathlib import Path
from tests.journal.journals import delivered, group, journal
log = journal(Path(sys.argv[1]), lineage=int(sys.argv[3]), durability=sys.argv[2], segment_bytes=20_000)
acknowledged, order = 0, 0
while True:
    log.append(*delivered(*group(order, lineage=int(sys.argv[3]), tokens=50)))
    log.tick()
    order += 1
    while acknowledged < order and log.is_durable(acknowledged + 1):
        acknowledged += 1
        print(acknowledged, flush=True)
"""


@pytest.mark.parametrize("durability", ["written", "fsync_interval", "fsync_each"])
def test_a_writer_killed_at_any_moment_leaves_all_that_it_acknowledged(tmp_path: Path, durability: str):
    rng = random.Random(durability)
    for lineage in (1, 2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path / "j", durability, str(lineage)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        lines = [first, *process.stdout.readlines()]
        process.wait()
        acknowledged = max(int(line) for line in lines if line.endswith(b"\n"))
        history = read_history(tmp_path / "j")
        prompt_indices = {
            f.record.prompt_index for f in history.found if isinstance(f.record, Delivered) and f.lineage == lineage
        }
        assert history.damage == [] and prompt_indices >= set(range(acknowledged)), f"{acknowledged} were acknowledged"
        assert groups_in(history).keys() >= prompt_indices
