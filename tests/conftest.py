"""How the tests are dealt to the workers of `pytest -n 2`.

A file goes to one worker, in order, since its tests share what they start. In a few files every test starts a whole run
of its own, and is dealt alone. The longest go first, so that no worker is still busy when the others have ended.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runs import kill_started

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("RES_OPTIONS", "timeout:1")
"""As in every process of a run: a lost reply of a DNS server must not take up the deadline of a test."""
os.environ["OMP_NUM_THREADS"] = "1"
"""Two threads of each worker on two cores wait for one another at every operation: tiny models take 100 times as long."""
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts the tests in the background has Ctrl-C ignored, for them and for all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE = {
    "tests/simulation/test_simulation.py",
    "tests/test_benchmarks.py",
    "tests/test_self_healing.py",
    "tests/test_whole_runs.py",
}
"""Files whose tests share nothing."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    from xdist.scheduler import LoadScopeScheduling

    class Dealer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in ALONE else file

    config.option.loadscopereorder = False  # the order is that of the workers, below
    return Dealer(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`XDG_CACHE_HOME` of tests that compile. Both workers share it: torch compiles a header once, for twelve seconds."""
    made = tmp_path_factory.getbasetemp()
    return (made.parent if "PYTEST_XDIST_WORKER" in os.environ else made) / "cache"


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Generator[None]:
    yield
    kill_started()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged is made text that a worker can send: half a surrogate pair is none."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
