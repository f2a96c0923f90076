"""The sync gap over thousands of publications, and what faults do to it.

`python -m benchmarks.sync_gap --publications 10000 --dtype float32` trains two tiny models on random rollouts. Each version
goes, bit by bit as a publication carries it, into a model of the torch engine, which scores the check sequences as the learner
does. Then training begins anew with one fault after the other, and the table says at which publication each is found.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncgrpo.config.schema import Config
from asyncgrpo.engines.torch import decoder
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.check import GapLimit, SyncGap
from asyncgrpo.weights.files import disk_tensors
from benchmarks.measuring import where
from tests.learner.helpers import config, random_groups
from tests.models import make_tiny_qwen3, make_tiny_qwen3_moe

MODELS = {"qwen3": make_tiny_qwen3, "qwen3-moe": make_tiny_qwen3_moe}
Fault = Callable[[str], str | None]
"""Which tensor the engine writes in the place of this one; none: it leaves it as it was."""


def swapped(name: str) -> str:
    there = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    return next((name.replace(a, b) for a, b in there.items() if a in name and "layers.1." in name), name)


FAULTS: dict[str, Fault] = {
    "no update at all": lambda name: None,
    "a layer without its update": lambda name: None if "layers.0." in name else name,
    "a projection dropped": lambda name: None if "layers.1.self_attn.k_proj" in name else name,
    "the last norm dropped": lambda name: None if name == "model.norm.weight" else name,
    "two experts swapped": swapped,
}


class Pair:
    """A learner, and an engine that gets every version."""

    def __init__(self, path: Path, dtype: str, lr: float, seed: int) -> None:
        settings: Config = config(
            path, model={"path": str(path), "dtype": dtype}, learner={"device": "cpu", "lr": lr}, run={"seed": seed}
        )
        self.learner = Learner(settings, rank=0, world=1, device="cpu")
        decoder.register()
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=decoder.NAME
        ).eval()
        self._places = disk_tensors(self._model, remove_duplicate=False)
        self._engine = decoder.Decoder(self._model, max_context=64, max_completions=1)
        self.limit = GapLimit(dtype)
        self._rng = np.random.default_rng(seed)
        self._step = 0

    def step(self) -> None:
        groups = random_groups(2, 4, seed=int(self._rng.integers(2**31)))
        self.learner.step(groups, PolicyVersion(7, self._step))
        self._step += 1

    def publish(self, fault: Fault = lambda name: name) -> SyncGap:
        sent: dict[str, Tensor] = {info.name: tensor for info, tensor in self.learner.weights()}
        wrong = ((name, fault(name)) for name in sent)
        for name, source in wrong:
            if source:
                self._places[name].detach().copy_(sent[source])
        check = self.learner.check
        gap = SyncGap.between(check.score(), self._engine.score(check.sequences.tokens, check.sequences.start))
        self.limit.find(gap)
        return gap


def false_alarms(path: Path, arguments: argparse.Namespace) -> None:
    pair = Pair(path, arguments.dtype, arguments.lr, arguments.seed)
    gaps, started = [pair.publish()], time.monotonic()
    for _ in range(arguments.publications - 1):
        pair.step()
        gaps.append(pair.publish())
    means, largest = np.array([gap.mean for gap in gaps]), np.array([gap.max for gap in gaps])
    alarms = int((means > pair.limit.nats).sum())
    print(
        f"| {path.name} | {arguments.dtype} | {arguments.lr:g} | {len(gaps):,} | {means[0]:.1e} | {pair.limit.nats:.1e} | "
        f"{np.median(means):.1e} | {means.max():.1e} | {np.median(largest):.1e} | {largest.max():.1e} | {alarms} |"
        f"  <!-- {time.monotonic() - started:.0f} s -->",
        flush=True,
    )


def found_at(path: Path, arguments: argparse.Namespace, fault: Fault, at_most: int) -> str:
    """Publications with the fault until it is found, and the gap then."""
    pair = Pair(path, arguments.dtype, arguments.lr, arguments.seed)
    pair.publish()
    for number in range(1, at_most + 1):
        pair.step()
        gap = pair.publish(fault)
        if gap.mean > pair.limit.nats:
            return f"{number} ({gap.mean:.1e})"
    return f"not in {at_most} ({gap.mean:.1e})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--publications", type=int, default=10_000)
    parser.add_argument("--faulty", type=int, default=100, help="publications at most until a fault is to be found")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(where())
    with tempfile.TemporaryDirectory() as folder:
        paths = [MODELS[name](Path(folder) / name) for name in arguments.models]
        print(
            "| model | dtype | lr | publications | first gap | limit | median | largest | of a token | largest | alarms |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for path in paths:
            false_alarms(path, arguments)
        print("\n| fault | model | found at publication (mean gap) |\n|---|---|---|")
        for name, fault in FAULTS.items():
            for path in (path for path in paths if "moe" in path.name or "expert" not in name):
                print(f"| {name} | {path.name} | {found_at(path, arguments, fault, arguments.faulty)} |", flush=True)


if __name__ == "__main__":
    main()
