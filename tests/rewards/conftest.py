"""Real reward files, real worker processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncgrpo.types import Prompt


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[..., str]:
    """Write a reward file and give its path."""

    def write(text: str, name: str = "my_reward.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def prompt(answer: Any = "42", source: str = "math_reasoning", **rest: Any) -> Prompt:
    return Prompt(prompt_id="train/0", token_ids=(1, 2, 3), answer=answer, source=source, **rest)


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    """The reward workers below a process (this one if None is named), dead ones that nobody reaped included."""
    return [p for p in psutil.Process(pid).children(recursive=True) if not _is_resource_tracker(p)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's own helper, which an engine started earlier in this process leaves behind."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
