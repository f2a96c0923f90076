"""Reads the rows of a data file: Parquet, JSON Lines or JSON (a list of objects, or {"data": [...]}), by its extension.

A `DataError` names the file, the line or row, and what was expected there.
"""

import base64
import bisect
import codecs
import datetime
import decimal
import difflib
import json
import os
import re
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import xxhash

from asyncgrpo.errors import DataError

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 2**20
"""Rows of Parquet, and bytes of JSON Lines, that are parsed at once."""


class Rows(Sequence[dict[str, Any]]):
    """Rows that are parsed when they are asked for. Iterating them costs less than asking for each."""

    def __init__(self, size: int, read: Callable[[int, int], Iterator[dict[str, Any]]]) -> None:
        """
        Args:
            read: yields the rows from a place up to another one.
        """
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[at] for at in range(self._size)[index]]
        at = range(self._size)[index]  # raises IndexError
        return next(self._read(at, at + 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._read(0, self._size)


def read_rows(path: str | Path) -> Sequence[dict[str, Any]]:
    """The rows of a file, at least one, in the file's order. Those of JSON Lines and Parquet are parsed when asked for.

    Values are those of JSON: Parquet's dates become ISO text, decimals become floats, and bytes become text (base64 where
    they are not UTF-8).

    Raises:
        DataError: the file is missing, empty or broken, its extension is unknown, or a row is no object; what is wrong
            with a row is raised when the row is asked for.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if not path.is_file():
        raise DataError(_why_missing(path, known_extension=reader is not None))
    if reader is None:
        raise DataError(f"{path}: unknown extension {path.suffix!r}; expected {', '.join(_READERS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    rows = reader(path)
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _why_missing(path: Path, *, known_extension: bool) -> str:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in _READERS)
        return f"{path} is a folder; give one file" + (f" of it: {', '.join(inside[:5])}" if inside else "")
    if not known_extension and not path.parent.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return (
            f"{path} is no file; if it is a Hugging Face data set, write hf:{path} (docs/sources.md), or download it and "
            "give its Parquet or JSONL file"
        )
    if not path.parent.is_dir():
        return f"{path}: no such file, and no folder {path.parent}"
    close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_file()], n=3)
    return f"{path}: no such file" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _read_parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    @contextmanager
    def readable() -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {one_line(error)}") from error

    def read(begin: int, end: int) -> Iterator[dict[str, Any]]:
        for batch in table.slice(begin, end - begin).to_batches(max_chunksize=_ROWS_AT_ONCE):
            with readable():
                rows = batch.to_pylist(maps_as_pydicts="strict")
            yield from ({name: plain_value(value) for name, value in row.items()} for row in rows)

    with readable():
        table = pq.read_table(path)
    return Rows(len(table), read)


class _Lines:
    """The rows of a JSON Lines file, by where each begins. The file stays open, so that another may take its name."""

    def __init__(self, path: Path) -> None:
        self._path, digest = path, xxhash.xxh3_128()
        with path.open("rb") as file:
            self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            self._stat = self._stat_now()
            at = len(codecs.BOM_UTF8) if file.peek(3).startswith(codecs.BOM_UTF8) else 0
            self._begins = array("q")
            digest.update(file.read(at))
            for line in file:
                if not line.isspace():
                    self._begins.append(at)
                at += len(line)
                digest.update(line)
        self._begins.append(at)
        self._digest = digest.digest()

    def __len__(self) -> int:
        return len(self._begins) - 1

    def read(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Parse the rows from `begin` up to `end`. Raises DataError, also where the file was changed since."""
        while begin < end:
            first = self._begins[begin]
            stop = min(end, max(begin + 1, bisect.bisect(self._begins, first + _BYTES_AT_ONCE) - 1))
            data = os.pread(self._file, self._begins[stop] - first, first)
            self._refuse_another_content()
            for row in range(begin, stop):
                yield self._parse(data[self._begins[row] - first : self._begins[row + 1] - first], self._begins[row])
            begin = stop

    def _parse(self, line: bytes, at: int) -> dict[str, Any]:
        try:
            row = _OBJECTS.decode(line.decode().rstrip())
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 text: byte {at + error.start} cannot be decoded") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{self._line(at)}, column {error.colno}: broken JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._line(at)}: broken JSON: {_unreadable(error)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self._line(at)}: expected a JSON object, got {kind(row)}")
        return row

    def _line(self, at: int) -> str:
        before = os.pread(self._file, at, 0).count(b"\n")
        return f"{self._path}, line {before + 1}"

    def _stat_now(self) -> tuple[int, int]:
        now = os.fstat(self._file)
        return now.st_size, now.st_mtime_ns

    def _refuse_another_content(self) -> None:
        """Raise DataError if the bytes that the rows were found in are others by now; more bytes behind them are not."""
        if (now := self._stat_now()) == self._stat:
            return
        digest, at = xxhash.xxh3_128(), 0
        while chunk := os.pread(self._file, min(_BYTES_AT_ONCE, self._begins[-1] - at), at):
            digest.update(chunk)
            at += len(chunk)
        if digest.digest() != self._digest:
            raise DataError(
                f"{self._path} was changed while its rows were in use; start again to use what it holds now"
            )
        self._stat = now


def _read_jsonl(path: Path) -> Rows:
    try:
        lines = _Lines(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return Rows(len(lines), lines.read)


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(_text(path), object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        hint = " (one object a line? then name the file .jsonl)" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON: {_unreadable(error)}") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(f'{path}: expected a list of objects or {{"data": [...]}}, got {kind(content)}')
    for index, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {index}: expected a JSON object, got {kind(row)}")
    return content


_READERS: dict[str, Callable[[Path], Sequence[dict[str, Any]]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        values = " and ".join(repr(value)[:40] for name, value in pairs if name == key)
        raise ValueError(f"an object has the key {key!r} twice, with {values}")
    return found


_OBJECTS = json.JSONDecoder(object_pairs_hook=_object_of)


def _unreadable(error: ValueError | RecursionError) -> str:
    """Why JSON that is well formed is refused: an endless number, a key twice, or lists that are nested too deeply."""
    return "nested too deeply" if isinstance(error, RecursionError) else one_line(error)


def plain_value(value: Any) -> Any:
    """A value of Arrow, or of `datasets`, as one of JSON."""
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return value


def kind(value: Any) -> str:
    """Return the name of a JSON value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def one_line(error: Exception) -> str:
    """The error's message on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200]
