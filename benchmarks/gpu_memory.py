"""One learner step in each way of saving memory: peak on the card, beside what was predicted, and seconds.

    python -m benchmarks.gpu_memory --shape 0.6b

Every way is a `Learner` of its own, built from a folder on the disk as in a run, in one process after the other's memory is
given back. Two steps on random rollouts: the first makes the optimizer's moments, the second is measured. Measured is
`torch.cuda.max_memory_allocated`; predicted, the sum of `asyncgrpo/config/memory.py` without what torch does not count.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncgrpo.config.memory import learner_rank
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.schema import Config
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import Group
from benchmarks.measuring import rounded, show, where
from benchmarks.rollouts import VERSION, make_groups, reasoning_lengths
from benchmarks.shapes import SHAPES, write_model

SEED = 1234
GROUP = 8
WAYS: dict[str, dict[str, Any]] = {
    "all on the card": {},
    "recomputed activations": {"learner": {"activation_checkpointing": True}},
    "optimizer on the host": {"learner": {"offload_optimizer": True}},
    "reference": {"algorithm": {"kl_coef": 0.01}},
    "reference on the host": {"algorithm": {"kl_coef": 0.01}, "learner": {"offload_reference": True}},
    "LoRA of rank 16": {"model": {"lora": {"rank": 16}}, "learner": {"lr": 1e-4}},
}
"""Settings beside those of `config_of`."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a row")
    arguments = parser.parse_args(argv)
    name, budget = ("tiny", 256) if arguments.tiny else (arguments.shape, arguments.budget)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES[name]
    drawn = {"prompt": (8, 16), "median": 24, "longest": 64} if arguments.tiny else {"longest": budget // 2}
    lengths = reasoning_lengths(tokens=3 * budget, size=GROUP, seed=SEED, **drawn)  # type: ignore[arg-type]
    groups = make_groups(lengths, vocabulary=shape.vocabulary, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, device=arguments.device, seed=SEED)
        for way, settings in WAYS.items():
            _give_back(arguments.device)
            about = {"what": "memory of a step", "way": way, "shape": name, "budget": budget}
            try:
                show(about | measure(config_of(folder, arguments.device, budget, settings), groups, arguments.device))
            except (ImportError, RuntimeError) as error:  # out of memory is a RuntimeError
                show(about | {"error": " ".join(str(error).split())[:300]})


def measure(config: Config, groups: list[Group], device: str) -> dict[str, Any]:
    """The figures of the second of two steps."""
    started = time.perf_counter()
    learner = Learner(config, rank=0, world=1, device="cuda:0" if device == "cuda" else "cpu")
    built = time.perf_counter() - started
    learner.step(groups, VERSION)
    figures: dict[str, Any] = {"built_s": rounded(built), "predicted_gib": predicted_gib(config)}
    if device == "cuda":
        torch.cuda.synchronize()
        figures["between_steps_gib"] = gib(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    report = learner.step(groups, VERSION)
    if device == "cuda":
        figures |= {
            "measured_gib": gib(torch.cuda.max_memory_allocated()),
            "reserved_gib": gib(torch.cuda.max_memory_reserved()),
            "used_gib": gib(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]),
        }
    phases = {name: rounded(seconds) for name, seconds in report.seconds.items()}
    return figures | {"phases": phases, "grad_norm": rounded(report.grad_norm), "skipped": report.skipped} | where()


def predicted_gib(config: Config) -> dict[str, float]:
    """Predicted memory of each part, in GiB."""
    size = size_at(config.model.path)
    assert size is not None, "the model's folder is there"
    return {name: gib(held) for name, held in learner_rank(size, config).parts.items()}


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
