"""What models hold of 80 GB GPUs, by the arithmetic of `asyncgrpo/config/memory.py`.

python -m benchmarks.memory_table            prints the table of docs/memory.md
python -m benchmarks.memory_table --write    puts it there, and the memory of a pod into ops/launch/kuberay.yaml

Nothing is measured: the settings are those that `--n-gpus` would choose, the sequences have 512 + 1,024 tokens.
"""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from math import ceil
from typing import Any

from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import (
    GIB,
    GPUS_PER_NODE,
    Card,
    engine_gpu,
    fullest_host,
    fullest_shared_memory,
    learner_rank,
    shared_memory_size,
)
from asyncgrpo.config.model_size import ModelSize, size_of
from asyncgrpo.config.placement import choose, refuse, settled, share_one_gpu
from asyncgrpo.config.schema import Config, changed
from asyncgrpo.errors import ConfigError
from benchmarks.measuring import ROOT

PAGE = ROOT / "docs" / "memory.md"
MANIFEST = ROOT / "ops" / "launch" / "kuberay.yaml"
BEGIN, END = "<!-- memory_table -->", "<!-- /memory_table -->"
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B")
RANK = 32
MOST_GPUS = 64
VERL = {
    ("Qwen3-0.6B", 0): "not found",
    ("Qwen3-0.6B", RANK): "0.5B: 1 x H100",
    ("Qwen3-8B", 0): "7B: 2 x H800",
    ("Qwen3-8B", RANK): "7B: 1 x H100",
    ("Qwen3-32B", 0): "32B: 8 x H20 (96 GB), Megatron",
    ("Qwen3-32B", RANK): "32B: 4 x H100",
    ("Llama-3.1-70B", 0): "70B: 32 x H800",
    ("Llama-3.1-70B", RANK): "72B: 8 x H100",
}
"""`MIN` rows of docs/perf/device_tuning.rst in verl-project/verl (commit a74fc52e, "last updated 06/25/2025")."""

_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
)

PUBLISHED: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=True), head_dim=128)
    for name, values in {
        "Qwen3-0.6B": ("qwen3", 151_936, 1024, 28, 16, 8, 3072, True),
        "Qwen3-1.7B": ("qwen3", 151_936, 2048, 28, 16, 8, 6144, True),
        "Qwen2.5-3B": ("qwen2", 151_936, 2048, 36, 16, 2, 11008, True),
        "Qwen3-4B": ("qwen3", 151_936, 2560, 36, 32, 8, 9728, True),
        "Qwen3-8B": ("qwen3", 151_936, 4096, 36, 32, 8, 12288, False),
        "Qwen3-14B": ("qwen3", 151_936, 5120, 40, 40, 8, 17408, False),
        "Qwen3-32B": ("qwen3", 151_936, 5120, 64, 64, 8, 25600, False),
        "Llama-3.1-70B": ("llama", 128_256, 8192, 80, 64, 8, 28672, False),
    }.items()
}
"""The fields of `config.json` that set the size of models that many train, smallest first."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    if not parser.parse_args(argv).write:
        print(tables())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    MANIFEST.write_text(sized(MANIFEST.read_text(encoding="utf-8")), encoding="utf-8")


def tables() -> str:
    """The table of every model on the fewest GPUs that hold it, and on those of one node, as Markdown."""
    head = "| model | trained | GPUs | generators | ranks | beside | rank, GiB | at once | host, GiB | verl reports |"
    rows = [row for name in MODELS for rank in (0, RANK) for row in _rows(name, rank)]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|---|", *rows])


def sized(manifest: str) -> str:
    """A manifest of KubeRay whose pods have the memory and the shared memory that the run of its entrypoint needs.

    Shared memory counts towards the memory of a pod, which gets a quarter more than is reckoned: it is killed if it takes
    more than its limit. Both are rounded up to 10 GiB.
    """
    (entrypoint,) = re.findall(r"entrypoint: >-\n(.*?)\n  \w", manifest, re.DOTALL)
    name, *settings = shlex.split(entrypoint)[2:]
    config = load_config(name, settings)
    size = size_of(json.dumps(PUBLISHED[config.model.path.rpartition("/")[2]]))
    shared = shared_memory_size(size, config)
    beside = fullest_host(size, config).total() - fullest_shared_memory(size, config).total()
    memory, shm = (f"{10 * ceil(held / GIB / 10)}Gi" for held in (1.25 * (beside + shared), shared))
    manifest = re.sub(r"(cpu: \"\d+\", memory: )\w+", rf"\g<1>{memory}", manifest)
    return re.sub(r"(medium: Memory, sizeLimit: )\w+", rf"\g<1>{shm}", manifest)


def _rows(name: str, rank: int) -> Iterator[str]:
    size, config = size_of(json.dumps(PUBLISHED[name])), _config(rank)
    model = f"| {name} | {f'LoRA {rank}' if rank else 'all'} |"
    fewest = next((n for n in range(1, MOST_GPUS + 1) if _fits(size, config, n)), None)
    if fewest is None:
        yield f"{model} does not fit {MOST_GPUS} | | | | | | | {VERL[name, rank]} |"
        return
    yield f"{model} {fewest} | {_cells(size, config, fewest)} | {VERL[name, rank]} |"
    if fewest < GPUS_PER_NODE:
        yield f"{model} {GPUS_PER_NODE} | {_cells(size, config, GPUS_PER_NODE)} | |"


def _cells(size: ModelSize, config: Config, n_gpus: int) -> str:
    chosen = fitting(size, config, n_gpus)
    run = changed(config, chosen | {"cluster.ray_address": "auto" if n_gpus > GPUS_PER_NODE else None})
    run = settled(size, run, Card.of(run))
    cells = [
        "1, shared" if run.cluster.share_gpu else f"{run.generators.count} x {run.generators.gpus_each}",
        str(run.learner.ranks),
        ", ".join(_beside(chosen)),
        f"{learner_rank(size, run).total() / GIB:.0f}",
        f"{engine_gpu(size, run, Card.of(run)).completions:,}",
        f"{fullest_host(size, run).total() / GIB:.0f}",
    ]
    return " | ".join(cells)


def _beside(chosen: dict[str, Any]) -> Iterator[str]:
    """What is chosen beside the split."""
    if chosen.get("learner.offload_optimizer"):
        yield "moments on the host"
    if tokens := chosen.get("learner.tokens_per_microbatch"):
        yield f"{tokens:,} tokens"


def _fits(size: ModelSize, config: Config, n_gpus: int) -> bool:
    try:
        fitting(size, config, n_gpus)
    except ConfigError:
        return False
    return True


def fitting(size: ModelSize, config: Config, n_gpus: int) -> dict[str, Any]:
    """What `--n-gpus` chooses. Raises ConfigError if it does not fit."""
    card = Card.of(config)
    if n_gpus == 1:
        shared = {"cluster.share_gpu": True, "generators.count": 1, "generators.gpus_each": 1, "learner.ranks": 1}
        return shared | share_one_gpu(size, config, card)
    chosen = choose(size, config, card, n_gpus, {})
    refuse(size, changed(config, chosen), card)
    return chosen


def _config(rank: int) -> Config:
    settings = ["model.path=any", "data.train=any", "learner.device=cuda", "cluster.gpu_memory_gb=80"]
    return load_config(None, [*settings, f"model.lora.rank={rank}"])


if __name__ == "__main__":
    main()
