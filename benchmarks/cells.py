"""Models and batches for measuring learners, as files that any learner can read.

Models are random and Qwen3-shaped; batches are seeded rollouts whose lengths have a long tail: groups of 8 completions to a
prompt of 16 to 64 tokens, completions lognormal (median 96, sigma 0.9) cut to 8 to 1,024 tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEED = 1234

MODELS = {
    "tiny": {"hidden": 256, "layers": 4, "heads": 4, "kv": 2, "inter": 768, "vocab": 512},
    "s25m": {"hidden": 512, "layers": 8, "heads": 8, "kv": 4, "inter": 1408, "vocab": 512},
    "s100m": {"hidden": 768, "layers": 12, "heads": 12, "kv": 4, "inter": 2048, "vocab": 32768},
    "s500m": {"hidden": 1536, "layers": 16, "heads": 24, "kv": 8, "inter": 4352, "vocab": 32768},
    "tiny-v32k": {"hidden": 256, "layers": 4, "heads": 4, "kv": 2, "inter": 768, "vocab": 32768},
    "tiny-v152k": {"hidden": 256, "layers": 4, "heads": 4, "kv": 2, "inter": 768, "vocab": 151936},
    "experts": {"hidden": 64, "layers": 48, "heads": 4, "kv": 2, "inter": 32, "vocab": 512, "experts": 128},
}
"""All have a head size of 64 and a tied embedding. The last one has as many tensors as Qwen3-30B-A3B."""

BATCHES = {
    "tail": {"groups": 8, "vocab": 512},
    "tail-v32k": {"groups": 4, "vocab": 32768},
    "tail-v152k": {"groups": 4, "vocab": 151936},
    "one group": {"groups": 1, "vocab": 512},
}
GROUP_SIZE = 8


@dataclass(frozen=True)
class Batch:
    """N completions in flat arrays with offsets. Completions of a group are neighbours and have the same prompt."""

    prompts: list[np.ndarray]
    """[N] of int64 token ids."""
    completions: list[np.ndarray]
    """[N] of int64 token ids."""
    logprobs: list[np.ndarray]
    """[N] of float32, as sampled."""
    rewards: np.ndarray
    """[N] 0 or 1."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and completions, each prompt counted for each of its completions."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


def make_batch(name: str) -> Batch:
    """The seeded batch of that name."""
    shape = BATCHES[name]
    rng = np.random.default_rng([SEED, sum(name.encode())])
    groups, vocab = shape["groups"], shape["vocab"]
    count = groups * GROUP_SIZE
    prompt_lengths = rng.integers(16, 65, groups)
    lengths = np.clip(np.exp(rng.normal(np.log(96), 0.9, count)), 8, 1024).astype(int)
    prompts = [rng.integers(8, vocab, length) for length in prompt_lengths]
    completions = [rng.integers(8, vocab, length) for length in lengths]
    logprobs = [(-np.log(vocab) + 0.05 * rng.standard_normal(length)).astype(np.float32) for length in lengths]
    rewards = (rng.random(count) < 0.4).astype(np.float64)
    repeated = [prompts[i // GROUP_SIZE] for i in range(count)]
    return Batch(repeated, completions, logprobs, rewards)


def make_model(folder: Path, name: str) -> Path:
    """The folder of the random model of that name. The first call writes it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    path, shape = folder / name, MODELS[name]
    if (path / "config.json").is_file():
        return path
    torch.manual_seed(SEED)
    mixture = {"num_experts": shape["experts"], "moe_intermediate_size": shape["inter"]} if "experts" in shape else {}
    config = (Qwen3MoeConfig if mixture else Qwen3Config)(
        **mixture,
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=64,
        intermediate_size=shape["inter"],
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
