"""What `demo`, `train` and `serve` do before and after a run. A fake replaces the run itself."""

import io
import json
import resource
import shlex
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncgrpo.cli.running import _screen
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.config import load
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.recording.events import EventLog, Follower


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """The runs that were started, without Ray. Each ends at once, drained, with a checkpoint of step 2."""
    from asyncgrpo.cli import running
    from asyncgrpo.cluster import ray_session, run
    from asyncgrpo.learner.checkpoints import Checkpoints, RunState

    started = []

    def execute(self, report=None):
        started.append(self._config)
        lineage = self._folder.next_lineage()
        self._events.write("start", run="run", lineage=lineage, version=f"{lineage}.0", step=0, sizes=self._sizes)
        state = RunState(step=2, lineage=lineage, prompts={})
        Checkpoints(self._folder.path, 2).begin(state, lambda place: lambda: None)()
        self._events.write("end", status="drained", step=2)
        return "drained"

    monkeypatch.setattr(run.Run, "execute", execute)
    monkeypatch.setattr(ray_session, "ray_session", lambda config: nullcontext())
    monkeypatch.setattr(running, "_warm_up", lambda config: None)  # the checks are made here, in this process
    return started


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my files"
    folder.mkdir()
    for number in (1, 2):
        make_demo_model(folder / f"model{number}", seed=number)
    write_demo_task(folder / "train.jsonl", folder / "eval.jsonl", seed=0)
    monkeypatch.chdir(folder)
    return folder


TRAIN = ["--data", "train.jsonl", "--n-gpus", "0", "--engine", "torch", "--out", "a run", "--steps", "9"]
TRAIN += ["data.max_prompt_tokens=32", "sampling.max_tokens=4"]
SERVED = ["quickstart", "model.path=./model1", "data.train=train.jsonl", "data.eval=null", "generators.engine=torch"]


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files. Folders are there with none."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_resume_says_what_changed_and_a_dry_run_of_it_is_refused_as_the_run_would_be(asyncgrpo, started, files):
    first = asyncgrpo("train", "--model", "model1", *TRAIN).out
    assert "changed" not in first and first.count("sequences per step") == 1
    before = contents(files / "a run")
    for wrong, named in (("--model=model2", "model.path"), ("--model=model1 learner.betas=[1,1]", "betas")):
        typed = ["train", *TRAIN, *wrong.split()]
        refused, dry = asyncgrpo(*typed), preview(asyncgrpo, *typed)
        assert (refused.code, refused.err) == (dry.code, dry.err) and dry.code == 1 and named in dry.err
    assert contents(files / "a run") == before and len(started) == 1
    typed = ["train", "--model", "model1", *TRAIN, "--lr", "2e-6", "--rollout-n", "4"]
    for ended in (preview(asyncgrpo, *typed), asyncgrpo(*typed)):
        assert ended.code == 0 and "resuming from step 2" in ended.out
        assert "changed: learner.lr 1e-06 -> 2e-06" in ended.out
        assert "changed: algorithm.group_size 8 -> 4" in ended.out
    events = [json.loads(line) for line in (files / "a run" / "metrics.jsonl").read_text().splitlines()]
    assert {event["key"] for event in events if event["event"] == "changed"} == {"learner.lr", "algorithm.group_size"}


def preview(asyncgrpo, *typed: str):
    before = contents(Path.cwd())
    ended = asyncgrpo(*typed, "--dry-run")
    assert contents(Path.cwd()) == before
    return ended


def test_a_dry_run_says_what_a_run_would_do_and_need(asyncgrpo, started, files, caplog):
    with open(files / "train.jsonl", "a") as file:
        file.write('{"prompt": "999", "ground_truth": null, "data_source": "demo_increment"}\n')
    ended = preview(asyncgrpo, "train", "--model", "model1", "--eval-data", "eval.jsonl", *TRAIN)
    assert ended.code == 0 and not started, ended
    rows = len((files / "train.jsonl").read_text().splitlines())
    assert f"data.train: train.jsonl, {rows:,} rows\n" in ended.out and "data.eval: eval.jsonl, " in ended.out
    assert "1 generator (torch, on CPU) + 1 learner rank" in ended.out and "new, starts at" in ended.out
    assert caplog.text.count("rows have no answer") == 1, "each file is checked once"


def test_a_dry_run_refuses_a_teacher_that_is_missing_or_has_other_tokens(asyncgrpo, started, files):
    tokenizer = files / "model2" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<user>"', '"<you>"'))
    for teacher, why in {"./model3": "algorithm.teacher: the folder ./model3", "model2": "has other tokens"}.items():
        typed = ["algorithm.kl_coef=1", f"algorithm.teacher={teacher}"]
        refused = preview(asyncgrpo, "train", "--model", "model1", *TRAIN, *typed)
        assert refused.code == 1 and why in refused.err, refused


def test_a_dry_run_for_gpus_says_what_they_would_hold(asyncgrpo, started, files, monkeypatch):
    card = SimpleNamespace(name="Card", total_memory=79 * 2**30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    gpus = [word if word != "0" else "4" for word in TRAIN]
    ended = preview(asyncgrpo, "train", "--model", "model1", *gpus)
    assert ended.code == 0 and not started, ended
    assert "2 generators (torch, 1 GPU each) + 2 learner ranks = 4 GPUs" in ended.out
    assert "learner rank  " in ended.out and "  79.0 " in ended.out and "host, a node" in ended.out
    refused = preview(asyncgrpo, "train", "--model", "model1", *gpus, "cluster.gpu_memory_gb=0.5")
    assert refused.code == 1 and refused.err.startswith("error: a learner rank does not fit its GPU"), refused
    assert asyncgrpo("train", "--model", "model1", *gpus).out.count("learner rank  ") == 1 and len(started) == 1


def test_the_run_folder_is_that_of_the_flag_or_else_of_the_file(asyncgrpo, started, files, monkeypatch):
    (files / "mine.yaml").write_text("run: {out: mine}")
    typed = [word for word in TRAIN if word not in ("--out", "a run")]
    (files / "other.yaml").write_text("{extends: mine.yaml, run: {out: '~/theirs'}}")
    (files / "plain.yaml").write_text("run: {seed: 3}")
    monkeypatch.setenv("HOME", str(files))
    monkeypatch.setattr(RunFolder, "status", lambda folder: "done" if folder.path.name == "theirs" else None)
    reads, text_of = [], load.text_of
    monkeypatch.setattr(load, "text_of", lambda file: reads.append(file) or text_of(file))
    cases = [("mine.yaml", [], "mine"), ("mine.yaml", ["--out", "o"], "o"), ("mine.yaml", ["run.out=o"], "o")]
    for config, out, folder in [*cases, ("other.yaml", [], "theirs-2"), ("plain.yaml", [], "runs/train")]:
        ended = preview(asyncgrpo, "train", "--model", "model1", *typed, "--config", config, *out)
        assert ended.code == 0 and f"folder: {files / folder}\n" in ended.out, ended
    assert len(reads) == len(cases) + 3, "each file is read once, `mine.yaml` also for `other.yaml`"


def test_a_dry_run_of_serve_finds_too_few_gpus_and_files_and_a_folder_that_is_taken(
    asyncgrpo, started, files, monkeypatch
):
    typed = ["serve", *SERVED, "run.out=served"]
    assert preview(asyncgrpo, *typed).code == 0
    ended = preview(asyncgrpo, *typed, "generators.gpus_each=64", "generators.count=1")
    assert ended.code == 1 and "this run needs 64 GPUs" in ended.err
    (files / "file").write_text("")
    assert "cannot be written" in preview(asyncgrpo, *typed, "run.out=file/run").err
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    for ended in (preview(asyncgrpo, *typed), asyncgrpo(*typed)):
        assert ended.err.startswith("error: a process may open 64 files, too few") and not started
    assert not started


@pytest.mark.parametrize(
    "typed",
    [
        ["train", "--model", "model1", *TRAIN, "algorithm.corrections=[]"],
        ["demo", "--engine", "torch", "--steps", "9", "--out", "a run", "--max-lag", "1", "algorithm.corrections=[]"],
        ["demo", "--engine", "torch", "--steps", "9"],
        ["serve", *SERVED],
    ],
    ids=["train", "demo", "demo without a folder", "serve"],
)
def test_the_command_to_go_on_goes_on_as_printed(asyncgrpo, started, files, typed):
    first = asyncgrpo(*typed)
    assert first.code == 0, first
    line = next(line for line in reversed(first.out.splitlines()) if ": asyncgrpo " in line)
    again = asyncgrpo(*shlex.split(line.partition(": asyncgrpo ")[2]))
    assert again.code == 0, again
    assert "resuming from step 2" in again.out and "changed" not in again.out
    assert len(started) == 2 and started[0] == started[1]


def test_the_demo_distils_from_a_teacher_that_solves_the_task(asyncgrpo, started, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = asyncgrpo("demo", "--teacher", "--engine", "torch", "--steps", 7, "--out", tmp_path / "run")
    assert "its teacher is a larger model" in ended.out, ended.err
    (config,), path = started, tmp_path / "run" / "teacher"
    assert (config.algorithm.teacher, config.algorithm.kl_kind, config.algorithm.kl_coef) == (str(path), "full", 1.0)
    assert (config.reward.weights, config.data.eval, config.run.steps) == ((0.0,), None, 7)
    tokenizer, teacher = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompts = [[{"role": "user", "content": digits}] for digits in ("735", "999", "018")]
    tokens = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    answers = teacher.generate(torch.tensor(tokens), max_new_tokens=4, do_sample=False)[:, 5:]
    assert tokenizer.batch_decode(answers, skip_special_tokens=True) == ["846", "000", "129"]


def test_a_clock_that_was_set_back_since_the_previous_start_shows_this_start_alone(tmp_path: Path, monkeypatch):
    path, output, polled = tmp_path / "metrics.jsonl", io.StringIO(), threading.Event()

    class Polled(Follower):
        def poll(self):
            yield from super().poll()
            polled.set()

    monkeypatch.setattr("asyncgrpo.recording.screen.Follower", Polled)
    EventLog(path, clock=lambda: time.time() + 3600.0).write("end", status="drained", step=1)
    with _screen(path, Console(file=output)):
        assert polled.wait(30.0)
        EventLog(path).write("end", status="done", step=2)
    assert output.getvalue().split() == ["end", "done", "at", "step", "2"]
