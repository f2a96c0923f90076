"""Random Qwen3 models of a published shape, as a configuration or as a folder on the disk."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.shapes import Shape


def qwen3(shape: Shape, **settings: Any) -> Qwen3Config:
    """The configuration of a model of `shape`."""
    return Qwen3Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=40_960,
        **settings,
    )


def write_model(folder: Path, shape: Shape, *, device: str, seed: int, **settings: Any) -> Path:
    """Write a bfloat16 model of `shape` into `folder`, and return it. It is drawn on `device`."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(qwen3(shape, **settings), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
