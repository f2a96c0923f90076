"""Whatever a person gets wrong ends in one clear sentence and exit code 1, before anything is started."""

import json
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from asyncgrpo.cli import running
from asyncgrpo.recording.events import EventLog
from benchmarks.bad_input_cases import CASES, GOOD, ROWS, Case, let_go, rows, train, write
from benchmarks.bad_inputs import make


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "folder"
    make(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, good: Path) -> Path:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    return tmp_path


BY_RULE = "reward.function=null"
MORE = [
    train("adapters for no layer", "model.lora.rank=4", "model.lora.targets=[qproj]"),
    train("a stop of several tokens", "sampling.stop=[end]"),
    train("a data source without a rule", BY_RULE, make=rows(ROWS[0] | {"data_source": "poe\x1b[2Jtry"})),
    train("more generators than memory holds", "generators.count=9999", "learner.ranks=2"),
    train("a slow import", "reward.timeout_s=0.2", make=write("reward.py", "import time; time.sleep(1e6)\n")),
]
WORDS = {
    "an unknown key": ["learner.learning_rate"],
    "a context beyond the model's": ["data.max_prompt_tokens", "2000", "512"],
    "an address that is not ours": ["cluster.bind", "203.0.113.7"],
    "wandb, which is not installed": ["run.loggers", "wandb", "pip install"],
    "a folder without a name": ["--out is empty"],
    "the folder of a run that lives": ["new", "still active"],
    "one GPU": ["needs 1 GPU ", "shared", "has 0", "--n-gpus 0"],
    "more generators than memory holds": ["does not fit the memory of this machine", "it fits with generators.count="],
    "no data file": ["trian.json", "no such file"],
    "a lone surrogate": ["train.json", "row 0", r"\ud800"],
    "prompts that are all too long": ["train.json", "data.max_prompt_tokens"],
    "a data source without a rule": ["data.train (train.json): ", r"poe\x1b[2Jtry", "--reward-func"],
    "a model without tokenizer": ["model.path", "'./model'", "tokenizer.json"],
    "truncated weights": ["model/model.safetensors", "bytes", "download it again"],
    "a model of an unknown kind": ["model.path", "gpt9"],
    "a model without an end token": ["model.path './model'", "eos_token", "generation_config.json", "sampling.stop"],
    "adapters for no layer": ["model.lora.targets", "qproj"],
    "a stop of several tokens": ["sampling.stop", "'end'", "3 tokens"],
    "a slow import": ["reward.py", "0.5 s", "reward.timeout_s"],
    "an environment that is not there": ["environment.name", "http://127.0.0.1:1", "Connection refused"],
}


class Started(Exception):
    """Raised when a run is started that should have been refused."""


@pytest.fixture
def start(folder: Path, monkeypatch, asyncgrpo):
    """`start("train", "--out", "run")` -> (exit code, lines of stderr), of a machine without a GPU and without wandb."""

    def begin(*args: object) -> None:
        raise Started

    monkeypatch.setattr("asyncgrpo.cluster.run.Run", begin)
    monkeypatch.setattr(running, "_warm_up", lambda config: None)  # the checks are made here, in this process
    monkeypatch.setattr("asyncgrpo.cluster.ray_session.ray_session", lambda config: nullcontext())
    monkeypatch.setattr(running, "REWARD_IMPORT_S", 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, list[str]]:
        ended = asyncgrpo(*arguments)
        return ended.code, ended.err.strip().splitlines()

    return run


def of(name: str) -> Case:
    return next(case for case in [*MORE, *CASES] if case.name == f"train: {name}")


@pytest.mark.parametrize("name", WORDS)
def test_one_sentence_and_exit_code_1(folder: Path, start, name: str):
    if "adapters" in name:
        pytest.importorskip("peft")
    case = of(name)
    case.make(folder)
    was_there = set(folder.iterdir())
    code, said = start(*case.arguments)
    let_go()
    assert code == 1
    assert len(said) == 1 and said[0].startswith("error: "), said
    assert [word for word in WORDS[name] if word not in said[0]] == [], said
    assert set(folder.iterdir()) - {folder / "__pycache__"} == was_there, "nothing is left behind"


def test_a_disk_with_too_little_room_for_a_checkpoint(folder: Path, start, monkeypatch):
    usage = shutil._ntuple_diskusage(10**9, 10**9, running._OTHER_FILES_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, (said,) = start("train", *GOOD)
    assert code == 1
    assert "run.out new: a checkpoint takes about" in said
    assert "the other files 64.0 MiB, and the disk has 64.0 MiB left" in said


def test_code_that_nothing_here_isolates(folder: Path, start, monkeypatch):
    code = {"prompt": "a", "data_source": "codecontests", "ground_truth": {"inputs": ["1"], "outputs": ["1"]}}
    write("train.json", json.dumps([code] * 8))(folder)
    monkeypatch.setenv("PATH", str(folder))
    exit_code, said = start("train", *GOOD, BY_RULE)
    assert exit_code == 1
    assert len(said) == 1 and "the package bubblewrap" in said[0] and "--unsafe-rewards" in said[0]
    with socket.create_server(("127.0.0.1", 0)) as sandbox:
        for way_out in ("--unsafe-rewards", f"reward.code.url=http://127.0.0.1:{sandbox.getsockname()[1]}"):
            with pytest.raises(Started):
                start("train", *GOOD, BY_RULE, way_out)


def test_a_finished_run_is_not_begun_again_by_mistake(folder: Path, start):
    log = EventLog(folder / "new" / "metrics.jsonl")
    log.write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    log.write("end", status="done", step=3)
    state = folder / "new" / "checkpoints" / "step_000003"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"step": 3, "lineage": 1, "prompts": {}}')
    code, (said,) = start("train", *GOOD, "--steps", "3")
    assert code == 1
    assert "3 steps done" in said and "run.steps" in said


def test_what_works_and_is_hardly_meant_is_a_warning(folder: Path, start, caplog):
    for epochs, said in ((2, "(50) is more than the rows of data.train (40)"), (1, "the run is one smaller step")):
        with pytest.raises(Started):
            start("train", *GOOD, "buffer.prompts_per_step=50", "run.steps=null", f"run.epochs={epochs}")
        assert said in caplog.text
