"""The pause of an SGLang engine on the CPU for new weights: copied by the plan, and by the loader of SGLang's model, in turns.

python -m benchmarks.swaps --models s100m experts
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.files import disk_tensors
from benchmarks.cells import MODELS, make_model
from benchmarks.measuring import show, where
from tests.engines.shared import shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["s100m", "experts"], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(Path(folder), model)
            show({"model": model} | asyncio.run(measure(path, arguments.rounds)) | {"seed": 0} | where())


async def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Medians of the seconds of each pause."""
    tensors = shared(disk_tensors(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)))
    engine = SGLangEngine(SGLangOptions(model_path=str(path), dtype=torch.bfloat16, max_context=128, device="cpu"))
    await engine.start(PolicyVersion(0, 0))
    await engine.load_weights(tensors, PolicyVersion(0, 1), keep_kv=True)
    proof = engine._proof
    assert proof is not None and proof.may_copy(tensors)
    found: dict[str, list[float]] = {"by_plan_s": [], "by_loader_s": []}
    for number in range(2 * rounds):
        proof._copies_suffice = number % 2 == 0
        started = time.perf_counter()
        await engine._replace_weights(tensors, PolicyVersion(1, number), keep_kv=True)
        found["by_plan_s" if proof._copies_suffice else "by_loader_s"].append(time.perf_counter() - started)
    await engine.close()
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    return {"tensors": len(tensors), "mb": round(len(tensors.arenas.memory) / 1e6)} | medians


if __name__ == "__main__":
    main()
