"""A checkpoint is whole or not there, and the newest whole one is where a run goes on."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.checkpoints import Checkpoints, RunState, check_owner, read_state


def state(step: int) -> RunState:
    return RunState(step=step, lineage=1, prompts={"frontier": step}, totals={"tokens_generated": 10.0 * step})


def fill(folder: Path) -> Callable[[], None]:
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    return lambda: None


def test_what_was_written_is_read_back_and_old_ones_go(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 15):
        assert read_state(checkpoints.begin(state(step), fill)()) == state(step)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000010", "step_000015"]
    assert checkpoints.latest() == tmp_path / "checkpoints" / "step_000015"
    (tmp_path / "checkpoints" / "step_000015.old").mkdir()  # of a person
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.begin(state(step), fill)()
    assert [path.name for path in checkpoints.all()] == ["step_1000000", "step_1000001"]


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    whole = checkpoints.begin(state(5), fill)()

    def die(folder: Path) -> Callable[[], None]:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.begin(state(10), die)()
    assert checkpoints.latest() == whole
    assert read_state(checkpoints.begin(state(15), fill)()).step == 15
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000005", "step_000015"]


def test_a_checkpoint_that_is_being_written_does_not_count_and_an_earlier_start_does_not_end_it(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    whole = checkpoints.begin(state(5), fill)()
    finish = checkpoints.begin(state(10), fill)
    assert checkpoints.latest() == whole
    (tmp_path / "lineage").write_text("2")
    with pytest.raises(CheckpointError, match="is owned by start 2 of the run; this is start 1"):
        finish()
    check_owner(tmp_path, 2)
    assert checkpoints.latest() == whole
    (tmp_path / "lineage").unlink()
    assert checkpoints.latest() == whole != finish() == checkpoints.latest()


def test_a_second_checkpoint_of_a_step_is_there_before_the_first_is_removed(tmp_path: Path, monkeypatch):
    """A person may ask for several while a run is paused, and a large one takes seconds to remove."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.begin(state(5), fill)()
    finish, remove = checkpoints.begin(msgspec.structs.replace(state(5), totals={"of": 2.0}), fill), shutil.rmtree

    def die(path: Path, **how: bool) -> None:
        if path.exists():
            raise KeyboardInterrupt
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        finish()
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).totals == {"of": 2.0}


def test_a_checkpoint_whose_state_is_gone_is_not_passed_over(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.begin(state(5), fill)()
    newest = checkpoints.begin(state(10), fill)()
    (newest / "state.json").unlink()
    assert checkpoints.latest() == newest
    with pytest.raises(CheckpointError, match=r"step_000010/state\.json .*; remove .*step_000010 to resume"):
        read_state(newest)
    assert read_state(checkpoints.begin(state(10), fill)()).step == 10
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000005", "step_000010"]


def test_a_disk_that_refuses_is_said_so(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        Checkpoints(tmp_path, keep=1).begin(state(1), fill)()


@pytest.mark.parametrize("error", [CheckpointError("checkpoint cannot be written"), OSError(errno.ENOSPC, "full")])
def test_what_a_disk_refused_does_not_stay_on_it(tmp_path: Path, error: Exception):
    def refused(folder: Path) -> Callable[[], None]:
        fill(folder)
        return Mock(side_effect=error)

    with pytest.raises(CheckpointError, match=r"written|cannot write checkpoint"):
        Checkpoints(tmp_path, keep=1).begin(state(1), refused)()
    assert not [*(tmp_path / "checkpoints").iterdir()]


@pytest.mark.parametrize("text", [None, b"", b"{}", b'{"\xe2": 1}', b'{"step": "five", "lineage": 1, "prompts": {}}'])
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, text: bytes | None):
    if text is not None:
        (tmp_path / "state.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(tmp_path)
