"""The tests notice mistakes: each that is planted turns a few of them red."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, planted


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_noticed(name: str, monkeypatch):
    monkeypatch.setenv("ASYNCGRPO_TEST_WAIT_S", "2")  # some wait in vain, for milliseconds without the mistake
    with planted(MUTANTS[name]):
        assert run_tests(MUTANTS[name].tests) is pytest.ExitCode.TESTS_FAILED


def test_a_mistake_is_gone_afterwards():
    name = "two that share the best reward are both trained"
    with planted(MUTANTS[name]):
        pass
    assert run_tests(MUTANTS[name].tests) is pytest.ExitCode.OK


def run_tests(which: str) -> int:
    """Run tests in this process until one fails. They pass without a mistake: they are part of the suite."""
    file, _, name = which.partition("::")
    path = Path(__file__).parent / file
    chosen = [f"{path}::{name}" if name else str(path)]
    # A run inside a run: the alarm of the outer one counts for both, and what the inner one says is nobody's.
    options = ["-x", "-q", "--tb=no", "--no-header"]
    # At its end the last one would collect garbage several times, which takes longer than the tests.
    options += [f"-pno:{name}" for name in ("cacheprovider", "timeout", "xdist", "unraisableexception")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return pytest.main([*chosen, *options])
