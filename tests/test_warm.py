"""The warm process: a fork of it does what was asked, and where it is missing everything goes on without it.

`test_self_healing.py` kills that of a run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgrpo import warm
from asyncgrpo.errors import AsyncGRPOError, ConfigError
from tests.runs import environment


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory):
    warm.begin("torch", tmp_path_factory.mktemp("warm"))
    yield
    warm.end()
    assert not warm.is_on()


def look() -> dict:
    tasks = Path(f"/proc/{os.getppid()}/task")
    return {
        "parent": os.getppid(),
        "group": os.getpgrp() == os.getpgid(os.getppid()),
        "imported": "torch" in sys.modules,
        "threads": [(task / "comm").read_text() for task in tasks.iterdir()],
        "HELLO": os.environ.get("HELLO"),
    }


def refuse() -> None:
    raise ConfigError("no")


def test_a_fork_has_everything_imported_and_the_environment_of_who_asks(begun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HELLO", "there")
    seen = warm.call(look)
    assert seen["imported"] and seen["HELLO"] == "there" and seen["group"]
    assert seen["parent"] != os.getpid() and os.getpgid(seen["parent"]) != os.getpgrp(), "Ctrl-C does not reach it"
    # A fork has the thread that forks alone. The one of jemalloc (pyarrow's) is made anew by itself.
    assert len([name for name in seen["threads"] if "jemalloc" not in name]) == 1


def test_what_a_fork_raises_is_raised_here_with_its_traceback(begun):
    with pytest.raises(ConfigError, match="no") as raised:
        warm.call(refuse)
    assert str(raised.value) == "no" and "in refuse" in raised.value.__notes__[0]
    with pytest.raises(AsyncGRPOError, match=r"_exit died"):
        warm.call(os._exit, 3)


@pytest.mark.parametrize("gone", [True, False], ids=["it is gone", "it is ending"])
def test_a_call_is_made_here_if_the_warm_process_was_killed(gone: bool, tmp_path: Path):
    """In a process of its own, as a process has one fork server."""
    script = (
        "import os, pathlib, signal; from asyncgrpo import warm; from multiprocessing import forkserver;"
        f"warm.begin('torch', pathlib.Path({str(tmp_path)!r})); warm_pid = forkserver._forkserver._forkserver_pid;"
        "os.kill(warm_pid, signal.SIGKILL);"
        f"{gone} and os.waitid(os.P_PID, warm_pid, os.WEXITED | os.WNOWAIT);"
        "assert warm.call(os.getpid) == os.getpid() and not warm.is_on()"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True)


def test_ray_starts_its_workers_where_nothing_was_imported_before_the_script(tmp_path: Path):
    # An environment whose .pth files import nothing, as on most machines. Here the CPU shims' one does.
    (tmp_path / "setup_worker.py").write_text("import sys, types\nprint(types.ModuleType.__name__, *sys.argv[1:])")
    worker = str(tmp_path / "default_worker.py")
    script = [sys.executable, "-S", warm.__file__, worker, "--node-ip-address=127.0.0.1"]
    quiet = {name: value for name, value in os.environ.items() if name != warm.ADDRESS}
    ended = subprocess.run(script, capture_output=True, text=True, env=quiet)
    assert (ended.stdout, ended.stderr) == (f"module {worker} --node-ip-address=127.0.0.1\n", "")
