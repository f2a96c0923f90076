"""With LoRA, what is published are whole weights: the base, and the adapters merged into it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.publishing import merge
from tests.learner.helpers import VERSION, config, random_groups, weights
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

pytest.importorskip("peft")

GROUPS = random_groups(4, 4, seed=1)


def learner(path, *, dtype="float32", targets=()) -> Learner:
    sections = {
        "model": {"path": str(path), "dtype": dtype, "lora": {"rank": 4, "targets": targets}},
        "learner": {"device": "cpu", "lr": 1e-2},
    }
    return Learner(config(path, **sections), rank=0, world=1, device="cpu")


def saved_as(path, dtype: torch.dtype):
    """The same folder with its tensors in another dtype."""
    file = path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("on_disk", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_deepseek_v3])
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
        others = published.keys() - merged
        assert merged and others and all(published[name].equal(base[name].to(published[name].dtype)) for name in others)
        ours.step(GROUPS, VERSION)
    assert any(not published[name].equal(base[name].to(published[name].dtype)) for name in merged), "it was trained"


def test_a_tied_weight_that_would_be_adapted_is_refused(tmp_path):
    path = make_tiny_qwen3(tmp_path, tie=True)
    with pytest.raises(ConfigError, match=r"adapts lm_head\.weight, which is tied"):
        learner(path, targets=("lm_head",))


def test_an_update_that_is_too_small_for_bfloat16_changes_nothing_of_what_is_published(tmp_path):
    """So a checksum that stays as it was is no engine that kept its weights."""
    ours = learner(saved_as(make_tiny_qwen3(tmp_path), torch.bfloat16), dtype="bfloat16")
    before = weights(ours)
    for name, parameter in ours.model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter.to_local(), 1e-9)
    assert all(tensor.equal(before[name]) for name, tensor in weights(ours).items())
