"""Low-rank adapters: the base stays, engines and files get merged weights, the reference is the base."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PhimoeConfig

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import check_language_model
from asyncgrpo.learner.publishing import merge
from tests.learner import helpers
from tests.learner.helpers import VERSION, config, load, random_groups, step_and_gradient, weights
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

pytest.importorskip("peft")

GROUPS = random_groups(4, 4, seed=1)


def learner(path, *, rank=4, targets=(), dtype="float32", **sections) -> Learner:
    model = {"dtype": dtype, "lora": {"rank": rank, "targets": targets}}
    return helpers.learner(path, **{"model": model, "learner": {"lr": 1e-2}} | sections)


def saved_as(path: Path, dtype: torch.dtype) -> Path:
    """The same folder with its tensors in another dtype."""
    file = path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("make", "dtype", "on_disk"),
    [
        (make_tiny_qwen3, "float32", "float32"),
        (make_tiny_qwen3, "bfloat16", "float32"),
        (make_tiny_qwen3_moe, "bfloat16", "bfloat16"),
        (make_tiny_deepseek_v3, "float32", "bfloat16"),
    ],
)
def test_what_is_published_is_the_base_of_the_files_and_what_was_trained(tmp_path, make, dtype, on_disk):
    path = saved_as(make(tmp_path), getattr(torch, on_disk))
    ours = learner(path, dtype=dtype)
    base = load_file(path / "model.safetensors")
    for _ in range(3):
        matrices = dict(ours.model.language_model.named_parameters())
        published, merged = weights(ours), set()
        for name, tensor in matrices.items():
            if ".lora_A." in name:
                down, up = (t.detach().full_tensor() for t in (tensor, matrices[name.replace("lora_A", "lora_B")]))
                weight = name.replace(".lora_A.default", "")
                scale = ours.model.language_model.get_submodule(name.split(".lora_A")[0]).scaling["default"]
                assert published[weight].equal(merge(base[weight], scale * up, down, getattr(torch, dtype))), weight
                merged.add(weight)
        assert {info.name for info in ours.layout()} == published.keys() == base.keys()
        assert merged == {name for name in base if "_proj" in name and ".experts." not in name}
        assert all(published[name].equal(base[name].to(published[name].dtype)) for name in base.keys() - merged)
        ours.step(GROUPS, VERSION)
    assert any(not published[name].equal(base[name].to(published[name].dtype)) for name in merged), "it was trained"


def test_only_adapters_are_trained_and_only_where_asked(path):
    ours = learner(path, targets=("q_proj",))
    assert sum(p.numel() for p in ours.parameters) == 2 * (64 * 4 + 4 * 64)
    ours.step(GROUPS, VERSION)
    base = load(path).state_dict()
    assert {n for n, t in weights(ours).items() if not t.equal(base[n])} == {n for n in base if "q_proj" in n}
    with pytest.raises(ConfigError, match="no_such_layer"):
        learner(path, targets=("no_such_layer",))
    for other in ("lm_head", "embed_tokens"):
        with pytest.raises(ConfigError, match=f"{other}, which is no linear layer of the decoder"):
            learner(path, targets=("q_proj", other))


def test_a_router_that_is_a_linear_layer_gets_no_adapter(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    PhimoeConfig(**shape, num_key_value_heads=2, num_local_experts=4, vocab_size=60).save_pretrained(tmp_path)
    adapted = check_language_model(str(tmp_path), config(tmp_path, model={"lora": {"rank": 2}}))
    names = [name for name, _ in adapted.named_parameters() if ".lora_A." in name]
    assert len(names) == 4 and not [name for name in names if "_proj." not in name]


def test_the_reference_is_the_model_without_its_adapters(path):
    ours = learner(path, algorithm={"kl_coef": 0.1})
    assert ours.step(GROUPS, VERSION).kl_reference == pytest.approx(0.0, abs=1e-9)
    assert ours.step(GROUPS, VERSION).kl_reference > 1e-4


def test_the_reference_has_the_biases_of_the_initial_routers(tmp_path):
    ours = learner(make_tiny_deepseek_v3(tmp_path), algorithm={"kl_coef": 0.1, "router_bias_rate": 1.0})
    (batch,) = ours._pack(GROUPS, VERSION).trained
    before = ours._score_reference(batch).scores.logprobs
    ours.step(GROUPS, VERSION)
    assert ours._score_reference(batch).scores.logprobs.equal(before)


def test_the_gradient_is_that_of_the_merged_weights(path):
    """For W + s B A, the gradient of B is s (dL/dW) Aᵀ."""
    ours, full = learner(path, targets=("down_proj",)), learner(path, rank=0)
    (a,) = (p.full_tensor().clone() for n, p in ours.model.named_parameters() if "layers.1" in n and "lora_A" in n)
    (_, of_adapters), (_, of_weights) = (step_and_gradient(one, GROUPS) for one in (ours, full))
    expected = (16.0 / 4) * of_weights["model.layers.1.mlp.down_proj.weight"] @ a.T
    found = of_adapters["model.layers.1.mlp.down_proj.lora_B.default.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_holds_only_the_adapters(path, tmp_path):
    learner(path).save(str(tmp_path / "checkpoint"))
    base_bytes = sum(p.numel() * 4 for p in load(path).parameters())
    assert sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir()) < base_bytes
