"""Tiny random models in Hugging Face's format, for tests that run a real engine or a real learner on a CPU.

Weights are drawn wide (standard deviation 0.2), so that the next token depends clearly on the tokens before it and a
wrong key, a wrong position or old weights change the numbers far beyond rounding.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def make_tiny_qwen3(
    path: str | Path, *, layers: int = 2, hidden: int = 64, vocab: int = 260, seed: int = 0, tie: bool = False
) -> Path:
    """Save a random Qwen3 (4 heads, 2 of keys and values) into `path`, and return it. Float32, the same for a seed."""
    return _save(Qwen3ForCausalLM, Qwen3Config(**_shape(layers, hidden, vocab, tie), head_dim=hidden // 4), path, seed)


def make_tiny_llama(
    path: str | Path, *, layers: int = 2, hidden: int = 64, vocab: int = 260, seed: int = 0, tie: bool = False
) -> Path:
    """Save a random Llama of the same shape into `path`, and return it."""
    return _save(LlamaForCausalLM, LlamaConfig(**_shape(layers, hidden, vocab, tie)), path, seed)


def make_tiny_qwen3_moe(
    path: str | Path, *, layers: int = 2, hidden: int = 64, vocab: int = 260, seed: int = 0, experts: int = 5
) -> Path:
    """Save a random Qwen3-MoE into `path`, and return it: every layer has `experts`, of which a token uses two."""
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    config = Qwen3MoeConfig(**_shape(layers, hidden, vocab, False), **mixture, head_dim=hidden // 4)
    return _save(Qwen3MoeForCausalLM, config, path, seed)


def make_tiny_deepseek_v3(
    path: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 260,
    seed: int = 0,
    experts: int = 8,
    for_sglang: bool = False,
) -> Path:
    """Save a random DeepSeek-V3 into `path`, and return it: latent attention, and a mixture after the first layer.

    `experts` in two groups; a token uses two experts of one group, and a shared one. The biases that correct the choice
    of experts are drawn too, wide enough to decide it often: a model saved without them is another model. `for_sglang`: as
    published, with scaled positions and fields that SGLang reads and transformers does not.
    """
    latent = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    if for_sglang:
        positions = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
        latent |= {"rope_parameters": positions | {"mscale": 1.0, "mscale_all_dim": 1.0}}
        latent |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    shape = _shape(layers, hidden, vocab, False) | {"num_key_value_heads": 4, "num_nextn_predict_layers": 0}
    config = DeepseekV3Config(**shape, **_grouped_experts(hidden, experts), **latent)
    return _save(DeepseekV3ForCausalLM, config, path, seed, _draw_biases)


def make_tiny_glm4_moe(
    path: str | Path, *, layers: int = 2, hidden: int = 64, vocab: int = 260, seed: int = 0, experts: int = 8
) -> Path:
    """Save a random GLM4-MoE with the mixture of `make_tiny_deepseek_v3` into `path`, and return it."""
    shape = _shape(layers, hidden, vocab, False) | {"head_dim": hidden // 4, "num_nextn_predict_layers": 0}
    config = Glm4MoeConfig(**shape, **_grouped_experts(hidden, experts))
    return _save(Glm4MoeForCausalLM, config, path, seed, _draw_biases)


def _grouped_experts(hidden: int, experts: int) -> dict:
    mixture = {"n_routed_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    return mixture | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}


def _draw_biases(model: PreTrainedModel) -> None:
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.3)


def _shape(layers: int, hidden: int, vocab: int, tie: bool) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _save(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    path: str | Path,
    seed: int,
    change: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        change(model)
        model.save_pretrained(path)
    return Path(path)
