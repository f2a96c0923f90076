"""An agent of a user: a function that calls the model through an OpenAI-compatible URL, and returns a reward.

It runs in the processes of `worker.py`, one call for each completion, many at once.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from asyncgrpo.environments.base import Access, Task, names_of
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.user import run_file, split_spec

DEFAULT_NAME = "run"
AGENT = "agent:"
"""How the specification of an agent begins, among those of environments."""
GIVEN = ("base_url", "api_key", "model")
"""What an agent may ask for by name, beside what a row has."""


class UserAgent:
    """An agent function of a user, checked."""

    scores = True
    tools: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, function: Callable[..., Any], path: Path, name: str, takes: tuple[str, ...]) -> None:
        """
        Args:
            takes: the names of what it is called with.
        """
        self.call, self._takes = function, takes
        self.about = f"{name} of {path.name}"

    def arguments(self, task: Task, access: Access) -> dict[str, Any]:
        """What it is called with."""
        known = task.named() | {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        return {name: known[name] for name in self._takes}


def load_agent(spec: str) -> UserAgent:
    """The agent that `FILE.py` or `FILE.py:FUNCTION` names. Raises RewardError, one sentence."""
    # Its client would ask a proxy for our address otherwise.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1"]))
    path, name = split_spec(spec, DEFAULT_NAME)
    module = run_file(path, "agent")
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key for key, one in vars(module).items() if inspect.isfunction(one) and one.__module__ == module.__name__
        ]
        there = f"it has {', '.join(own)}: name one with {path.name}:{own[0]}" if own else "it has no function at all"
        raise RewardError(f"{path} has no function {name}; {there}")
    takes = names_of(function, (*GIVEN, *Task.NAMES), f"{path}: {name}")
    if "base_url" not in takes:
        raise RewardError(f"{path}: {name} takes no base_url, so it cannot reach the model that is trained")
    return UserAgent(function, path, name, takes)
