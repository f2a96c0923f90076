"""Where the time of new weights goes in SGLang: our swap, checksum and scoring, beside its stock update calls, in turns.

`python -m benchmarks.sglang_weights --models s25m s100m` prints one JSON line for each part: CPU seconds of this process and of
SGLang's, and wall seconds, over the rounds. All ways write the same tensors, in float32, into an engine that samples nothing.
The first weights of an engine are measured once: with them it is found out of what the parameters are made.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from asyncgrpo.engines.sglang.engine import SGLangEngine
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Layout, Staging
from asyncgrpo.weights.check import CheckSequences
from asyncgrpo.weights.files import disk_tensors
from benchmarks.cells import MODELS, make_model
from benchmarks.measuring import show, where

CONTEXT = 512


class Update:
    """The same new weights, by every way."""

    def __init__(self, engine: SGLangEngine, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._engine = engine
        tensors = disk_tensors(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._own = [(name, tensor.detach().clone()) for name, tensor in tensors.items()]
        layout = Layout([TensorInfo(name=n, shape=tuple(t.shape), dtype="float32") for n, t in self._own])
        self._received = Staging(layout).tensors()
        for (_, there), (_, tensor) in zip(self._received, self._own, strict=True):
            there.copy_(tensor)
        self._check = CheckSequences.draw(engine.vocab_size, CONTEXT)
        self._number = 0

    def _load(self, tensors: list[tuple[str, Tensor]]) -> Awaitable[None]:
        self._number += 1
        return self._engine.load_weights(tensors, PolicyVersion(1, self._number))

    async def _stock(self, load_format: str | None) -> None:
        """What `sglang.Engine.update_weights_from_tensor` does, on this event loop."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        manager, given = self._engine._manager, self._own
        payloads = self._engine._engine._serialize_tensors_per_rank(given, load_format)
        message = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=True
        )
        await manager.begin_weight_update_communicator(BeginWeightUpdateReqInput())
        success, why = await manager.update_weights_from_tensor(message, None)
        assert success, why
        await manager.end_weight_update_communicator(EndWeightUpdateReqInput())

    def parts(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {
            "ours: mapped": lambda: self._load(self._received),
            "ours: packed": lambda: self._load(self._own),
            "ours: checksum": self._engine.checksum,
            "ours: check sequences": lambda: self._engine.score(self._check.tokens, self._check.start),
            "stock: from tensor": lambda: self._stock(None),
        }


def cpu_s() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


async def measure(path: Path, rounds: int) -> list[dict[str, Any]]:
    engine = SGLangEngine(str(path), dtype=torch.float32, max_context=CONTEXT, device="cpu", max_completions=8)
    await engine.start(PolicyVersion(0, 0))
    try:
        update = Update(engine, path)
        parts = update.parts()
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours: first weights", *parts)}

        async def take(name: str, part: Callable[[], Awaitable[Any]]) -> None:
            cpu, started = cpu_s(), time.perf_counter()
            await part()
            spent[name].append((cpu_s() - cpu, time.perf_counter() - started))

        await take("ours: first weights", parts["ours: mapped"])
        for _ in range(rounds + 1):
            for name, part in parts.items():
                await take(name, part)
    finally:
        await engine.close()
    return [
        {
            "what": name,
            "model": path.name,
            "mb": round(update.bytes / 1e6),
            "cpu_s": round(statistics.mean(cpu for cpu, _ in each[1:] or each), 4),
            "seconds": round(statistics.median(wall for _, wall in each[1:] or each), 4),
        }
        for name, each in spent.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["s25m", "s100m"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for measured in asyncio.run(measure(make_model(Path(folder), name), arguments.rounds)):
                show(measured | where())


if __name__ == "__main__":
    main()
