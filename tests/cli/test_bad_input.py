"""Whatever a person gets wrong ends in one clear sentence and exit code 1, before anything is started."""

import json
import sys
from pathlib import Path

import pytest

from asyncgrpo.cli import main
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.recording.events import EventLog
from tests.models import make_tiny_qwen3
from tests.runs import asyncgrpo

ROW = {"prompt": "2 + 2 = ?", "ground_truth": "4", "data_source": "math_reasoning"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a data file and a reward that are all right."""
    make_tiny_qwen3(tmp_path / "model", layers=1, hidden=32)
    (tmp_path / "train.json").write_text(json.dumps([ROW] * 4))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
    )
    return tmp_path


GOOD = ["--model", "model", "--data", "train.json", "--n-gpus", "0", "--engine", "torch", "--out", "run"]


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


CASES = {
    "a group of one": (None, ["algorithm.group_size=1"], ["algorithm.group_size", "at least 2"]),
    "a context longer than the model's": (
        None,
        ["data.max_prompt_tokens=100000", "learner.tokens_per_microbatch=200000"],
        ["data.max_prompt_tokens", "100000", "2048"],
    ),
    "a key that does not exist": (None, ["algorithm.group_sise=8"], ["algorithm.group_sise", "algorithm.group_size"]),
    "a key of verl's": (None, ["actor_rollout_ref.rollout.n=5"], ["algorithm.group_size"]),
    "a value of the wrong type": (None, ["learner.lr=fast"], ["learner.lr", "fast"]),
    "a model folder that is not there": (None, ["model.path=./modle"], ["./modle", "model"]),
    "a data file that is not there": (None, ["data.train=trian.json"], ["trian.json", "train.json"]),
    "broken JSON": (write("train.json", '[{"prompt": "a",]'), [], ["train.json", "line 1"]),
    "rows of no known schema": (write("train.json", '[{"question_text": "a"}]'), [], ["train.json", "row 0", "prompt"]),
    "a data source without a rule": (
        write("train.json", json.dumps([{**ROW, "data_source": "poetry"}])),
        [],
        ["poetry", "--reward-func"],
    ),
    "a reward file without compute_score": (
        write("reward.py", "def score(x): return 1\n"),
        ["--reward-func", "reward.py"],
        ["reward.py", "compute_score", "score"],
    ),
    "a reward file with a syntax error": (
        write("reward.py", "def compute_score(:\n"),
        ["--reward-func", "reward.py"],
        ["reward.py", "line 1"],
    ),
    "one GPU": (None, ["--n-gpus", "1"], ["--n-gpus", "1"]),
    "a configuration file that is not there": (None, ["--config", "nothing.yaml"], ["nothing.yaml"]),
    "an engine that does not exist": (None, ["--engine", "vllm"], ["generators.engine", "vllm"]),
    "a run folder that is busy": (lambda folder: hold(folder / "run"), [], ["run", "still going"]),
}
_held = []


def hold(path: Path) -> None:
    run = RunFolder(path)
    run.claim()
    _held.append(run)


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_exit_code_1(folder: Path, case: str, monkeypatch, capsys):
    prepare, arguments, words = CASES[case]
    if prepare is not None:
        prepare(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["asyncgrpo", "train", *GOOD, *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main()
    while _held:
        _held.pop().release()
    said = capsys.readouterr().err.strip().splitlines()
    assert exit_.value.code == 1
    assert len(said) == 1 and said[0].startswith("error: "), said
    for word in words:
        assert word in said[0], f"{word!r} not in {said[0]!r}"


def test_a_finished_run_is_not_begun_again_by_mistake(folder: Path):
    log = EventLog(folder / "run" / "metrics.jsonl")
    log.write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    log.write("end", status="done", step=3)
    state = folder / "run" / "checkpoints" / "step_000003"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"step": 3, "lineage": 1, "prompts": {}}')
    result = asyncgrpo("train", *GOOD, "--steps", "3", cwd=folder, timeout_s=120)
    assert result.returncode == 1
    assert "3 steps done" in result.stderr and "run.steps" in result.stderr
