"""The count of saved bytes is one: the same with the real kernel on a CPU, and what can be counted by hand."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from tests.gpu_rehearsals.saved_bytes import saved_bytes

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 100, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_meta_counts_what_a_cpu_saves(kind, checkpointing):
    config = kind(**SHAPE, num_hidden_layers=3)
    assert saved_bytes(config, 50, checkpointing) == saved_bytes(config, 50, checkpointing, device="cpu")


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_layer_more_keeps_its_input_or_everything(kind):
    def of_a_layer(checkpointing: bool) -> int:
        counts = [saved_bytes(kind(**SHAPE, num_hidden_layers=n), 100, checkpointing) for n in (2, 3)]
        return counts[1] - counts[0]

    assert of_a_layer(True) == 100 * 64 * 2, "[tokens, hidden] in bfloat16"
    mlp = 100 * 160 * 2 * 4  # gate, its activation, up, their product
    assert of_a_layer(False) > mlp + 100 * 64 * 2 * 4


def test_what_is_kept_grows_with_the_tokens_alone():
    config = Qwen3Config(**SHAPE, num_hidden_layers=2)
    for checkpointing in (False, True):
        one, two, three = (saved_bytes(config, tokens, checkpointing) for tokens in (128, 256, 384))
        assert one < two and three - two == two - one
    assert saved_bytes(config, 128, False, dtype=torch.float32) > saved_bytes(config, 128, False)
