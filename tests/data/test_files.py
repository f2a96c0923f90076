"""The formats of data files, and the errors about those that cannot be read."""

import datetime
import decimal
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncgrpo.data.sources import read_rows
from asyncgrpo.errors import DataError

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}},
    {"prompt": [{"role": "user", "content": "漢字?"}], "reward_model": {"style": "rule", "ground_truth": "3"}},
]


@pytest.fixture
def file(tmp_path):
    """A function that writes a file and returns its path."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def test_all_formats_give_the_same_rows(tmp_path, file):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert list(read_rows(str(tmp_path / "rows.parquet"))) == ROWS
    assert list(read_rows(file("rows.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)))) == ROWS
    assert list(read_rows(file("rows.json", json.dumps(ROWS)))) == ROWS
    assert list(read_rows(file("wrapped.json", json.dumps({"data": ROWS})))) == ROWS


def write(path: Path, rows: list[dict]) -> None:
    """As Parquet, or as lines of JSON with blank ones between them."""
    if path.suffix == ".jsonl":
        path.write_text("\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)


def test_jsonl_may_have_blank_lines_a_byte_order_mark_and_odd_line_separators_in_strings(file):
    content = '\ufeff{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}\n'
    assert list(read_rows(file("rows.jsonl", content))) == [{"prompt": "a\u2028b"}, {"prompt": "c"}]


@pytest.mark.parametrize("count", [1, 3000])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_is_the_same_whether_it_is_asked_for_or_iterated(tmp_path, name, count):
    rows = [{"prompt": "é" * (number % 1500), "n": number} for number in range(count)]
    write(tmp_path / name, rows)
    read = read_rows(str(tmp_path / name))
    assert list(read) == rows and len(read) == count
    assert [read[place] for place in range(count)] == rows and read[-1] == rows[-1]
    with pytest.raises(IndexError):
        read[count]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_in_use_stay_whatever_becomes_of_their_file(tmp_path, name):
    write(tmp_path / name, [{"prompt": "a"}, {"prompt": "b"}])
    rows = read_rows(str(tmp_path / name))
    (tmp_path / name).write_bytes(b"")
    assert list(rows) == [{"prompt": "a"}, {"prompt": "b"}] and rows[1] == {"prompt": "b"}


def test_parquet_values_become_what_json_can_hold(tmp_path):
    columns = {
        "vector": ([[1, 2]], [1, 2]),
        "nested": ([{"values": [1.5]}], {"values": [1.5]}),
        "map": (pa.array([[("key", 1)]], pa.map_(pa.string(), pa.int64())), {"key": 1}),
        "day": ([datetime.date(2026, 1, 2)], "2026-01-02"),
        "price": ([decimal.Decimal("1.25")], 1.25),
        "text": ([b"abc"], "abc"),
        "blob": ([b"\xff\xfe"], "//4="),
        "none": (pa.nulls(1), None),
    }
    pq.write_table(pa.table({name: given for name, (given, _) in columns.items()}), tmp_path / "rows.parquet")
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    assert json.loads(json.dumps(row)) == {name: expected for name, (_, expected) in columns.items()}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": }\n', ", line 2: Expecting value"),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', ", line 2: expected a JSON object, got a list"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', "name the file .jsonl"),
        ("a.jsonl", '[\n {"prompt": "a"}\n]', "line 2 column 1 (char 2) (one list of objects? then name the"),
        ("a.json", '{"rows": []}', 'expected a list of objects or {"data": [...]}'),
        ("a.json", "[]", "holds no rows"),
        ("a.jsonl", b'{"prompt": "\xff"}', "line 1: it is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "line 1: it is not UTF-8 text: "),
        ("a.jsonl", '{"prompt": ' + "[" * 99999, "line 1: maximum recursion depth exceeded"),
        ("a.json", '[{"prompt": ' + "1" * 5000 + "}]", "Exceeds the limit (4300 digits)"),
        ("a.parquet", "not parquet", "not a readable Parquet file"),
        ("a.csv", "prompt\na", "expected a file .parquet, .jsonl, .json, or hf:OWNER/NAME"),
    ],
)
def test_a_broken_file_is_named_with_the_place_and_what_was_expected(file, name, content, said):
    path = file(name, content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert path in str(caught.value)
    assert said in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_address_is_named_as_it_was_given():
    with pytest.raises(DataError, match=r"^https://example.com/a.jsonl: no such file; download it"):
        read_rows("https://example.com/a.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_file_that_may_not_be_read_is_named(file, name, monkeypatch):
    path = file(name, "{}")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    monkeypatch.setattr(pq, "read_table", refuse)
    with pytest.raises(DataError, match=rf"{name}.*Permission denied"):
        read_rows(path)
