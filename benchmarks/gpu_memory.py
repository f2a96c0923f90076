"""One learner step in each way of saving memory: peak on the card, beside what was predicted, and seconds.

    python -m benchmarks.gpu_memory --shape 0.6b
    python -m benchmarks.gpu_memory --experts        a mixture, plain and through the exchanges of `learner.parallel`

Every way is a `Learner` of its own, built from a folder on the disk as in a run, in one process after the other's memory is
given back. Two steps on random rollouts: the first makes the optimizer's moments, the second is measured. Measured is
`torch.cuda.max_memory_allocated`; predicted, the sum of `asyncgrpo/config/memory.py` for rows as long as the longest one of the
step, without what torch does not count.

The mixture is a Qwen3-MoE. A process group of one rank sends everything to itself, by NCCL on a card: tokens to experts and
back, tokens for heads, and sampled tokens for the head. So the CUDA path of both exchanges runs, without a second card; their
speed between cards does not show. `same`: the gradient's norm is that of the plain step but for rounding. NOT RUN ON A CARD YET.
"""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig

from asyncgrpo.config.memory import learner_rank
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.placement import changed
from asyncgrpo.config.schema import Config
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.parallel import Ranks, Row
from asyncgrpo.types import Group
from benchmarks.measuring import device_parser, rounded, show, where
from benchmarks.rollouts import VERSION, make_groups, reasoning_lengths
from benchmarks.shapes import SHAPES, qwen3, write_model

SEED = 1234
GROUP = 8
WAYS: dict[str, dict[str, Any]] = {
    "all on the card": {},
    "recomputed activations": {"learner": {"activation_checkpointing": True}},
    "optimizer on the host": {"learner": {"offload_optimizer": True}},
    "reference": {"algorithm": {"kl_coef": 0.01}, "learner": {"offload_reference": False}},
    "reference on the host": {"algorithm": {"kl_coef": 0.01}, "learner": {"offload_reference": True}},
    "LoRA of rank 16": {"model": {"lora": {"rank": 16}}, "learner": {"lr": 1e-4}},
}
"""Settings beside those of `config_of`."""
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "through the exchanges": {},
    "balanced": {"algorithm": {"router_aux_coef": 0.001}},
    "recomputed activations": {"learner": {"activation_checkpointing": True}},
    "layer inputs on the host": {"learner": {"activation_checkpointing": "offload"}},
}
FULL = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "moe_intermediate_size": 384}
FULL |= {"num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 8, "vocab_size": 32_768, "head_dim": 64}
TINY = FULL | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "moe_intermediate_size": 32}
TINY |= {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "head_dim": 16}


def main(argv: list[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a row")
    arguments = parser.parse_args(argv)
    is_mixture, device = arguments.experts, arguments.device
    name, budget = ("experts" if is_mixture else arguments.shape, arguments.budget)
    if arguments.tiny:
        name, budget = "tiny", 256
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    mixture = TINY if arguments.tiny else FULL
    vocabulary = mixture["vocab_size"] if is_mixture else SHAPES[name].vocabulary
    drawn = {"prompt": (8, 16), "median": 24, "longest": 64} if arguments.tiny else {"longest": budget // 2}
    lengths = reasoning_lengths(tokens=3 * budget, size=GROUP, seed=SEED, **drawn)  # type: ignore[arg-type]
    groups, norm = make_groups(lengths, vocabulary=vocabulary, seed=SEED), None
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3MoeConfig(**mixture) if is_mixture else qwen3(SHAPES[name])
        write_model(Path(folder), config, device=device, seed=SEED)
        for way, settings in (OF_EXPERTS if is_mixture else WAYS).items():
            _give_back(device)
            what = "step of experts" if is_mixture else "memory of a step"
            about = {"what": what, "way": way, "shape": name, "budget": budget}
            try:
                with mock.patch.object(Ranks, "of", _to_itself if way == "through the exchanges" else Ranks.of):
                    found = measure(config_of(folder, device, budget, settings), groups, device)
            except (ImportError, RuntimeError) as error:  # out of memory is a RuntimeError
                show(about | {"error": " ".join(str(error).split())[:300]})
                continue
            if is_mixture and way != "balanced":
                norm = norm or found["grad_norm"]
                found["same"] = abs(found["grad_norm"] / norm - 1) < 0.05
            show(about | found)
    if dist.is_initialized():
        dist.destroy_process_group()


def _to_itself(device: str, world: int, sizes: object) -> Ranks:
    """One rank that exchanges as several do."""
    experts = init_device_mesh(device, (1, 1), mesh_dim_names=("copies", "expert"))
    return Ranks(init_device_mesh(device, (world,)), experts, Row(experts.get_group("expert")))


def measure(config: Config, groups: list[Group], device: str) -> dict[str, Any]:
    """The figures of the second of two steps."""
    started = time.perf_counter()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    learner = Learner(config, rank=0, world=1, device="cuda:0" if device == "cuda" else "cpu")
    built = time.perf_counter() - started
    longest = max(len(row.token_ids) for row in learner._pack(groups, VERSION).trained)
    learner.step(groups, VERSION)
    of_longest = changed(config, {"learner.tokens_per_microbatch": longest})
    figures: dict[str, Any] = {
        "built_s": rounded(built),
        "longest_row": longest,
        "predicted_gib": predicted_gib(of_longest),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        figures["between_steps_gib"] = gib(torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
    report = learner.step(groups, VERSION)
    if device == "cuda":
        figures |= {
            "left_of_others_gib": gib(before),
            "measured_gib": gib(torch.cuda.max_memory_allocated() - before),
            "reserved_gib": gib(torch.cuda.max_memory_reserved()),
            "used_gib": gib(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]),
        }
    phases = {name: rounded(seconds) for name, seconds in report.seconds.items()}
    return figures | {"phases": phases, "grad_norm": rounded(report.grad_norm), "skipped": report.skipped} | where()


def predicted_gib(config: Config) -> dict[str, float]:
    """Predicted memory of each part, in GiB."""
    size = size_at(config.model.path)
    assert size is not None, "the model's folder is there"
    return {name: gib(held) for name, held in learner_rank(size, config).items()}


def gib(num_bytes: float) -> float:
    return rounded(num_bytes / 2**30)


def config_of(folder: str, device: str, budget: int, settings: dict[str, dict[str, Any]]) -> Config:
    """Return a learner's configuration, with `settings` beside its own."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": folder, "dtype": "bfloat16"},
        "data": {"train": "unused", "max_prompt_tokens": 256},
        "sampling": {"max_tokens": budget // 2},
        "algorithm": {"group_size": GROUP},
        "learner": {"device": device, "tokens_per_microbatch": budget, "activation_checkpointing": False},
    }
    return msgspec.convert({name: config[name] | settings.get(name, {}) for name in config}, Config)


def _give_back(device: str) -> None:
    """Give the memory of the way before back to the card."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
