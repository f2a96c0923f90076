"""`asyncgrpo export` copies a model out of a run."""

import json
from pathlib import Path

import pytest


def model(folder: Path, mark: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"mark": mark}))
    (folder / "model.safetensors").write_bytes(b"0" * 2048)
    return folder


def mark_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["mark"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (20, 100):
        model(tmp_path / f"run/checkpoints/step_{step:06d}/hf", f"step {step}")
    model(tmp_path / "run/final", "final")
    return tmp_path / "run"


def test_of_a_run_the_final_model_is_copied_whole(asyncgrpo, run, tmp_path):
    ended = asyncgrpo("export", run, tmp_path / "out")
    assert ended.code == 0
    assert mark_of(tmp_path / "out") == "final"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "run"]


def test_without_a_final_model_the_newest_whole_checkpoint_is_taken(asyncgrpo, run, tmp_path):
    (run / "final").rename(tmp_path / "elsewhere")
    (run / "checkpoints/step_000120/hf").mkdir(parents=True)
    assert "copied 2 files, 2.0 KiB" in asyncgrpo("export", run, tmp_path / "out").out
    assert mark_of(tmp_path / "out") == "step 100"


@pytest.mark.parametrize("below", ["checkpoints/step_000020", "checkpoints/step_000020/hf"])
def test_one_checkpoint_can_be_named(asyncgrpo, run, tmp_path, below):
    asyncgrpo("export", run / below, tmp_path / "out")
    assert mark_of(tmp_path / "out") == "step 20"


def test_a_step_can_be_chosen_and_an_empty_folder_filled(asyncgrpo, run, tmp_path):
    (tmp_path / "out").mkdir()
    asyncgrpo("export", run, tmp_path / "out", "--step", 20)
    assert mark_of(tmp_path / "out") == "step 20"


def test_a_folder_that_holds_something_is_left_alone(asyncgrpo, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    ended = asyncgrpo("export", run, tmp_path / "out")
    assert ended.code == 1
    assert "exists and is not an empty folder" in ended.err
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["nowhere", "out"], ["does not exist", "nowhere"]),
        (["run", "out", "--step", "7"], ["step 7", "20, 100"]),
        (["run/checkpoints", "out"], ["run/checkpoints", "config.json"]),
        (["run", "run/final/copy"], ["run/final/copy", "outside"]),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(asyncgrpo, run, tmp_path, arguments, names):
    source, folder, *rest = arguments
    ended = asyncgrpo("export", tmp_path / source, tmp_path / folder, *rest)
    assert ended.code == 1
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1
    assert all(name in ended.err for name in names), ended.err


def test_a_copy_that_fails_leaves_nothing_behind(asyncgrpo, run, tmp_path):
    (run / "final/tokenizer.json").symlink_to("missing")
    ended = asyncgrpo("export", run, tmp_path / "out")
    assert ended.code == 1
    assert "cannot be copied" in ended.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
