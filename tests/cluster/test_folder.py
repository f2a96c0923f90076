"""A run folder has one owner, counts its starts, and knows the status of its run."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from asyncgrpo.cluster.folder import RunFolder, hold, is_abandoned, unused
from asyncgrpo.errors import CheckpointError
from asyncgrpo.metrics import retire_targets_beside, targets_path, write_targets
from asyncgrpo.recording.events import EventLog


def test_one_owner_at_a_time(tmp_path: Path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.check_free()
    assert not (tmp_path / "run").exists(), "it was seen without touching it"
    first.claim()
    for look in (second.claim, second.check_free):
        with pytest.raises(CheckpointError, match="still active"):
            look()
    first.release()
    second.check_free()
    second.claim()
    second.release()


def test_a_killed_run_is_still_missed_for_a_day_and_no_other_run_is_touched(tmp_path: Path):
    runs = [RunFolder(tmp_path / name) for name in ("killed", "living")]
    for run in runs:
        run.claim()
        write_targets(run.path, {"driver": ("127.0.0.1", 1)})
    runs[0].release()  # as its end does
    write_targets(tmp_path / "folder-is-not-here", {"driver": ("127.0.0.1", 1)})
    killed, living = (targets_path(run.path) for run in runs)
    before, a_day = living.read_text(), 86400.0
    os.utime(killed, (0.0, time.time() - 3 * a_day))  # it ran for days, and no process of it started meanwhile
    retire_targets_beside(tmp_path / "new", is_abandoned)
    (entry,) = json.loads(killed.read_text())
    assert entry["targets"] == ["127.0.0.1:0"], "its ports may belong to another run by now"
    assert entry["labels"] == {"run": "killed", "role": "driver", "rank": "0", "instance": "driver-0"}
    os.utime(killed, (0.0, time.time() - 1.1 * a_day))
    retire_targets_beside(tmp_path / "new", is_abandoned)
    assert not killed.exists(), "by then someone knows, or nobody cares"
    assert living.read_text() == before and targets_path(tmp_path / "folder-is-not-here").exists()
    runs[1].release()


def test_two_runs_that_start_at_once_may_find_the_same_targets_of_a_killed_one(tmp_path: Path):
    write_targets(tmp_path / "killed", {"learner-0": ("127.0.0.1", 1)})

    def removed_by_the_other(run: Path) -> bool:
        targets_path(run).unlink()
        return True

    retire_targets_beside(tmp_path / "new", removed_by_the_other)
    assert not targets_path(tmp_path / "killed").exists()


def test_no_lineage_is_given_twice(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    assert [folder.next_lineage() for _ in range(3)] == [1, 2, 3]
    folder.release()
    assert RunFolder(tmp_path / "run").next_lineage() == 4
    for written in (b"two", b"", b"-1", b"\xff"):
        (tmp_path / "run" / "lineage").write_bytes(written)
        with pytest.raises(CheckpointError, match="run/lineage does not hold the number of the newest start"):
            folder.next_lineage()
    (tmp_path / "run" / "lineage").write_text("1000\n")  # by a person, as the message says
    assert folder.next_lineage() == 1001
    (tmp_path / "run" / f".lineage.{os.getpid()}.tmp").mkdir()
    with pytest.raises(CheckpointError, match="run/lineage cannot be written: Is a directory"):
        folder.next_lineage()
    with pytest.raises(CheckpointError, match="lineage"):
        RunFolder(tmp_path / "run" / "lineage" / "run").claim()


def test_how_a_run_stands_is_what_its_last_start_came_to(tmp_path: Path):
    path = tmp_path / "run"
    assert RunFolder(path).status() == "new"
    log = EventLog(path / "metrics.jsonl")
    log.write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    assert RunFolder(path).status() == "unfinished"
    log.write("end", status="drained", step=3)
    assert RunFolder(path).status() == "unfinished"
    log.write("end", status="done", step=9)
    assert RunFolder(path).status() == "done"
    assert unused(path) == tmp_path / "run-2"
    log.write("start", run="run", lineage=2, version="2.9", step=9, sizes="")
    assert RunFolder(path).status() == "unfinished" and unused(path) == path


def test_a_lock_is_waited_for_and_given_up_with_a_name(tmp_path: Path):
    held = hold(tmp_path / "lock", 0.0)
    with pytest.raises(CheckpointError, match=r"lock is still held"):
        hold(tmp_path / "lock", 0.3)
    threading.Timer(0.2, os.close, (held,)).start()
    os.close(hold(tmp_path / "lock", 30.0))
