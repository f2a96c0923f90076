"""Reads a data file into rows of plain Python.

Parquet, JSON Lines and JSON (a list of objects, or {"data": [...]}) are understood; the extension decides. What cannot
be read ends in a `DataError` that names the file, the line or row, and what was expected. Which column means what is
`schemas.py`'s business.
"""

import base64
import datetime
import decimal
import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncgrpo.errors import DataError


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Every row of a file, in the file's order, at least one.

    Values are what JSON can hold: Parquet's dates become ISO text, decimals become floats, bytes become text (base64
    where they are not UTF-8).

    Raises:
        DataError: missing, empty or broken file, unknown extension, or a row that is no object.
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
            f"{path} is no file; if it is a Hugging Face dataset id, download it and give its Parquet or JSONL file: "
            "asyncgrpo reads local files only"
        )
    if not path.parent.is_dir():
        return f"{path}: no such file, and no folder {path.parent}"
    close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_file()], n=3)
    return f"{path}: no such file" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {_one_line(error)}") from error
    return [{name: _plain_value(value) for name, value in row.items()} for row in rows]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}, column {error.colno}: broken JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: broken JSON: {_unreadable(error)}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, got {_kind(row)}")
        rows.append(row)
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(_text(path))
    except json.JSONDecodeError as error:
        hint = " (one object a line? then name the file .jsonl)" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON: {_unreadable(error)}") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(f'{path}: expected a list of objects or {{"data": [...]}}, got {_kind(content)}')
    for index, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {index}: expected a JSON object, got {_kind(row)}")
    return content


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
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


def _unreadable(error: ValueError | RecursionError) -> str:
    """Of JSON that may be well formed, but has numbers without end or lists in lists."""
    return "nested too deeply" if isinstance(error, RecursionError) else _one_line(error)


def _plain_value(value: Any) -> Any:
    """What Arrow gives, as what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
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


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
