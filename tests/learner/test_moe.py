"""Mixtures of experts: fused in memory, trained there, and published as they are on disk."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import HrmTextConfig, HrmTextForCausalLM

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.model import load_language_model
from tests.learner.helpers import VERSION, learner, make_group, random_groups, step_and_gradient, weights
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

GROUPS = random_groups(5, 4)
BIAS = "e_score_correction_bias"


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    path = make_tiny_deepseek_v3(tmp_path)
    ours, file = learner(path, model={"dtype": "bfloat16"}), load_file(path / "model.safetensors")
    ours.step(GROUPS, VERSION)
    published = weights(ours)
    assert {n: t.dtype for n, t in published.items() if t.dtype != torch.bfloat16} == {
        n: torch.float32 for n in file if n.endswith(BIAS)
    }
    assert all(published[n].equal(t) for n, t in file.items() if n.endswith(BIAS)), "training leaves it as it is"


@pytest.mark.parametrize("make", [make_tiny_qwen3_moe, make_tiny_deepseek_v3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_expert_that_was_used_has_a_gradient_and_no_other(tmp_path, dtype, make):
    """Most experts see no token."""
    ours = learner(make(tmp_path), model={"dtype": dtype})
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


def test_a_model_that_cannot_be_published_is_refused_by_type(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_layers_per_stack": 1, "num_attention_heads": 2}
    HrmTextForCausalLM(HrmTextConfig(**shape, head_dim=16, vocab_size=40)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a hrm_text, which can be trained but not published: .*gqkv_proj"):
        load_language_model(str(tmp_path), longest=100)
