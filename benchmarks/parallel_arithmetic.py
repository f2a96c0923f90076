"""Which layout of the learner for which model and cluster: arithmetic from stated rates. Prints the table of docs/parallel.md.

    python -m benchmarks.parallel_arithmetic

Memory is that of `asyncgrpo/config/memory.py`, with recomputation. Time is the larger of the matrix products and of what crosses
the slowest link: gathered weights, tokens on their way to experts, tokens exchanged for heads. Half of the GPUs learn.
"""

import json
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.config.memory import GIB, Card, learner_rank
from asyncgrpo.config.model_size import ModelSize, size_of
from asyncgrpo.config.schema import Config

FLOPS = 0.4 * 989e12
"""Of an H100 in bfloat16, at the share that large matrix products reach."""
NVLINK, NIC = 350e9, 50e9
"""Bytes a second: of a GPU in its machine, and of a machine of 8 (400 Gb/s)."""
GPUS_OF_A_MACHINE = 8
CARD = Card(80 * 10**9, "assumed")
LENGTH = 32_768
"""Tokens of the longest row."""
TOKENS = (16_384, 8192, 4096)
"""Of a micro-batch, on each rank: the largest that fits."""
FLEETS = (8, 16, 64, 256)


class Mixture(NamedTuple):
    """A model, and the parameters that one token uses."""

    settings: dict[str, Any]
    active: float
    experts: int = 1
    top_k: int = 0


_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
MODELS = {
    "Qwen3-32B": Mixture(
        _QWEN3
        | {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "intermediate_size": 25_600},
        32.8e9,
    ),
    "Qwen3-30B-A3B": Mixture(
        _QWEN3
        | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        3.3e9,
        128,
        8,
    ),
    "DeepSeek-V3": Mixture(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
        | {"n_group": 8, "topk_group": 4, "vocab_size": 129_280},
        37e9,
        256,
        8,
    ),
}


def link(ranks: int) -> float:
    """Bytes a second of one GPU towards `ranks` consecutive ones."""
    return NVLINK if ranks <= GPUS_OF_A_MACHINE else NIC / GPUS_OF_A_MACHINE


def seconds(model: Mixture, size: ModelSize, tokens: int, ranks: int, context: int, expert: int) -> float:
    """Return the seconds of one micro-batch: forward, recomputation and backward."""
    of_experts = sum(layer.expert_parameters for layer in size.layers)
    products = 8 * model.active * tokens / FLOPS
    attention = 8 * tokens * LENGTH * size.hidden * len(size.layers) / FLOPS / 2
    gathered = (
        2 * (size.parameters - of_experts) * 3 / link(ranks)
    )  # two gathers, and gradients of twice the width, once
    gathered += 2 * of_experts / expert * 3 / link(ranks if expert == 1 else ranks // expert * GPUS_OF_A_MACHINE)
    dispatched = 6 * 2 * tokens * model.top_k * size.hidden * len(size.layers) / link(expert) * (expert > 1)
    exchanged = 6 * 4 * 2 * tokens * size.hidden * len(size.layers) / link(context) * (context > 1)
    return max(products + attention, gathered) + dispatched + exchanged


def layouts(model: Mixture, size: ModelSize, ranks: int, *, offload: bool) -> list[tuple[float, int, int, float]]:
    """Return tokens a second and GPU, context, expert and GiB of each layout that fits, best first."""
    found = []
    sizes = [(t, c) for t in TOKENS for c in (1, 2, 4, 8) if ranks % c == 0 and t * c >= LENGTH]
    for tokens, context in sizes:
        for expert in (one for one in (1, 2, 4, 8, 16, 32, 64) if ranks % one == 0 and model.experts % one == 0):
            sections = {
                "model": {"path": "-"},
                "data": {"train": "-", "max_prompt_tokens": 1024},
                "sampling": {"max_tokens": LENGTH - 1024},
                "learner": {"ranks": ranks, "tokens_per_microbatch": tokens, "activation_checkpointing": True}
                | {"parallel": {"context": context, "expert": expert}, "device": "cuda", "offload_optimizer": offload},
            }
            held = learner_rank(size, msgspec.convert(sections, Config)).total()
            if held < 0.95 * CARD.num_bytes:
                rate = tokens / seconds(model, size, tokens, ranks, context, expert)
                found.append((rate, context, expert, held / GIB))
    return sorted(found, reverse=True)


def main() -> None:
    print("| model | GPUs, half learn | context | expert | a rank holds | tokens/s a learner GPU | without expert |")
    print("|" + "---|" * 7)
    for name, model in MODELS.items():
        size = size_of(json.dumps(model.settings))
        for gpus in FLEETS:
            possible, where = layouts(model, size, gpus // 2, offload=False), ""
            if not possible:
                possible, where = layouts(model, size, gpus // 2, offload=True), ", moments on the host"
            if not possible:
                print(f"| {name} | {gpus} | does not fit | | | | |")
                continue
            rate, context, expert, held = possible[0]
            plain = next((f"{one[0]:,.0f}" for one in possible if one[2] == 1), "does not fit")
            print(f"| {name} | {gpus} | {context} | {expert} | {held:.0f} GiB{where} | {rate:,.0f} | {plain} |")


if __name__ == "__main__":
    main()
