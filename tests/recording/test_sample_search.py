"""Completions of a step are found by their text and by what became of them, a page at a time."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncgrpo.recording.samples import Found, Sample, schema, search

FIELDS: dict[str, Any] = {
    "step": 3, "version_oldest": "1.2", "version_newest": "1.2", "lag": 1, "group_id": "g", "prompt_id": "p", "source": "demo",
    "prompt": "2 + 2", "completion": "4", "ground_truth": '"4"', "reward": 1.0, "advantage": 0.5, "failure": None,
    "finish_reason": "stop", "num_tokens": 2, "parts": "{}",
}  # fmt: skip
ROWS = [
    {"completion": "first"},
    {"completion": "Second, with a needle", "reward": 0.0, "advantage": -0.5, "finish_reason": "length"}
    | {"num_tokens": 9},
    {"completion": "third", "reward": None, "failure": "timeout", "advantage": None, "lag": 4},
    {"completion": "fourth", "prompt": "a NEEDLE", "reward": 0.5, "advantage": 0.0},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    for step in (1, 3, 7):
        rows = [asdict(Sample(**{**FIELDS, "step": step, **row})) for row in ROWS]
        table = pa.Table.from_pylist(rows, schema=schema())
        pq.write_table(table, tmp_path / "samples" / f"step_{step:06d}.parquet")
    return tmp_path


def texts(found: Found) -> list[str]:
    return [row["completion"].partition(",")[0].lower() for row in found.rows]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ["first", "second", "third", "fourth"]),
        ({"text": "needle"}, ["second", "fourth"]),
        ({"text": "(needle"}, []),
        ({"only": "failed"}, ["third"]),
        ({"only": "untrained"}, ["third"]),
        ({"only": "truncated"}, ["second"]),
        ({"only": "better"}, ["first"]),
        ({"only": "worse"}, ["second"]),
        ({"sort": "best"}, ["first", "fourth", "second", "third"]),
        ({"sort": "worst"}, ["second", "fourth", "first", "third"]),
        ({"sort": "longest", "limit": 1}, ["second"]),
        ({"sort": "oldest", "limit": 1}, ["third"]),
        ({"offset": 1, "limit": 2}, ["second", "third"]),
        ({"offset": 9}, []),
    ],
)
def test_completions_are_found(run: Path, asked: dict[str, Any], expected: list[str]):
    assert texts(search(run, **asked)) == expected


def test_it_counts_the_matches_and_the_kept_steps(run: Path):
    found = search(run, 3, text="needle", limit=1)
    assert (found.step, found.total, found.found, len(found.rows)) == (3, 4, 2, 1)
    assert (found.first_step, found.last_step) == (1, 7)
    assert search(run).step == 7, "the newest"
