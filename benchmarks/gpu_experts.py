"""One learner step of a mixture of experts on one card, plain and through the exchanges of `learner.parallel`.

    python -m benchmarks.gpu_experts

Random weights of a Qwen3-MoE. A process group of one rank sends everything to itself, by NCCL on a card: tokens to experts
and back, tokens for heads, and sampled tokens for the head. So the CUDA path of both exchanges runs, without a second card;
their speed between cards does not show. `same`: the gradient's norm is that of the plain step but for rounding.

NOT RUN ON A CARD YET: only `--device cpu --tiny` was.
"""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from asyncgrpo.learner.parallel import Ranks, Row
from benchmarks.gpu_memory import GROUP, SEED, config_of, measure
from benchmarks.measuring import show
from benchmarks.rollouts import make_groups, reasoning_lengths

FULL = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "moe_intermediate_size": 384}
FULL |= {"num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 8, "vocab_size": 32_768, "head_dim": 64}
TINY = FULL | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "moe_intermediate_size": 32}
TINY |= {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "head_dim": 16}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "through the exchanges": {},
    "balanced": {"algorithm": {"router_aux_coef": 0.001}},
    "recomputed activations": {"learner": {"activation_checkpointing": True}},
    "layer inputs on the host": {"learner": {"activation_checkpointing": "offload"}},
}
"""Settings of each way."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(argv)
    name, budget, shape = ("tiny", 256, TINY) if arguments.tiny else ("experts", 16_384, FULL)
    drawn = {"prompt": (8, 16), "median": 24, "longest": 64} if arguments.tiny else {"longest": budget // 2}
    lengths = reasoning_lengths(tokens=2 * budget, size=GROUP, seed=SEED, **drawn)  # type: ignore[arg-type]
    groups = make_groups(lengths, vocabulary=shape["vocab_size"], seed=SEED)
    norm = None
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape), dtype=torch.bfloat16)
        model.save_pretrained(Path(folder))
        del model
        for way, settings in WAYS.items():
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            about = {"what": "step of experts", "way": way, "shape": name, "budget": budget}
            ranks = _to_itself if way == "through the exchanges" else Ranks.of
            try:
                with mock.patch.object(Ranks, "of", ranks):
                    found = measure(config_of(folder, arguments.device, budget, settings), groups, arguments.device)
            except RuntimeError as error:
                show(about | {"error": " ".join(str(error).split())[:300]})
                continue
            norm = norm or found["grad_norm"]
            same = {} if way == "balanced" else {"same": abs(found["grad_norm"] / norm - 1) < 0.05}
            show(about | found | same)
    if dist.is_initialized():
        dist.destroy_process_group()


def _to_itself(device: str, world: int, sizes: object) -> Ranks:
    """One rank that exchanges as several do."""
    experts = init_device_mesh(device, (1, 1), mesh_dim_names=("copies", "expert"))
    return Ranks(init_device_mesh(device, (world,)), experts, Row(experts.get_group("expert")))


if __name__ == "__main__":
    main()
