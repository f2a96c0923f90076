"""`asyncgrpo samples` shows the completions of a step."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recording.test_sample_files import FIELDS


def row(index: int, step: int, **changes: object) -> dict[str, object]:
    own = {"version_oldest": "1.3", "version_newest": "1.4", "lag": 2, "group_id": f"g{index // 2}", "num_tokens": 5}
    own |= {"prompt_id": f"train/{index}", "prompt": f"question {index}", "completion": f"answer {index}"}
    own |= {"images": "[]", "observed": "[]"}
    return FIELDS | own | {"step": step, "reward": index / 10, "advantage": index - 3.0} | changes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    for step in (1, 2):
        rows = [row(index, step) for index in range(7)]
        rows.append(row(7, step, reward=None, advantage=None, failure="timeout"))
        rows.append(row(8, step, num_tokens=1, completion="\x1b[2Jgone [bold]not markup[/bold] " + "x" * 1000))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples" / f"step_{step:06d}.parquet")
    (tmp_path / "samples" / ".step_000003.parquet.tmp").write_text("half written")
    return tmp_path


def listed(asyncgrpo, *arguments: object) -> list[dict]:
    ended = asyncgrpo("samples", *arguments, "--json")
    assert ended.code == 0
    return [json.loads(line) for line in ended.out.splitlines()]


def shown(asyncgrpo, *arguments: object) -> str:
    return " ".join(asyncgrpo("samples", *arguments).out.split())


def test_the_newest_step_is_shown_in_its_own_order_or_as_asked(asyncgrpo, run):
    rows = listed(asyncgrpo, run)
    assert [r["prompt_id"] for r in rows] == [f"train/{index}" for index in range(5)]
    assert {r["step"] for r in rows} == {2}
    assert {r["step"] for r in listed(asyncgrpo, run, "--step", 1)} == {1}
    drawn = listed(asyncgrpo, run, "--random")
    assert drawn == listed(asyncgrpo, run, "--random") != rows
    assert [r["reward"] for r in listed(asyncgrpo, run, "--best", "--limit", 2)] == [0.8, 0.6]
    assert [r["reward"] for r in listed(asyncgrpo, run, "--worst", "--limit", 2)] == [0.0, 0.1]
    assert asyncgrpo("samples", run, "--best", "--worst").code == 2


def test_a_person_sees_reward_lag_and_weights_of_each_completion(asyncgrpo, run):
    out = shown(asyncgrpo, run, "--limit", 9)
    assert "train/4 reward 0.4 advantage +1.000 lag 2 (weights 1.3 to 1.4) 5 tokens, stop" in out
    assert "failed: timeout not trained" in out and "1 token, stop" in out
    assert "9 of the 9 completions of step 2" in out


def test_what_a_model_wrote_cannot_move_the_cursor_and_is_no_markup(asyncgrpo, run):
    out = shown(asyncgrpo, run, "--best", "--limit", 1)
    assert "\x1b" not in out
    assert "\\x1b[2Jgone [bold]not markup[/bold]" in out
    assert "characters left out" in out
    assert "characters left out" not in shown(asyncgrpo, run, "--best", "--limit", 1, "--full")


def test_the_same_completion_is_shown_once_with_its_count_and_what_an_environment_said_is_marked(asyncgrpo, tmp_path):
    same = {"reward": 0.0, "advantage": 0.0, "prompt": "question", "completion": "look up 7seven.is it"}
    same |= {"prompt_id": "train/0", "observed": "[[9, 15]]"}
    rows = [row(index, 1, **same) for index in range(4)]
    rows.append(row(4, 1, **(same | {"prompt": "another question", "prompt_id": "train/1"})))
    (tmp_path / "samples").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples" / "step_000001.parquet")
    out = shown(asyncgrpo, tmp_path, "--best", "--limit", 1)
    assert out.count("look up 7[environment: seven.]is it") == 1
    assert "train/0 x4 reward 0" in out
    assert "4 of the 5 completions of step 1 (1 different)" in out
    assert "all completions of this step have reward 0" in out
    (tmp_path / "samples").rename(tmp_path / "evals")
    assert "training signal" not in shown(asyncgrpo, tmp_path, "--evals")
    (tmp_path / "evals").rename(tmp_path / "samples")
    counts = {r["prompt_id"]: r["count"] for r in listed(asyncgrpo, tmp_path, "--best")}
    assert counts == {"train/0": 4, "train/1": 1}


def test_what_is_not_there_or_broken_is_named(asyncgrpo, run):
    for arguments, sentence in (
        ([run, "--step", "9"], "has no samples of step 9; there are steps 1 to 2"),
        ([run / "samples"], "holds no samples/step_*.parquet"),
        ([run / "nowhere"], "no such folder"),
    ):
        ended = asyncgrpo("samples", *arguments)
        assert ended.code == 1 and sentence in ended.err
    (run / "samples" / "step_000007.parquet").write_text("not Parquet")
    assert "step_000007.parquet cannot be read as Parquet" in asyncgrpo("samples", run).err
    (run / "samples" / "step_000008.parquet").mkdir()
    assert "there are steps 1 to 7" in asyncgrpo("samples", run, "--step", "8").err, "a folder is no file"


def test_the_completions_of_an_evaluation_are_read_like_those_of_a_step(asyncgrpo, run):
    (run / "samples").rename(run / "evals")
    rows = listed(asyncgrpo, run, "--evals", "--step", 1, "--worst", "--limit", 1)
    assert [(r["prompt_id"], r["step"]) for r in rows] == [("train/0", 1)]
    ended = asyncgrpo("samples", run)
    assert ended.code == 1 and "holds no samples/" in ended.err
