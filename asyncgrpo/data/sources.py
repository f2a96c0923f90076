"""Where rows come from: a file, a generator of reasoning-gym, or a data set of the Hugging Face hub.

    train.parquet                                      a file (`rows.py`)
    reasoning-gym:chain_sum?min_terms=2&size=2000      rows that reasoning-gym makes (`gym.py`)
    hf:openai/gsm8k?name=main&split=train              a data set that `datasets` loads (`hub.py`)

Two reads of one source give the same rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from asyncgrpo.config.schema import is_file
from asyncgrpo.data import gym, hub
from asyncgrpo.data.reading import read_rows
from asyncgrpo.errors import DataError

DataRows = Sequence[Mapping[str, Any]]


def read_source(source: str, columns: Mapping[str, str]) -> tuple[DataRows, Mapping[str, str]]:
    """The rows of a source, at least one, and the columns that `recognise` is to map.

    Args:
        columns: `data.columns`. The rows of reasoning-gym are made here, so that nothing of them is mapped.
    Raises:
        ConfigError, DataError: it cannot be read; one sentence each.
    """
    if is_file(source):
        return read_rows(source), columns
    scheme, name, parameters = parse(source)
    if scheme == "reasoning-gym":
        return gym.read(source, name, parameters), {}
    return hub.read(source, name, parameters), columns


def digest_of(source: str) -> str:
    """Digest of what a source holds now. Raises OSError where a file cannot be read; else as `read_source`."""
    if is_file(source):
        return Path(source).suffix + digest_of_file(Path(source))
    scheme, name, parameters = parse(source)
    return gym.digest(source) if scheme == "reasoning-gym" else hub.digest(source, name, parameters)


def digest_of_file(path: Path) -> str:
    """Digest of the bytes of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def parse(source: str) -> tuple[str, str, dict[str, str]]:
    """Scheme, name and parameters of `SCHEME:NAME?KEY=VALUE&KEY=VALUE`. Raises DataError."""
    scheme, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    if not name or any(not key or not equals for key, equals, _ in pairs):
        raise DataError(f"{source}: expected {scheme}:NAME, or {scheme}:NAME?KEY=VALUE&KEY=VALUE")
    return scheme, name, {key: value for key, _, value in pairs}
