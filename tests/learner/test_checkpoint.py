"""What the learner writes can be read back: bitwise identical to go on, and as a Hugging Face model to use."""

import json
import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner import optimizer, saving
from tests.learner.helpers import (
    VERSION,
    learner,
    load,
    make_group,
    plain_logprobs,
    random_groups,
    weights,
    with_true_logprobs,
)
from tests.models import make_tiny_qwen3

GROUPS, MORE = random_groups(4, 4, seed=1), random_groups(4, 4, seed=2)
CRITIC = {"algorithm": {"advantage": "gae"}, "learner": {"lr": 1e-3}}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


HOPELESS = [make_group(0, [0.0, 0.0], [[1], [2]])]
RESUMES = {
    "usual": ({"learner": {"warmup_steps": 10, "lr": 1e-2}}, [GROUPS, MORE]),
    # They count for the schedule, and not for the bias correction of AdamW, which has not seen them.
    "steps without a gradient": ({}, [HOPELESS, GROUPS, HOPELESS]),
    "critic": (CRITIC, [GROUPS]),
    "lora": ({"model": {"lora": {"rank": 4}}}, [GROUPS]),
    "the offloaded optimizer": ({"learner": {"offload_optimizer": True}}, [GROUPS]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_learner_goes_on_bit_for_bit(path, tmp_path, case):
    sections, before = RESUMES[case]
    if case == "lora":
        pytest.importorskip("peft")
    first, resumed = learner(path, **sections), learner(path, **sections)
    for groups in before:
        first.step(groups, VERSION)
    first.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    assert resumed.steps == len(before)
    for groups in (MORE, GROUPS):
        ours, theirs = resumed.step(groups, VERSION), first.step(groups, VERSION)
        for field in ("loss", "grad_norm", "lr", "value_loss"):
            assert getattr(ours, field) == getattr(theirs, field), field
    for mine, other in zip(resumed.parameters, first.parameters, strict=True):
        assert mine.full_tensor().equal(other.full_tensor())


def test_a_checkpoint_is_of_the_step_at_which_it_was_begun_and_written_beside_the_next(path, tmp_path, monkeypatch):
    """The disk stands still until the next step is made."""
    may_write = threading.Event()
    write = saving.dcp.save
    monkeypatch.setattr(saving.dcp, "save", lambda *of, **more: may_write.wait(60) and write(*of, **more))
    first = learner(path)
    first.step(GROUPS, VERSION)
    expected = weights(first)
    wait = first.begin_save(str(tmp_path / "checkpoint"))
    write_export = first.begin_export(str(tmp_path / "export"))
    first.step(GROUPS, VERSION)
    assert not (tmp_path / "checkpoint").exists()
    may_write.set()
    wait()
    write_export()
    resumed = learner(path)
    resumed.load(str(tmp_path / "checkpoint"))
    assert_same(weights(resumed), expected)
    resumed.step(GROUPS, VERSION)
    assert_same(weights(resumed), weights(first))
    assert_same(weights(learner(tmp_path / "export")), expected)


def test_what_cannot_be_written_is_an_error_to_who_waits_and_the_next_checkpoint_is_written(path, tmp_path):
    (tmp_path / "file").touch()
    first = learner(path)
    wait = first.begin_save(str(tmp_path / "file" / "checkpoint"))
    first.save(str(tmp_path / "checkpoint"))
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
    with pytest.raises(CheckpointError, match="cannot be written"):
        wait()
    with pytest.raises(CheckpointError, match="cannot be written"):
        first.export(str(tmp_path / "file"))


def test_a_resumed_learner_knows_which_gradients_are_usual(path, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer, "ENOUGH", 2)
    settings = {"learner": {"spike_factor": 1.001, "grad_clip": 1e-6, "warmup_steps": 10}}
    first = learner(path, **settings)
    reports = [first.step(groups, VERSION) for groups in (GROUPS, MORE, GROUPS)]
    first.save(str(tmp_path / "checkpoint"))
    resumed = learner(path, **settings)
    resumed.load(str(tmp_path / "checkpoint"))
    ours, theirs = ([one.step(g, VERSION).skipped for g in (MORE, GROUPS, MORE)] for one in (resumed, first))
    assert ours == theirs and any("spike_factor" in (reason or "") for reason in ours), reports


def test_a_checkpoint_of_an_earlier_release_knows_of_no_gradients_and_is_read(path, tmp_path, monkeypatch):
    first, resumed, save = learner(path), learner(path), dcp.save
    first.step(GROUPS, VERSION)

    def as_earlier(state: dict, **where) -> None:
        save({name: value for name, value in state.items() if name not in ("guard", "made")}, **where)

    monkeypatch.setattr(dcp, "save", as_earlier)
    first.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    assert resumed.steps == 1 and resumed.step(MORE, VERSION).grad_norm == first.step(MORE, VERSION).grad_norm


def test_an_unfinished_or_foreign_checkpoint_is_refused_by_name(path, tmp_path):
    ours = learner(path)
    with pytest.raises(CheckpointError, match="nothing is not complete"):
        ours.load(str(tmp_path / "nothing"))
    learner(make_tiny_qwen3(tmp_path / "wider", hidden=32)).save(str(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match=r"does not fit .*: rank 0: Size mismatch"):
        ours.load(str(tmp_path / "checkpoint"))
    ours.save(str(tmp_path / "torn"))
    for file in (tmp_path / "torn").glob("*.distcp"):
        os.truncate(file, 0)
    with pytest.raises(CheckpointError, match=r"does not fit .*: rank 0: EOFError$"):
        ours.load(str(tmp_path / "torn"))
    ours.save(str(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match=r"does not fit .*value_head"):
        learner(path, **CRITIC).load(str(tmp_path / "plain"))


@pytest.mark.parametrize("tie", [False, True])
def test_an_export_has_the_log_probs_of_the_learner(tmp_path, tie):
    path = make_tiny_qwen3(tmp_path / "model", tie=tie)
    ours = learner(path)
    ours.step(GROUPS, VERSION)
    ours.export(str(tmp_path / "export"))
    report = ours.step(with_true_logprobs(tmp_path / "export", GROUPS), VERSION)
    assert report.logprob_gap_max < 1e-4
    exported = load(tmp_path / "export")
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tie
    tokens = GROUPS[0].prompt.token_ids, GROUPS[0].rollouts[0].completion.token_ids
    assert abs(plain_logprobs(path, *tokens) - plain_logprobs(tmp_path / "export", *tokens)).max() > 1e-4


def test_a_large_export_is_split_into_files_and_keeps_the_tokenizer(path, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FILE_BYTES", 100_000)
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text(json.dumps(name))
    ours = learner(path, model={"dtype": "bfloat16"})
    ours.export(str(tmp_path / "export"), str(source))
    files = {file.name for file in (tmp_path / "export").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"} <= files
    assert len([name for name in files if name.startswith("model-")]) > 1
    exported = load(tmp_path / "export").state_dict()
    assert all(exported[info.name].equal(tensor.float()) for info, tensor in ours.weights())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_value_head_is_trained_at_its_own_rate_and_neither_published_nor_exported(path, tmp_path):
    ours = learner(path, algorithm={"advantage": "gae", "critic": {"lr_scale": 30.0}}, learner={"lr": 1e-4})
    before = weights(ours)
    ours.step(GROUPS, VERSION)
    # AdamW's first step is the learning rate, whatever the gradient is.
    assert ours.model.value_head.weight.full_tensor().abs().median().item() == pytest.approx(30 * 1e-4, rel=0.01)
    moved = weights(ours)["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert moved.abs().median().item() == pytest.approx(1e-4, rel=0.05)
    names = load(path).state_dict().keys()
    assert {info.name for info in ours.layout()} == names == weights(ours).keys()
    ours.export(str(tmp_path))
    exported = load(tmp_path).state_dict()
    assert exported.keys() == names and all(exported[n].equal(t) for n, t in weights(ours).items())
