"""Whatever a person gets wrong ends in one clear sentence and exit code 1, before anything is started."""

import json
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from asyncgrpo.cli import main, running
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.recording.events import EventLog

ROW = {"prompt": "2 + 2 = ?", "ground_truth": "4", "data_source": "math_reasoning"}


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_demo_model(folder, seed=0, hidden=16)
    return folder


@pytest.fixture
def folder(tmp_path: Path, demo_model: Path) -> Path:
    """A model, a data file and a reward without a mistake."""
    shutil.copytree(demo_model, tmp_path / "model")
    (tmp_path / "train.json").write_text(json.dumps([ROW] * 4))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
    )
    return tmp_path


GOOD = [
    *("--model", "model", "--data", "train.json", "--n-gpus", "0", "--engine", "torch", "--out", "run"),
    *("data.max_prompt_tokens=32", "sampling.max_tokens=32"),
]


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def row(**values: object):
    return write("train.json", json.dumps([{**ROW, **values}]))


def cut_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def point_to_a_shard_that_is_not_there(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_the_tokenizer(folder: Path) -> None:
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()


def lose_the_end_token(folder: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (file := folder / "model" / name).exists():
            kept = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("eos_")}
            file.write_text(json.dumps(kept))


def hold(path: Path) -> None:
    run = RunFolder(path)
    run.claim()
    _held.append(run)


_held = []

CASES = {
    "a group of one": (None, ["algorithm.group_size=1"], ["algorithm.group_size", "at least 2"]),
    "a context longer than the model's": (
        None,
        ["data.max_prompt_tokens=100000", "learner.tokens_per_microbatch=200000"],
        ["data.max_prompt_tokens", "100000", "512"],
    ),
    "a key that does not exist": (None, ["algorithm.group_sise=8"], ["algorithm.group_sise", "algorithm.group_size"]),
    "a model folder that is not there": (None, ["model.path=./modle"], ["./modle", "model"]),
    "a model without a tokenizer": (lose_the_tokenizer, [], ["model.path", "'model'", "tokenizer.json"]),
    "weights that are cut short": (cut_weights, [], ["model/model.safetensors", "bytes", "download it again"]),
    "weights that are none": (
        write("model/model.safetensors", "<html>not found</html>"),
        [],
        ["model/model.safetensors", "download it again"],
    ),
    "weights that Git left out": (
        write("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n"),
        [],
        ["model/model.safetensors", "git lfs pull"],
    ),
    "a shard that is not there": (
        point_to_a_shard_that_is_not_there,
        [],
        ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "does not exist"],
    ),
    "a model of no known kind": (
        write("model/config.json", '{"model_type": "perceptron"}'),
        [],
        ["model.path", "model", "perceptron"],
    ),
    "adapters for layers that there are not": (
        None,
        ["model.lora.rank=4", "model.lora.targets=[qproj]"],
        ["model.lora.targets", "qproj"],
    ),
    "a stop of several tokens": (None, ["sampling.stop=[end]"], ["sampling.stop", "'end'", "3 tokens"]),
    "a data file that is not there": (None, ["data.train=trian.json"], ["trian.json", "no such file"]),
    "an evaluation file that is not there": (None, ["--eval-data", "eval.json"], ["eval.json", "no such file"]),
    "broken JSON": (write("train.json", '[{"prompt": "a",]'), [], ["train.json", "line 1"]),
    "rows of no known schema": (write("train.json", '[{"question_text": "a"}]'), [], ["train.json", "row 0", "prompt"]),
    "half of a surrogate pair": (row(prompt="\ud800"), [], ["train.json", "row 0", r"\ud800"]),
    "a prompt without text": (row(prompt=" "), [], ["train.json", "row 0", "its prompt is empty"]),
    "NaN for an answer": (row(ground_truth=float("nan")), [], ["train.json", "row 0", "its answer is nan", "null"]),
    "prompts that are all too long": (row(prompt="2" * 99), [], ["train.json", "data.max_prompt_tokens", "32"]),
    "a data source without a rule": (row(data_source="poetry"), [], ["poetry", "--reward-func"]),
    "a control character": (row(data_source="poe\x1b[2Jtry"), [], [r"poe\x1b[2Jtry"]),
    "a reward file without compute_score": (
        write("reward.py", "def score(x): return 1\n"),
        ["--reward-func", "reward.py"],
        ["reward.py", "compute_score", "score"],
    ),
    "a reward file whose import hangs": (
        write("reward.py", "import time\ntime.sleep(1000)\n"),
        ["--reward-func", "reward.py", "reward.timeout_s=0.2"],
        ["reward.py", "0.5 s", "reward.timeout_s"],
    ),
    "a folder without a name": (None, ["--out", ""], ["--out is empty"]),
    "a tokenizer without an end token": (
        lose_the_end_token,
        [],
        ["model.path 'model'", "eos_token", "generation_config.json", "sampling.stop"],
    ),
    "more generators than memory holds": (
        None,
        ["generators.count=9999", "learner.ranks=2"],
        ["does not fit the memory of this machine", "it fits with generators.count="],
    ),
    "a judge that is not there": (
        None,
        ["reward.function=judge", "reward.judge.url=http://127.0.0.1:1"],
        ["reward.judge.url", "http://127.0.0.1:1/v1/chat/completions", "Connection refused"],
    ),
    "a sandbox that is not there": (
        row(data_source="code", ground_truth={"inputs": ["1"], "outputs": ["1"]}),
        ["reward.code.url=http://127.0.0.1:1"],
        ["reward.code.url", "http://127.0.0.1:1", "Connection refused"],
    ),
    "a reward model that is not there": (
        None,
        ["reward.function=model", "reward.model.path=./modle"],
        ["reward.model.path", "./modle", "did you mean model"],
    ),
    "a server of a reward model that is not there": (
        None,
        ["reward.function=model", "reward.model.path=model", "reward.model.url=http://127.0.0.1:1"],
        ["reward.model.url", "http://127.0.0.1:1/classify", "Connection refused"],
    ),
    "an environment that is not there": (
        None,
        ["environment.name=openenv:http://127.0.0.1:1"],
        ["environment.name", "http://127.0.0.1:1", "Connection refused"],
    ),
    "one GPU": (None, ["--n-gpus", "1"], ["needs 1 GPU ", "shared", "has 0", "--n-gpus 0"]),
    "more GPUs than there are": (None, ["--n-gpus", "3"], ["needs 3 GPUs", "has 0", "--n-gpus 0"]),
    "a logger that is not installed": (None, ["run.loggers=[wandb]"], ["run.loggers", "wandb", "pip install"]),
    "an address of another machine": (None, ["cluster.bind=203.0.113.7"], ["cluster.bind", "203.0.113.7"]),
    "a configuration file that is not there": (None, ["--config", "nothing.yaml"], ["nothing.yaml"]),
    "a run folder below a file": (None, ["run.out=train.json/run"], ["run.out", "train.json/run"]),
    "a run folder that is busy": (lambda folder: hold(folder / "run"), [], ["run", "still active"]),
}


class Started(Exception):
    """Raised when a run is started that should have been refused."""


@pytest.fixture
def train(folder: Path, monkeypatch, capsys):
    """`train("--out", "run")` -> (exit code, lines of stderr), of a machine without a GPU and without wandb."""

    def start(*args: object) -> None:
        raise Started

    monkeypatch.setattr("asyncgrpo.cluster.run.Run", start)
    monkeypatch.setattr(running, "_warm_up", lambda config: None)  # the checks are made here, in this process
    monkeypatch.setattr("asyncgrpo.cluster.ray_session.ray_session_of", lambda config: nullcontext())
    monkeypatch.setattr(running, "REWARD_IMPORT_S", 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["asyncgrpo", "train", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, capsys.readouterr().err.strip().splitlines()

    return run


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_exit_code_1(folder: Path, train, case: str):
    prepare, arguments, words = CASES[case]
    if any("lora" in argument for argument in arguments):
        pytest.importorskip("peft")
    if prepare is not None:
        prepare(folder)
    was_there = set(folder.iterdir())
    code, said = train(*GOOD, *arguments)
    while _held:
        _held.pop().release()
    assert code == 1
    assert len(said) == 1 and said[0].startswith("error: "), said
    for word in words:
        assert word in said[0], f"{word!r} not in {said[0]!r}"
    assert set(folder.iterdir()) == was_there, "nothing is left behind"


def test_a_disk_with_too_little_room_for_a_checkpoint(folder: Path, train, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    code, (said,) = train(*GOOD)
    assert code == 1
    assert "run.out run: a checkpoint takes about" in said and "1000 B" in said


def test_code_that_nothing_here_isolates(folder: Path, train, monkeypatch):
    """Refused before anything is started, unless the person takes the risk."""
    row(data_source="codecontests", ground_truth={"inputs": ["1"], "outputs": ["1"]})(folder)
    monkeypatch.setenv("PATH", str(folder))
    code, said = train(*GOOD)
    assert code == 1
    assert len(said) == 1 and "the package bubblewrap" in said[0] and "--unsafe-rewards" in said[0]
    with socket.create_server(("127.0.0.1", 0)) as sandbox:
        for way_out in ("--unsafe-rewards", f"reward.code.url=http://127.0.0.1:{sandbox.getsockname()[1]}"):
            with pytest.raises(Started):
                train(*GOOD, way_out)


def test_what_is_all_right_is_started(folder: Path, train):
    with pytest.raises(Started):
        train(*GOOD, "--reward-func", "reward.py", "--eval-data", "train.json")


def test_a_finished_run_is_not_begun_again_by_mistake(folder: Path, train):
    log = EventLog(folder / "run" / "metrics.jsonl")
    log.write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    log.write("end", status="done", step=3)
    state = folder / "run" / "checkpoints" / "step_000003"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"step": 3, "lineage": 1, "prompts": {}}')
    code, (said,) = train(*GOOD, "--steps", "3")
    assert code == 1
    assert "3 steps done" in said and "run.steps" in said


def test_rows_without_an_answer_among_others_are_named_in_a_warning(folder: Path, train, caplog):
    rows = [ROW, ROW | {"ground_truth": None}, ROW, ROW | {"ground_truth": ""}]
    write("train.json", json.dumps(rows))(folder)
    with pytest.raises(Started):
        train(*GOOD, "--reward-func", "reward.py")
    assert "train.json: 2 of 4 rows have no answer: 1, 3" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["buffer.prompts_per_step=5", "run.epochs=2"],
            "(5) is more than the rows of data.train (4): a step takes a prompt more than once",
        ),
        (["buffer.prompts_per_step=5", "--epochs", "1"], "data.train (4): the run is one smaller step"),
        (["generators.count=90"], "90 generators and 1 learner ranks on the CPU share "),
    ],
)
def test_what_works_and_is_hardly_meant_is_a_warning(folder: Path, train, caplog, arguments, said):
    with pytest.raises(Started):
        train(*GOOD, "--reward-func", "reward.py", *arguments)
    assert said in caplog.text
