"""Parquet files of samples are written atomically, agree with their groups, and are searched a page at a time."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncgrpo.errors import DataError
from asyncgrpo.recording.samples import Found, Sample, SampleWriter, path_of, samples_of, schema, search
from asyncgrpo.types import Completion, Group, Observation, PolicyVersion, Prompt, Rollout, Score, VersionSpan


def rollout(index: int, tokens: list[int], spans: tuple[VersionSpan, ...], score: Score) -> Rollout:
    ids = np.array(tokens, np.int32)
    return Rollout(Completion(index, ids, np.zeros(len(ids), np.float32), spans, "stop"), score)


@pytest.fixture
def group() -> Group:
    old, new = PolicyVersion(1, 16), PolicyVersion(1, 17)
    prompt = Prompt(prompt_id="train/17", token_ids=(104, 105), answer={"target": "é"}, source="reverse")
    good = Score(value=1.0, parts={"format": 0.5})
    return Group(
        group_id="g1", lease_id="l1", attempt=0, prompt_index=5, purpose="train", prompt=prompt,
        rollouts=(
            rollout(0, [97, 98, 99], (VersionSpan(old, 0, 2), VersionSpan(new, 2, 3)), good),
            rollout(1, [], (), Score(failure="timeout")),
        ),
    )  # fmt: skip


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def samples(group, step=18):
    return samples_of(group, step=step, lag=2, advantages=[0.7, None], decode=lambda ids: "".join(map(chr, ids)))


def test_a_row_says_what_was_asked_answered_and_scored(group, tmp_path):
    path = SampleWriter(tmp_path / "samples", None).write(18, samples(group))
    assert path == tmp_path / "samples" / "000" / "step_000018.parquet"
    first, second = pq.read_table(path).to_pylist()
    written = [json.loads(first.pop(name)) for name in ("ground_truth", "parts")]
    assert written == [{"target": "é"}, {"format": 0.5}]
    assert first == {
        "step": 18, "version_oldest": "1.16", "version_newest": "1.17", "lag": 2, "group_id": "g1",
        "prompt_id": "train/17", "source": "reverse", "prompt": "hi", "completion": "abc", "reward": 1.0,
        "advantage": 0.7, "failure": None, "finish_reason": "stop", "num_tokens": 3, "observed": "[]", "images": "[]",
    }  # fmt: skip
    assert (second["reward"], second["advantage"], second["failure"]) == (None, None, "timeout")
    assert (second["completion"], second["version_oldest"], second["num_tokens"]) == ("", "", 0)
    SampleWriter(tmp_path / "samples", None).write(18, samples(group)[:1])
    assert pq.read_table(tmp_path / "samples").num_rows == 1, "trained again, it replaced its file"
    empty = SampleWriter(tmp_path / "samples", None).write(20, [])
    assert pq.read_schema(empty) == schema() and pq.read_table(empty).num_rows == 0


def test_a_row_says_which_characters_an_environment_said(group):
    """One observation follows the first turn; one ends the completion, as where its last turn found no room."""
    said = (Observation(2, np.array([46, 33], np.int32)), Observation(3, np.array([63], np.int32)))
    first = group.rollouts[0]
    spoken = replace(first, completion=replace(first.completion, observations=said))
    row = samples(replace(group, rollouts=(spoken, group.rollouts[1])))[0]
    assert (row.completion, json.loads(row.observed), row.num_tokens) == ("ab.!c?", [[2, 4], [5, 6]], 3)


def test_a_file_is_whole_or_absent(group, tmp_path, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    writer = SampleWriter(tmp_path, None)
    monkeypatch.setattr("asyncgrpo.recording.samples.os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        writer.write(18, samples(group))
    assert files_in(tmp_path) == [], "what a full disk refused does not fill it further"
    (tmp_path / "000" / ".step_000018.parquet.tmp").touch()  # of a process that was killed
    SampleWriter(tmp_path, None)
    assert files_in(tmp_path) == []


def steps(folder) -> list[int]:
    return sorted(int(path.stem[5:]) for path in folder.rglob("step_*.parquet"))


def write(folder, *numbers: int, keep: int | None = None) -> None:
    writer = SampleWriter(folder, keep)
    for number in numbers:
        writer.write(number, [])


def test_the_newest_files_are_kept(tmp_path):
    (tmp_path / "samples").mkdir()
    write(tmp_path / "samples", *range(1, 8), keep=3)
    assert steps(tmp_path) == [5, 6, 7]
    with pytest.raises(DataError, match=r"no samples of step 1; there are steps 5 to 7 \(run\.keep_samples"):
        search(tmp_path, 1)
    write(tmp_path / "resumed", 1, 2, 3, 4, 5)
    write(tmp_path / "resumed", 3, 4, keep=3)
    assert steps(tmp_path / "resumed") == [3, 4, 5], "what was written last outlives later steps that are undone"


def test_without_limits_everything_is_kept_and_no_other_file_is_ever_removed(tmp_path):
    (tmp_path / "step_best.parquet").touch()
    (tmp_path / "step_000001.csv").touch()
    write(tmp_path, 1, 2, 3)
    assert len(files_in(tmp_path)) == 5
    path_of(tmp_path, 3).unlink()  # by a person
    write(tmp_path, 4, keep=1)
    left = {"step_best.parquet", "step_000001.csv"}
    assert {path.name for path in files_in(tmp_path)} == {"step_000004.parquet"} | left


def test_a_folder_holds_the_files_of_a_thousand_steps_at_most(tmp_path):
    write(tmp_path, 999, 1_000, 260_017)
    paths = ["000/step_000999.parquet", "001/step_001000.parquet", "260/step_260017.parquet"]
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.parquet"))] == paths
    write(tmp_path, 260_018, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["260"], "a folder goes with its last file"


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
