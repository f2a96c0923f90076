"""What the learner writes can be read back: bitwise identical to go on, and as a Hugging Face model to use."""

import json
import os
import resource
import threading

import pytest
import torch
from safetensors.torch import load_file

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner import optimizer, saving
from asyncgrpo.types import PolicyVersion
from tests.learner.helpers import (
    FAMILIES,
    VERSION,
    learner,
    load,
    make_group,
    random_groups,
    weights,
    with_true_logprobs,
)
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

GROUPS, MORE = random_groups(4, 4, seed=1), random_groups(4, 4, seed=2)
CRITIC = {"algorithm": {"advantage": "gae"}, "learner": {"lr": 1e-3}}
SPIKES = {"spike_factor": 1.001, "grad_clip": 1e-6, "warmup_steps": 10}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


HOPELESS = [make_group(0, [0.0, 0.0], [[1], [2]])]
RESUMES = {
    "usual": (make_tiny_qwen3, {"learner": {"warmup_steps": 10, "lr": 1e-2}}, [GROUPS, MORE]),
    # They count for the schedule, and not for the bias correction of AdamW, which has not seen them.
    "steps without a gradient": (make_tiny_qwen3, {}, [HOPELESS, GROUPS, HOPELESS]),
    "critic": (make_tiny_qwen3, CRITIC, [GROUPS]),
    "lora": (make_tiny_qwen3, {"model": {"lora": {"rank": 4}}}, [GROUPS]),
    "the offloaded optimizer": (make_tiny_qwen3, {"learner": {"offload_optimizer": True}}, [GROUPS]),
    "shuffled minibatches": (make_tiny_qwen3, {"learner": {"minibatches": 3, "ppo_epochs": 3}}, [GROUPS]),
    "usual gradients": (make_tiny_qwen3, {"learner": SPIKES}, [GROUPS, MORE, GROUPS]),
    "experts balanced by a loss": (make_tiny_qwen3_moe, {"algorithm": {"router_aux_coef": 0.5}}, [GROUPS]),
    "experts balanced by biases": (make_tiny_deepseek_v3, {"algorithm": {"router_bias_rate": 0.01}}, [GROUPS]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path, monkeypatch, case):
    """In another lineage, as a resume is."""
    make, sections, before = RESUMES[case]
    if case == "lora":
        pytest.importorskip("peft")
    if case == "usual gradients":
        monkeypatch.setattr(optimizer, "ENOUGH", 2)
    path = make(tmp_path / "model")
    first, resumed = learner(path, **sections), learner(path, **sections)
    for groups in before:
        first.step(groups, VERSION)
    first.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    assert resumed.steps == len(before) * first.config.learner.updates_per_step
    skipped = []
    for groups in (MORE, GROUPS, MORE):
        theirs = first.step(groups, VERSION)
        ours = resumed.step(groups, PolicyVersion(VERSION.lineage + 1, VERSION.number))
        for field in ("loss", "grad_norm", "lr", "value_loss", "skipped"):
            assert getattr(ours, field) == getattr(theirs, field), field
        skipped.append(ours.skipped or "")
    assert any("spike_factor" in reason for reason in skipped) == (case == "usual gradients")
    for mine, other in zip(resumed.parameters, first.parameters, strict=True):
        assert mine.full_tensor().equal(other.full_tensor())
    assert_same(weights(resumed), weights(first))


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


def test_a_disk_that_refuses_a_checkpoint_is_named_with_its_reason(tmp_path):
    """Of a tensor that is larger than the buffer of its file, torch alone says: unexpected pos 704 vs 598."""
    first = learner(make_tiny_qwen3(tmp_path / "wide", hidden=256))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/full cannot be written: rank 0: .* File too large$"):
            first.save(str(tmp_path / "full"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_without_the_load_of_experts_is_read_by_a_run_that_balances_them(tmp_path):
    path = make_tiny_qwen3_moe(tmp_path / "model")
    first, balanced = (learner(path, algorithm=of) for of in ({}, {"router_aux_coef": 0.1}))
    first.step(GROUPS, VERSION)
    first.save(str(tmp_path / "checkpoint"))
    balanced.load(str(tmp_path / "checkpoint"))
    assert balanced.steps == 1


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
    with pytest.raises(CheckpointError, match=r"is damaged, or does not fit .*: rank 0: EOFError$"):
        ours.load(str(tmp_path / "torn"))
    ours.save(str(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match=r"does not fit .*value_head"):
        learner(path, **CRITIC).load(str(tmp_path / "plain"))


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ["qwen3", "tied", "qwen3_moe", "deepseek_v3"])
def test_an_export_is_the_model_that_was_trained(tmp_path, kind, lora):
    if lora:
        pytest.importorskip("peft")
    path, folder = FAMILIES[kind](tmp_path / "model"), tmp_path / "export"
    ours = learner(path, model={"lora": {"rank": lora}}, learner={"lr": 1e-2})
    for _ in range(2):
        ours.step(GROUPS, VERSION)
    ours.export(str(folder))
    assert load_file(folder / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    tokens, exported = torch.arange(40)[None] * 5, load(folder)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == (kind == "tied")
    assert not exported(tokens).logits.equal(load(path)(tokens).logits)
    if not lora:  # merged, the sums are others
        trained = load(path)
        for name, parameter in ours.model.language_model.named_parameters():
            trained.get_parameter(name).data.copy_(parameter.full_tensor())
        assert exported(tokens).logits.equal(trained(tokens).logits)
    report = ours.step(with_true_logprobs(folder, GROUPS), VERSION)
    assert report.logprob_gap_max < 1e-4


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


def test_defaults_of_sampling_are_exported_as_they_are_even_if_transformers_would_refuse_them(tmp_path):
    path, export = make_tiny_qwen3(tmp_path / "model"), tmp_path / "export"
    (path / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    learner(path).export(str(export))
    exported = json.loads((export / "generation_config.json").read_text())
    assert (exported["temperature"], exported["top_p"]) == (0.9, 0.6) and load(export)


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
