"""The rule for rows of reasoning-gym: its own `score_answer`. It runs inside a worker.

The answer is the text in the last `<answer>…</answer>`; without it, the whole completion. A row names its task
(`data/sources.py`), and the worker makes the task again.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.maths import bound_memory, tagged
from asyncgrpo.rewards.pool import Call

GYM_SOURCE = "reasoning-gym"
"""Prefix of the `data_source` of these rows; the name of the generator follows, after a colon."""
EVALUATING = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose scorers give the answer to Python's `eval`, by themselves or through sympy: a completion could run any
code. (reasoning-gym 0.1.25)"""


def check_gym_source(source: str, *, is_unsafe_allowed: bool) -> None:
    """Raise RewardError for a generator whose scorer would run completions as code, unless that is allowed."""
    name = source.partition(":")[2]
    if name in EVALUATING and not is_unsafe_allowed:
        raise RewardError(
            f"data_source {source!r}: reasoning-gym scores this task by running the answer as Python, as your user; "
            "take another task, or allow it with --unsafe-rewards (reward.code.unsafe=true)"
        )


def load_gym(_: str) -> Callable[[Call], float]:
    """Bound this process's memory and import reasoning-gym, so that no call waits for it."""
    bound_memory()
    import reasoning_gym  # noqa: F401

    return score_gym


def score_gym(call: Call) -> float:
    """Return the score that reasoning-gym gives the answer, mostly from 0 to 1.

    Raises:
        RewardError: the row does not name its task.
    """
    match call.info.get("reasoning_gym"):
        case {"name": str(name), "parameters": dict(parameters), "index": int(index)}:
            pass
        case _:
            raise RewardError("the row does not name its task of reasoning-gym; give data.train=reasoning-gym:NAME")
    generator, task = _task(name, json.dumps(parameters), index)
    answer = tagged(call.completion_text)
    return float(generator.score_answer((call.completion_text if answer is None else answer).strip(), task))


@functools.lru_cache(maxsize=256)
def _task(name: str, parameters: str, index: int) -> tuple[Any, dict[str, Any]]:
    """A generator, and one of its tasks. The completions of a group come one after the other, so it is made once."""
    generator = _generator(name, parameters)
    return generator, generator[index]


@functools.lru_cache(maxsize=64)
def _generator(name: str, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(parameters))
