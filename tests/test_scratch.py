"""The next process removes what a killed one left, and nothing of a process that lives."""

import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncgrpo import scratch
from asyncgrpo.errors import ConfigError
from tests.runs import environment

PROCESS = """
import signal, subprocess, sys, time
from asyncgrpo import scratch

folder = scratch.folder()
(folder / "session").mkdir()
(folder / "session" / "log").write_text("x")
(scratch.SHARED_MEMORY / f"sem.{scratch.mark()}-x1").touch()
if "keep" in sys.argv:
    scratch.keep()
print(folder, flush=True)
time.sleep(0 if "end" in sys.argv else 1000)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "_own", None)
    monkeypatch.setattr(scratch.atexit, "register", lambda *args: None)
    return tmp_path


@pytest.fixture
def start(tmp_path):
    """A function that starts another process with a folder and returns both."""
    processes = []

    def run(*arguments: str) -> tuple[subprocess.Popen, Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, *arguments],
            env=environment(tmp_path) | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, Path(process.stdout.readline().strip())

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    scratch._remove_dead(scratch._root())


def memory(folder: Path) -> list[Path]:
    return list(scratch.SHARED_MEMORY.glob(f"*{folder.name}*"))


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(start, temporary):
    dead, left = start()
    _, living = start()
    (stranger := temporary / "asyncgrpo-elsewhere").mkdir()
    dead.kill()
    dead.wait()
    assert left.is_dir() and memory(left)
    own = scratch.folder()
    assert not left.exists() and not memory(left)
    assert (living / "session" / "log").exists() and memory(living)
    assert stranger.exists() and own.is_dir() and own == scratch.folder()


def test_folders_made_under_another_shared_memory_stay(start):
    """Two containers share `/tmp`, not `/dev/shm`: the mark is all by which the other finds what its dead have left."""
    dead, left = start()
    dead.kill()
    dead.wait()
    own = scratch.same_machine()
    (left / ".lock").write_text(f"{own}1 ")
    scratch._remove_dead(scratch._root())
    assert left.is_dir() and memory(left)
    (left / ".lock").write_text(f"another-boot-{own} ")
    scratch._remove_dead(scratch._root())
    assert not left.exists() and not memory(left), "a boot empties every /dev/shm"


def test_a_process_that_ends_removes_what_it_has_and_what_is_to_be_looked_into_stays(start, temporary):
    process, folder = start("end")
    process.wait()
    assert not folder.exists() and not memory(folder)
    process, folder = start("keep")
    process.kill()
    process.wait()
    half_made = scratch._root() / "abcdefgh"
    half_made.mkdir()
    scratch.folder()
    assert (folder / "session" / "log").exists()
    assert not half_made.exists(), "without a lock it was never in use"
    (folder / "keep").unlink()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/")])
def test_a_place_that_others_have_taken_is_refused(temporary, make):
    scratch._root().chmod(0o755)
    scratch.folder()
    assert stat.S_IMODE(scratch._root().stat().st_mode) == 0o700, "one that others could look into is closed"
    shutil.rmtree(scratch._root())
    make(temporary / f"asyncgrpo-{scratch.os.getuid()}")
    scratch._own = None
    with pytest.raises(ConfigError, match="set TMPDIR to another folder"):
        scratch.folder()


def test_nothing_is_removed_from_another_folder(temporary):
    """A folder without a lock counts as dead among ours only."""
    (home := temporary / "home" / "one").mkdir(parents=True)
    scratch._remove_dead(home.parent)
    assert home.is_dir()
