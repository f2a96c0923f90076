"""A model's size is counted from its `config.json` as transformers builds it, and as autograd keeps of it."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import kept_for_backward
from asyncgrpo.config.rules import local_model
from asyncgrpo.config.shapes import PUBLISHED, read_shape, shape_at, shape_of
from asyncgrpo.learner.model import add_adapters
from tests.gpu_rehearsals.saved_bytes import saved_bytes
from tests.models import make_tiny_deepseek_v3, make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe

SMALL = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 500}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20, "num_key_value_heads": 8}
LATENT |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 2, "n_routed_experts": 8, "first_k_dense_replace": 1}

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, head_dim=24),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=24),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
    "qwen3 mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, head_dim=24, num_experts=6),
    "qwen3 mixture, some layers dense": Qwen3MoeConfig(
        **SMALL, **MIXTURE, head_dim=24, num_experts=6, decoder_sparse_step=2
    ),
    "deepseek": DeepseekV3Config(**SMALL | LATENT | MIXTURE, q_lora_rank=40),
    "deepseek, no layer dense": DeepseekV3Config(
        **SMALL | LATENT | MIXTURE | {"first_k_dense_replace": 0}, q_lora_rank=None, attention_bias=True
    ),
}
RECOMPUTED = [name for name in CONFIGS if name != "deepseek"]
"""`saved_bytes` recomputes the first layer, which should be one of the largest."""
WITHOUT_EXPERTS = [name for name in CONFIGS if "mixture" not in name and "deepseek" not in name]
"""On the meta device experts are multiplied in bfloat16 only."""


def parameters(config: PretrainedConfig, adapters: int = 0) -> int:
    """As transformers builds the model, without memory. With adapters: of those alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if not adapters:
            return sum(p.numel() for p in model.parameters())
        lora = load_config(None, ["model.path=m", "data.train=d", f"model.lora.rank={adapters}"]).model.lora
        return sum(p.numel() for p in add_adapters(model, lora, seed=0).parameters() if p.requires_grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name):
    assert shape_of(CONFIGS[name].to_dict()).parameters == parameters(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_those_of_the_model(name):
    assert shape_of(CONFIGS[name].to_dict()).adapter_parameters(4) == parameters(CONFIGS[name], adapters=4)


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_deepseek_v3])
def test_a_model_on_disk_says_as_much(make, tmp_path):
    shape = shape_at(str(make(tmp_path)))
    assert shape is not None and shape.total is None
    assert shape.parameters == parameters(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("name", "published"),
    [("Qwen3-0.6B", 596_049_920), ("Qwen3-1.7B", 1_720_574_976), ("Qwen2.5-3B", 3_085_938_688),
     ("Qwen3-8B", 8_190_735_360), ("Qwen3-32B", 32_762_123_264), ("Llama-3.1-70B", 70_553_706_496)],
)  # fmt: skip
def test_published_models_have_their_published_size(name, published):
    settings = dict(PUBLISHED[name])
    assert shape_of(settings).parameters == published
    assert parameters(AutoConfig.for_model(**settings)) == published


@pytest.mark.parametrize(
    ("name", "dtype", "checkpointing"),
    [(name, "bfloat16", False) for name in CONFIGS]
    + [(name, "bfloat16", True) for name in RECOMPUTED]
    + [(name, "float32", False) for name in WITHOUT_EXPERTS],
)
def test_activations_are_what_autograd_saves(name, dtype, checkpointing):
    tokens = 384
    config = load_config(
        None,
        ["model.path=m", "data.train=d", f"model.dtype={dtype}", f"learner.activation_checkpointing={checkpointing}",
         f"learner.tokens_per_microbatch={tokens}", "data.max_prompt_tokens=64", "sampling.max_tokens=64"],
    )  # fmt: skip
    saved = saved_bytes(CONFIGS[name], tokens, checkpointing, dtype=getattr(torch, dtype))
    assert kept_for_backward(shape_of(CONFIGS[name].to_dict()), config) == pytest.approx(saved, rel=0.04)


@pytest.mark.parametrize(("name", "checkpointing"), [("Qwen3-0.6B", True), ("Qwen3-8B", False), ("Qwen3-8B", True)])
def test_activations_of_published_models(name, checkpointing):
    config = load_config(None, ["model.path=m", "data.train=d", f"learner.activation_checkpointing={checkpointing}"])
    saved = saved_bytes(AutoConfig.for_model(**PUBLISHED[name]), 16384, checkpointing)
    assert kept_for_backward(shape_of(PUBLISHED[name]), config) == pytest.approx(saved, rel=0.05)


def test_an_unknown_architecture_has_the_size_of_its_files(tmp_path):
    path = make_tiny_llama(tmp_path)
    settings = json.loads((path / "config.json").read_text()) | {"model_type": "newcomer"}
    (path / "config.json").write_text(json.dumps(settings))
    known, unknown = parameters(LlamaConfig(**settings)), read_shape(path)
    assert unknown is not None and unknown.total is not None
    assert unknown.parameters == pytest.approx(known, rel=0.05), "the header of the file is counted too"
    index = {"metadata": {"total_size": 4_000_000}, "weight_map": {}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(path).parameters == pytest.approx(1_000_000, rel=1e-3)


def test_a_config_that_says_too_little_is_no_shape(tmp_path):
    assert read_shape(tmp_path) is None
    for written in ('{"model_type": "newcomer"}', '{"model_type": "qwen3", "hidden_size": "wide"}', "[]", "no JSON"):
        (tmp_path / "config.json").write_text(written)
        assert read_shape(tmp_path) is None
    assert local_model("Qwen/Qwen3-none") is None and shape_at("Qwen/Qwen3-none") is None


def test_latent_attention_keeps_one_vector_whatever_the_gpus():
    latent, grouped = (shape_of(CONFIGS[name].to_dict()) for name in ("deepseek", "qwen3"))
    assert latent.cache_bytes_per_token(2, 1) == latent.cache_bytes_per_token(2, 4) == 2 * 3 * (24 + 8)
    assert grouped.cache_bytes_per_token(2, 1) == 2 * 3 * 2 * 2 * 24
    assert grouped.cache_bytes_per_token(2, 2) == grouped.cache_bytes_per_token(2, 8) == 2 * 3 * 2 * 24
