"""A model's size is that of the model transformers builds, with what autograd saves and where peft puts adapters."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncgrpo.config.load import load_config
from asyncgrpo.config.model_size import size_at, size_of
from asyncgrpo.learner import attention
from asyncgrpo.learner.attention import Family, Segments
from asyncgrpo.learner.model import add_adapters

SMALL = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 500}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 8}
LATENT |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 2, "n_routed_experts": 8, "first_k_dense_replace": 1}
"""Keys are as wide as values, which the learner's kernel on the CPU needs."""

CONFIGS = {
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, head_dim=24),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=24),
    "qwen3 mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, head_dim=24, num_experts=6, decoder_sparse_step=2),
    "deepseek": DeepseekV3Config(**SMALL | LATENT | MIXTURE, q_lora_rank=40),
    "deepseek, no layer dense": DeepseekV3Config(
        **SMALL | LATENT | MIXTURE | {"first_k_dense_replace": 0}, q_lora_rank=None, attention_bias=True
    ),
}
RANK, TOKENS = 4, 512


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    lora = load_config(None, ["model.path=m", "data.train=d", f"model.lora.rank={RANK}"]).model.lora
    return add_adapters(model, lora, seed=0)


def saved_bytes(config: PretrainedConfig, dtype: torch.dtype, *, has_adapters: bool) -> int:
    """Bytes that a forward pass of the whole decoder saves on the CPU, with the learner's kernel; without weights."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    attention.install(model, "cpu")
    if has_adapters:
        model = adapted(model).to(dtype)
    weights = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens, alone = torch.zeros(1, TOKENS, dtype=torch.int64), Segments.of([Family((0, 0), (0, TOKENS))])
        places = torch.arange(TOKENS)[None]
        output = model.get_decoder()(input_ids=tokens, position_ids=places, use_cache=False, segments=alone)
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del output
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_adapters_are_those_of_the_model(name):
    size = size_of(CONFIGS[name].to_json_string(use_diff=False))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        assert size.parameters == sum(p.numel() for p in model.parameters())
        trained = [p for p in adapted(model).parameters() if p.requires_grad]
    assert size.adapter_parameters(RANK) == sum(p.numel() for p in trained)


@pytest.mark.parametrize(("dtype", "has_adapters"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_what_a_pass_on_the_cpu_saves(name, dtype, has_adapters):
    size = size_of(CONFIGS[name].to_json_string(use_diff=False))
    layers = sum(layer.bytes_kept(dtype.itemsize, adapters=RANK * has_adapters) for layer in size.layers)
    # The last norm. Under adapters it saves less, and the first norm reads a frozen embedding and saves nothing.
    last_norm = 0 if has_adapters else size.hidden * (4 + dtype.itemsize)
    saved = saved_bytes(CONFIGS[name], dtype, has_adapters=has_adapters)
    assert TOKENS * (layers + last_norm) == pytest.approx(saved, rel=0.03)


def test_a_config_that_describes_no_model_has_no_size(tmp_path):
    assert size_at(str(tmp_path)) is None
    for written in ('{"model_type": "newcomer"}', '{"model_type": "qwen3", "hidden_size": "wide"}', "[]", "no JSON"):
        (tmp_path / "config.json").write_text(written)
        assert size_at(str(tmp_path)) is None
    assert size_at("Qwen/Qwen3-none") is None


def test_latent_attention_keeps_one_vector_whatever_the_gpus():
    latent, grouped = (size_of(CONFIGS[name].to_json_string(use_diff=False)) for name in ("deepseek", "qwen3"))
    assert latent.cache_bytes_per_token(2, 1) == latent.cache_bytes_per_token(2, 4) == 2 * 3 * (24 + 8)
    assert grouped.cache_bytes_per_token(2, 1) == 2 * 3 * 2 * 2 * 24
    assert grouped.cache_bytes_per_token(2, 2) == grouped.cache_bytes_per_token(2, 8) == 2 * 3 * 2 * 24
