"""Rows of data: from a file, from a generator of reasoning-gym, or from a data set of the Hugging Face hub.

    train.parquet                                      Parquet, JSON Lines or JSON (a list, or {"data": [...]}), by extension
    reasoning-gym:chain_sum?min_terms=2&size=2000      rows that reasoning-gym makes; it scores them too (`rewards/maths.py`)
    hf:openai/gsm8k?name=main&split=train              a data set that `datasets` loads, from the hub, its cache or a folder

Two reads of one source give the same rows. A `DataError` names the file, the line or row, and the expected form.
"""

import base64
import datetime
import decimal
import hashlib
import importlib.metadata
import io
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from asyncgrpo.config.reach import go_offline, why_no_hub
from asyncgrpo.config.schema import is_file
from asyncgrpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

DataRow = Mapping[str, Any]
DataRows = Sequence[DataRow]


class Misfit(Exception):
    """A row does not match its schema, or an image cannot be read. The message does not name file and row."""


def read_source(source: str, columns: Mapping[str, str]) -> tuple[DataRows, Mapping[str, str]]:
    """Return the rows of a source, at least one, and the columns for `recognise` to map.

    Args:
        columns: `data.columns`. Rows of reasoning-gym are generated here and never mapped.
    Raises:
        ConfigError, DataError: the source cannot be read.
    """
    if is_file(source):
        return read_rows(source), columns
    return (read_gym(source), {}) if source.startswith("reasoning-gym:") else (read_hub(source), columns)


def digest_of(source: str) -> str:
    """Return a digest of the contents of a source. Raises OSError for an unreadable file; else as `read_source`."""
    if is_file(source):
        with open(source, "rb") as file:
            return Path(source).suffix + hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return f"{source} {gym_version() if source.startswith('reasoning-gym:') else _load_hub(source)._fingerprint}"


def parse(source: str) -> tuple[str, dict[str, str]]:
    """Parse `SCHEME:NAME?KEY=VALUE&KEY=VALUE` into name and parameters. Raises DataError."""
    scheme, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    if not name or any(not key or not equals for key, equals, _ in pairs):
        raise DataError(f"{source}: expected {scheme}:NAME, or {scheme}:NAME?KEY=VALUE&KEY=VALUE")
    return name, {key: value for key, _, value in pairs}


# -- files -------------------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 1024
"""Parquet rows parsed per batch."""


class Rows(Sequence[dict[str, Any]]):
    """Rows that are parsed on access. Iteration is cheaper than indexing."""

    def __init__(self, size: int, read: Callable[[int, int], Iterator[dict[str, Any]]]) -> None:
        """
        Args:
            read: yields the rows from `begin` up to `end`.
        """
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return one row. Slices are not supported."""
        at = range(self._size)[index]  # raises IndexError
        return next(self._read(at, at + 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._read(0, self._size)


def read_rows(source: str) -> Sequence[dict[str, Any]]:
    """Return the rows of a file, at least one, in order. JSON Lines and Parquet are parsed on access.

    Values are JSON values: Parquet dates become ISO text, decimals floats, and bytes text (base64 if not UTF-8).

    Raises:
        DataError: the file is missing, empty or broken, its extension is unknown, or a row is not an object. Errors of a
            row are raised on access.
    """
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{source}: expected a file {', '.join(_READERS)}, or hf:OWNER/NAME of the Hugging Face hub")
    if not path.is_file():
        hint = "; download it and name the file" if "://" in source else ""
        raise DataError(f"{source}: no such file{hint}")
    try:
        rows = reader(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or one_line(error)}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _read_parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    @contextmanager
    def readable() -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {one_line(error)}") from error

    def read(begin: int, end: int) -> Iterator[dict[str, Any]]:
        for batch in table.slice(begin, end - begin).to_batches(max_chunksize=_ROWS_AT_ONCE):
            with readable():
                rows = batch.to_pylist(maps_as_pydicts="strict")
            yield from ({name: plain_value(value) for name, value in row.items()} for row in rows)

    with readable():
        table = pq.read_table(path)
    return Rows(len(table), read)


def _read_jsonl(path: Path) -> Rows:
    data, begins, at = path.read_bytes(), array("q"), 0
    for line in io.BytesIO(data):
        if not line.isspace():
            begins.append(at)
        at += len(line)
    begins.append(at)

    def read(begin: int, end: int) -> Iterator[dict[str, Any]]:
        for row in range(begin, end):
            line = data[begins[row] : begins[row + 1]]
            try:
                value = _parsed(line)
                if not isinstance(value, dict):
                    raise ValueError(f"expected a JSON object, got {kind(value)}")
            except (ValueError, RecursionError) as error:
                number = data.count(b"\n", 0, begins[row]) + 1
                hint = (
                    " (one list of objects? then name the file .json)" if row == 0 and line.lstrip()[:1] == b"[" else ""
                )
                what = "it is not UTF-8 text: " if isinstance(error, UnicodeDecodeError) else ""
                raise DataError(f"{path}, line {number}: {what}{one_line(error)}{hint}") from error
            yield value

    return Rows(len(begins) - 1, read)


def _parsed(line: bytes) -> Any:
    """Parse JSON. Python's parser also takes NaN and a byte order mark, in three times the time of msgspec's."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return json.loads(line)


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        hint = " (one object per line? then name the file .jsonl)" if "Extra data" in str(error) else ""
        raise DataError(f"{path}: {one_line(error)}{hint}") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f'{path}: expected a list of objects or {{"data": [...]}}')
    return content


_READERS: dict[str, Callable[[Path], Sequence[dict[str, Any]]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}


def plain_value(value: Any) -> Any:
    """Convert a value of Arrow or `datasets` to a JSON value."""
    match value:
        case dict():
            return {str(key): plain_value(item) for key, item in value.items()}
        case list() | tuple():
            return [plain_value(item) for item in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return float(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
    if hasattr(value, "save"):  # an image, as `datasets` decodes it
        value.save(file := io.BytesIO(), "PNG")
        return {"bytes": plain_value(file.getvalue())}
    return value


def kind(value: Any) -> str:
    """Return the type of a JSON value, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200]


# -- reasoning-gym -----------------------------------------------------------------------------------------------------

GYM_ROWS, GYM_SEED = 1000, 0
"""Defaults of `size` and `seed`."""


def read_gym(source: str) -> list[dict[str, Any]]:
    """Return the rows of a generator: `prompt`, `ground_truth`, `data_source`, and the parameters of the task for the reward.

    Row i is a function of the generator's parameters, its seed and i, so the reward recreates the task from these.

    Args:
        source: with parameters of the generator, as JSON or text, among them `size` (rows) and `seed`.
    Raises:
        ConfigError: reasoning-gym is not installed.
        DataError: unknown generator, or invalid parameters.
    """
    name, parameters = parse(source)
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"{source}: {one_line(error)}; pip install 'asyncgrpo[gym]'") from error
    if name not in reasoning_gym.factory.DATASETS or name == "composite":  # list several in data.train instead
        raise DataError(f"{source}: reasoning-gym {gym_version()} has no generator {name!r}")
    try:
        return list(make_tasks(name, tuple(parameters.items())))
    except Exception as error:  # generators raise anything for invalid parameters
        raise DataError(f"{source}: {name} of reasoning-gym refuses these parameters: {one_line(error)}") from error


@lru_cache(maxsize=8)
def make_tasks(name: str, parameters: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], ...]:
    """Generate the rows, cached: some generators take a second per row, and the driver reads rows twice."""
    import reasoning_gym

    values: dict[str, Any] = {"size": GYM_ROWS, "seed": GYM_SEED} | {
        key: _json_or_text(text) for key, text in parameters
    }
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


def gym_version() -> str:
    return importlib.metadata.version("reasoning-gym")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- the Hugging Face hub ----------------------------------------------------------------------------------------------


def read_hub(source: str) -> Rows:
    """Return the rows of one split. Rows of a hub id without `data_source` get the id, which selects the rule of rewards.

    Args:
        source: a hub id, or a folder written by `Dataset.save_to_disk` or with data files, with parameters of
            `datasets.load_dataset`, such as `split` (default `train`), `name` of a configuration and `revision`.
    Raises:
        ConfigError: `datasets` is not installed.
        DataError: unknown data set or split, or neither hub nor cache has it.
    """
    data, (name, _) = _load_hub(source), parse(source)
    if not len(data):
        raise DataError(f"{source} holds no rows")
    origin = {} if Path(name).is_dir() else {"data_source": name}

    def some(begin: int, end: int) -> Iterator[dict[str, Any]]:
        for row in data if end - begin == len(data) else (data[place] for place in range(begin, end)):
            yield origin | {key: plain_value(value) for key, value in row.items()}

    return Rows(len(data), some)


@lru_cache(maxsize=8)
def _load_hub(source: str) -> "Dataset":
    name, parameters = parse(source)
    given = {"split": "train"} | parameters
    if why := None if Path(name).is_dir() else why_no_hub():
        go_offline()  # before the import, which reads it
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{source}: {one_line(error)}; pip install 'asyncgrpo[hf]', or give a file") from error
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            return saved[given["split"]] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(name, **given)
    except Exception as error:  # of many kinds, from `datasets` and its dependencies
        hub = f"{why}, and " if why else ""
        raise DataError(f"{source}: {hub}datasets cannot load it: {one_line(error) or type(error).__name__}") from error
