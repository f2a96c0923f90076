"""Parquet files of samples are written atomically, have types, and agree with their groups."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncgrpo.recording.samples import SCHEMA, SampleWriter, samples_of
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, VersionSpan


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


def samples(group, step=18):
    return samples_of(group, step=step, lag=2, advantages=[0.7, None], decode=lambda ids: "".join(map(chr, ids)))


def test_a_row_says_what_was_asked_answered_and_scored(group, tmp_path):
    path = SampleWriter(tmp_path / "samples").write(18, samples(group))
    assert path == tmp_path / "samples" / "step_000018.parquet"
    first, second = pq.read_table(path).to_pylist()
    assert json.loads(first.pop("ground_truth")) == {"target": "é"} and json.loads(first.pop("parts")) == {
        "format": 0.5
    }
    assert first == {
        "step": 18, "version_oldest": "1.16", "version_newest": "1.17", "lag": 2, "group_id": "g1",
        "prompt_id": "train/17", "source": "reverse", "prompt": "hi", "completion": "abc", "reward": 1.0,
        "advantage": 0.7, "failure": None, "finish_reason": "stop", "num_tokens": 3,
    }  # fmt: skip
    assert (second["reward"], second["advantage"], second["failure"]) == (None, None, "timeout")
    assert (second["completion"], second["version_oldest"], second["num_tokens"]) == ("", "", 0)


def test_the_file_has_the_schema_even_when_a_step_has_no_sample(tmp_path):
    path = SampleWriter(tmp_path).write(1, [])
    assert pq.read_schema(path) == SCHEMA and pq.read_table(path).num_rows == 0


def test_columns_are_compressed_with_zstd(group, tmp_path):
    metadata = pq.ParquetFile(SampleWriter(tmp_path).write(18, samples(group))).metadata
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_step_trained_again_replaces_its_file(group, tmp_path):
    writer = SampleWriter(tmp_path)
    writer.write(18, samples(group))
    writer.write(18, samples(group)[:1])
    assert pq.read_table(tmp_path / "step_000018.parquet").num_rows == 1


def test_a_file_is_whole_or_absent(group, tmp_path, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    writer = SampleWriter(tmp_path)
    monkeypatch.setattr("asyncgrpo.recording.samples.os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        writer.write(18, samples(group))
    assert list(tmp_path.glob("*.parquet")) == []
    SampleWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_steps_read_as_one_table(group, tmp_path):
    writer = SampleWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, samples(group, step))
    assert pq.read_table(tmp_path)["step"].to_pylist() == [1, 1, 2, 2, 3, 3]
