"""Rows of reasoning-gym, a library of generators of tasks; it scores their answers too (`rewards/gym.py`).

Row i of a generator is a function of its parameters, its seed and i. So a row carries only these for the reward, which
makes the whole task again.
"""

import importlib.metadata
import json
from functools import lru_cache
from typing import Any

from asyncgrpo.config.explain import near
from asyncgrpo.data.reading import one_line
from asyncgrpo.errors import ConfigError, DataError

ROWS, SEED = 1000, 0
"""`size` and `seed` where the source does not say them."""


def read(source: str, name: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a generator: `prompt`, `ground_truth`, `data_source`, and what the reward makes the task of.

    Args:
        source: for error messages.
        parameters: of the generator's configuration, as JSON or else as text, with `size` (rows) and `seed`.
    Raises:
        ConfigError: reasoning-gym is not installed.
        DataError: it has no such generator, or the generator refuses its parameters.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"{source}: reasoning-gym cannot be imported ({one_line(error)}); pip install 'asyncgrpo[gym]'"
        ) from error
    names = set(reasoning_gym.factory.DATASETS) - {"composite"}  # several generators are several entries of data.train
    if name not in names:
        hint = near(name, names) or "reasoning_gym.factory.DATASETS has all of them"
        raise DataError(f"{source}: reasoning-gym {version()} has no generator {name!r}; {hint}")
    try:
        return list(make(name, tuple(parameters.items())))
    except Exception as error:  # whatever a generator raises for parameters that it cannot use
        raise DataError(f"{source}: {name} of reasoning-gym refuses these parameters: {one_line(error)}") from error


@lru_cache(maxsize=8)
def make(name: str, parameters: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], ...]:
    """The rows, made once: some generators take a second for a row, and the driver checks rows before it tokenises them."""
    import reasoning_gym

    values: dict[str, Any] = {"size": ROWS, "seed": SEED} | {key: _value(text) for key, text in parameters}
    generator = reasoning_gym.create_dataset(name, **values)
    tasks = [generator[index] for index in range(len(generator))]
    return tuple(
        {
            "prompt": task["question"],
            "ground_truth": task["answer"],
            "data_source": f"reasoning-gym:{name}",
            "reasoning_gym": {"name": name, "parameters": values, "index": index},
        }
        for index, task in enumerate(tasks)
    )


def digest(source: str) -> str:
    """The source says what its rows are, for one release of reasoning-gym."""
    return f"{source} {version()}"


def version() -> str:
    """The release of reasoning-gym that is installed; an empty text for none."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
