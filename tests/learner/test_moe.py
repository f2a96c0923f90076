"""Mixtures of experts: fused in memory, trained there, and published as they are on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import HrmTextConfig, HrmTextForCausalLM

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import load_language_model
from tests.learner import helpers
from tests.learner.helpers import (
    VERSION,
    load,
    make_group,
    random_groups,
    step_and_gradient,
    weights,
    with_true_logprobs,
)
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

GROUPS = random_groups(5, 4)
MAKERS = {"qwen3_moe": make_tiny_qwen3_moe, "deepseek_v3": make_tiny_deepseek_v3}
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module", params=MAKERS)
def path(request, tmp_path_factory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


def learner(path, *, dtype="float32", lora=0) -> Learner:
    return helpers.learner(path, model={"dtype": dtype, "lora": {"rank": lora}}, learner={"lr": 1e-2})


# --- what is published


def test_names_shapes_and_dtypes_are_those_of_the_file(path):
    ours, file = learner(path), load_file(path / "model.safetensors")
    expected = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in file.items()}
    assert {info.name: (info.shape, info.dtype) for info in ours.layout()} == expected
    assert all(tensor.equal(file[name]) for name, tensor in weights(ours).items())


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    path = make_tiny_deepseek_v3(tmp_path)
    ours, file = learner(path, dtype="bfloat16"), load_file(path / "model.safetensors")
    ours.step(GROUPS, VERSION)
    published = weights(ours)
    assert {n: t.dtype for n, t in published.items() if t.dtype != torch.bfloat16} == {
        n: torch.float32 for n in file if n.endswith(BIAS)
    }
    assert all(published[n].equal(t) for n, t in file.items() if n.endswith(BIAS)), "training leaves it as it is"


# --- what is trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_expert_that_was_used_has_a_gradient_and_no_other(path, dtype):
    """Most experts see no token."""
    ours = learner(path, dtype=dtype)
    used: dict[str, set[int]] = {}
    for name, module in ours.model.language_model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: used.setdefault(name, set()).update(inputs[1].flatten().tolist())
            )
    _, seen = step_and_gradient(ours, [make_group(0, [1.0, 0.0], [[1, 2, 3], []])])
    assert used
    for name, experts in used.items():
        for matrix in ("gate_up_proj", "down_proj"):
            gradient = seen[f"{name}.{matrix}"]
            assert gradient.isfinite().all()
            assert set(gradient.flatten(1).any(dim=1).nonzero().flatten().tolist()) == experts
        assert seen[name.replace(".experts", ".gate.weight")].any(), "the router is trained"


# --- what is exported


@pytest.mark.parametrize("lora", [0, 4])
def test_an_export_is_the_model_that_was_trained(path, tmp_path, lora):
    if lora:
        pytest.importorskip("peft")
    ours = learner(path, lora=lora)
    for _ in range(2):
        ours.step(GROUPS, VERSION)
    ours.export(str(tmp_path))
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    tokens, exported = torch.arange(40)[None] * 5, load(tmp_path)
    if not lora:  # merged, the sums are others
        trained = load(path)
        for name, parameter in ours.model.language_model.named_parameters():
            trained.get_parameter(name).data.copy_(parameter.full_tensor())
        assert exported(tokens).logits.equal(trained(tokens).logits)
        assert not exported(tokens).logits.equal(load(path)(tokens).logits)
    report = ours.step(with_true_logprobs(tmp_path, GROUPS), VERSION)
    assert report.logprob_gap_max < 1e-4


# --- what is refused


def test_a_model_that_cannot_be_published_is_refused_by_type(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_layers_per_stack": 1, "num_attention_heads": 2}
    HrmTextForCausalLM(HrmTextConfig(**shape, head_dim=16, vocab_size=40)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a hrm_text, which can be trained but not published: .*gqkv_proj"):
        load_language_model(str(tmp_path), longest=100)
