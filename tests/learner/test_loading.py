"""Every rank reads the rows that it keeps, and holds bitwise what transformers would have loaded."""

import json
import logging
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncgrpo.config.schema import ParallelConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner import model as learner_model
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.loading import ShardReader, without_memory
from asyncgrpo.learner.model import TokenScorer, build_model
from asyncgrpo.learner.parallel import Ranks
from tests.learner.helpers import FAMILIES, VERSION, config, learner, random_groups
from tests.learner.ranks import run_on_ranks
from tests.learner.test_lora import saved_as
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3

KINDS = {
    "full": {},
    "critic": {"algorithm": {"advantage": "gae"}},
    "lora": {"model": {"lora": {"rank": 2}}},
    "reference": {},
}


def built(path: Path, kind: str, *, world: int = 1, dtype: str = "float32") -> TokenScorer:
    sections = KINDS[kind] | {"model": {"dtype": dtype} | KINDS[kind].get("model", {})}
    ranks, cpu = Ranks.of("cpu", world, ParallelConfig()), torch.device("cpu")
    is_trained = kind != "reference"
    return build_model(str(path), getattr(torch, dtype), cpu, ranks, config(path, **sections), trainable=is_trained)


def tensors(scorer: TokenScorer) -> dict[str, torch.Tensor]:
    """What this rank has of every parameter and buffer; those that no file has too."""
    named = [*scorer.named_parameters(remove_duplicate=False), *scorer.named_buffers()]
    return {name: t.to_local() if hasattr(t, "to_local") else t for name, t in named}


def refuse(*arguments):
    raise WeightsError("it was asked to")


def check_same(path: Path, kind: str, world: int, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as whole:
        whole.setattr(learner_model, "ShardReader", refuse)
        expected = built(path, kind, world=world)
    with patch.context() as shards:
        shards.setattr(learner_model, "load_language_model", refuse)
        found = built(path, kind, world=world)
    ours, theirs = tensors(found), tensors(expected)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].equal(tensor), name
    trained = [[name for name, p in one.named_parameters() if p.requires_grad] for one in (found, expected)]
    assert trained[0] == trained[1]
    for settings in ("config", "generation_config"):
        first, second = (getattr(one.language_model, settings).to_dict() for one in (found, expected))
        assert first == second


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, make in FAMILIES.items():
        make(folder / name)
    saved_as(make_tiny_qwen3(folder / "bfloat16"), torch.bfloat16)
    learner(folder / "qwen3")  # makes the process group
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_holds_what_transformers_loads(folder, name, kind, monkeypatch):
    if kind == "lora":
        pytest.importorskip("peft")
    check_same(folder / name, kind, 1, monkeypatch)


def on_a_rank(rank: int, world: int, folder: str) -> None:
    """Three ranks: five experts, and 260 rows, do not divide evenly."""
    for name in ("tied", "qwen3_moe", "deepseek_v3"):
        for kind in ("reference",) if world == 2 else ("full", "lora"):
            check_same(Path(folder, name), kind, world, pytest.MonkeyPatch())
    if world == 2:
        check_steps(Path(folder, "bfloat16"), rank, world, pytest.MonkeyPatch())


def check_steps(path: Path, rank: int, world: int, patch: pytest.MonkeyPatch) -> None:
    """Adapters in float32 and their base in bfloat16 are gathered together, and step as over a base in float32."""
    model = {"dtype": "bfloat16", "lora": {"rank": 2}}
    settings, groups = config(path, model=model, learner={"lr": 1e-2}), random_groups(4, 4)
    sent = []
    for narrow in (learner_model._narrow_frozen, lambda *arguments, **named: None):
        patch.setattr(learner_model, "_narrow_frozen", narrow)
        ours = Learner(settings, rank=rank, world=world, device="cpu")
        ours.step(groups, VERSION)
        ours.step(groups, VERSION)
        sent.append({info.name: tensor.clone() for info, tensor in ours.weights()})
    assert len({p.dtype for p in ours.parameters}) == 1 and sent[0]
    assert all(sent[0][name].equal(tensor) for name, tensor in sent[1].items())


def test_several_ranks_hold_their_share_of_what_transformers_loads(folder):
    pytest.importorskip("peft")
    run_on_ranks(on_a_rank, str(folder), 2, 3)


def test_rows_are_read_and_no_others(folder):
    path = folder / "qwen3_moe"
    reader, file = ShardReader(without_memory(str(path)), str(path)), load_file(path / "model.safetensors")
    embedding = reader.rows("model.embed_tokens.weight", 87, 174, torch.bfloat16)
    assert embedding.equal(file["model.embed_tokens.weight"][87:174].bfloat16())
    assert embedding.untyped_storage().nbytes() == 87 * 64 * 2, "in memory of its own, and no more than that"
    assert reader.rows("model.embed_tokens.weight", 260, 260, torch.float32).shape == (0, 64)
    read, stored = [], reader._stored
    reader._stored = lambda name: read.append(name) or stored(name)
    experts = reader.rows("model.layers.0.mlp.experts.gate_up_proj", 2, 4, torch.float32)
    assert sorted(read) == [f"model.layers.0.mlp.experts.{n}.{p}_proj.weight" for n in (2, 3) for p in ("gate", "up")]
    gate, up = (file[f"model.layers.0.mlp.experts.3.{p}_proj.weight"] for p in ("gate", "up"))
    assert experts[1].equal(torch.cat([gate, up]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}, "the files have lm_head.weight"),
        (lambda t: {n.removeprefix("model."): x for n, x in t.items()}, "the files have no model.embed_tokens.weight"),
        (None, "no readable model.safetensors"),
    ],
    ids=["a tied weight twice", "other names", "no safetensors"],
)
def test_files_of_another_kind_are_loaded_whole_and_it_is_said(tmp_path, caplog, monkeypatch, change, reason):
    path = make_tiny_qwen3(tmp_path / "model", tie=True)
    expected = tensors(built(path, "full"))
    file = path / "model.safetensors"
    stored = load_file(file)
    if change is None:
        torch.save(stored, path / "pytorch_model.bin")
        file.unlink()
    else:
        save_file(change(stored), file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger=learner_model.__name__):
        found = tensors(built(path, "full"))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    (said,) = [record.getMessage() for record in caplog.records if record.name == learner_model.__name__]
    assert said.startswith(f"model.path ({path}): every rank loads the full model, because") and reason in said


def test_a_single_file_is_read_rather_than_the_shards_of_an_index(folder, tmp_path, monkeypatch):
    """As transformers does. A folder has both if a model was saved into it twice."""
    path = make_tiny_qwen3(tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in stored.items()}, path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_same(path, "full", 1, monkeypatch)


def test_a_hub_id_is_downloaded_without_what_is_not_read(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda path, **how: asked.append((path, how)) or folder)
    model = without_memory(str(folder / "llama"))
    with pytest.raises(WeightsError, match="no readable"):  # the folder of all models is none
        ShardReader(model, "some/model")
    assert asked[0] == ("some/model", {"allow_patterns": ["*.json", "model*.safetensors"]})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda path, **how: 1 / 0)
    with pytest.raises(WeightsError, match="some/model cannot be downloaded: division by zero"):
        ShardReader(model, "some/model")


@pytest.mark.parametrize(
    ("on_disk", "dtype", "base"),
    [
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("float16", "bfloat16", torch.float32),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_frozen_weights_are_as_wide_as_the_files_and_their_use_need(tmp_path, on_disk, dtype, base):
    pytest.importorskip("peft")
    path = saved_as(make_tiny_deepseek_v3(tmp_path), getattr(torch, on_disk))
    adapted, reference = built(path, "lora", dtype=dtype), built(path, "reference", dtype=dtype)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {base}
    assert {p.dtype for p in reference.parameters()} == {getattr(torch, dtype)}, "as it is gathered"
    assert {b.dtype for b in reference.buffers()} == {torch.float32}, "positions and the choice of experts stay exact"
