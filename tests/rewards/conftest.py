"""Real reward files, real worker processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncgrpo.rewards import http
from asyncgrpo.rewards.pool import PoolReward
from asyncgrpo.rewards.user import LOAD
from asyncgrpo.types import Prompt


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def _imports_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only workers load users' files in earnest; some tests do so in their own process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[..., str]:
    """Write a reward file and give its path."""

    def write(text: str, name: str = "my_reward.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


BEHAVIOURS = str(Path(__file__).with_name("behaviours.py"))


def behaving(spec: str = BEHAVIOURS, *, timeout_s: float, workers: int) -> PoolReward:
    """The reward of `behaviours.py`, or of another file."""
    return PoolReward(LOAD, {"spec": spec}, what=spec, workers=workers, timeout_s=timeout_s)


def prompt(answer: Any = "42", source: str = "math_reasoning", **rest: Any) -> Prompt:
    return Prompt(prompt_id="train/0", token_ids=(1, 2, 3), answer=answer, source=source, **rest)


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    """The reward workers below a process (this one if None is named), dead ones that nobody reaped included."""
    return [p for p in psutil.Process(pid).children(recursive=True) if not _is_helper(p)]


def _is_helper(process: psutil.Process) -> bool:
    """True of what tests of other folders leave behind: Python's own helper, and what ranks are forks of."""
    try:
        command = " ".join(process.cmdline())
        return "resource_tracker" in command or "tests.learner.ranks" in command
    except psutil.Error:
        return False
