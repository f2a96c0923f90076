"""Rows of a Hugging Face data set, by its id or from a folder of it, as `datasets` loads them.

An id is looked for in the cache of `datasets` where the hub cannot be reached.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo.config.explain import near
from asyncgrpo.config.reach import go_offline, why_no_hub
from asyncgrpo.data.reading import Rows, one_line, plain_value
from asyncgrpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

PARAMETERS = ("split", "name", "revision")
"""What a source may say: `split` (without it `train`), the `name` of a configuration, and a `revision` of the hub."""


def read(source: str, name: str, parameters: dict[str, str]) -> Rows:
    """The rows of one split. Rows of a hub id without `data_source` get the id, by which rules of rewards are chosen.

    Args:
        source: for error messages.
        name: an id of the hub, or a folder that `Dataset.save_to_disk` wrote or that holds data files.
    Raises:
        ConfigError: `datasets` is not installed.
        DataError: it does not know such a data set or split, or can reach neither hub nor cache.
    """
    data = _load(source, name, tuple(sorted(parameters.items())))
    if not len(data):
        raise DataError(f"{source} holds no rows")
    origin = {} if Path(name).is_dir() else {"data_source": name}

    def some(begin: int, end: int) -> Iterator[dict[str, Any]]:
        for row in data if end - begin == len(data) else (data[place] for place in range(begin, end)):
            yield origin | {key: plain_value(value) for key, value in row.items()}

    return Rows(len(data), some)


def digest(source: str, name: str, parameters: dict[str, str]) -> str:
    """The fingerprint by which `datasets` knows this data."""
    return f"{source} {_load(source, name, tuple(sorted(parameters.items())))._fingerprint}"


@lru_cache(maxsize=8)
def _load(source: str, name: str, parameters: tuple[tuple[str, str], ...]) -> "Dataset":
    given = {"split": "train"} | dict(parameters)
    for key in given.keys() - set(PARAMETERS):
        hint = near(key, PARAMETERS) or f"expected {', '.join(PARAMETERS)}"
        raise DataError(f"{source}: unknown parameter {key!r}; {hint}")
    if why := None if Path(name).is_dir() else why_no_hub():
        go_offline()  # before the import, which reads it
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source}: datasets cannot be imported ({one_line(error)}); pip install 'asyncgrpo[hf]', or give a file"
        ) from error
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            return saved[given["split"]] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(name, **given)
    except Exception as error:  # whatever `datasets` and the libraries below it raise
        hub = f"{why}, and " if why else ""
        raise DataError(f"{source}: {hub}datasets cannot load it: {one_line(error) or type(error).__name__}") from error
