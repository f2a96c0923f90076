"""Tiny random models in Hugging Face's format, for tests that run a real engine or a real learner on a CPU.

Weights are drawn wide (standard deviation 0.2), so that the next token depends clearly on the tokens before it and a
wrong key, a wrong position or old weights change the numbers far beyond rounding.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


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


def _save(kind: type[PreTrainedModel], config: PretrainedConfig, path: str | Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(path)
    return Path(path)
