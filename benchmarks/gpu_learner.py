"""The learner on one card: share of its peak (MFU), memory, and what RL costs beside supervised training.

python -m benchmarks.gpu_learner --shapes 0.6b 1.7b --seconds 560
python -m benchmarks.gpu_learner --shapes 8b --budgets 16384 32768 --tokens 65536 --runs 2 --seconds 560
python -m benchmarks.gpu_learner --device cpu --shapes tiny --budgets 256 512 --tokens 1024

NOT RUN ON A CARD YET: only `--device cpu --shapes tiny` was.

Random weights of Qwen3's shapes, bfloat16 over float32 masters, AdamW; lengths of `benchmarks.rollouts`. A cell is a process:

    rl step           `Learner.step`: packing, forward, backward, report, optimizer
    supervised step   the baseline: the same rows, model, attention, head and optimizer; constant gradients, no report

`mfu` charges every completion with a prompt of its own, `mfu_computed` a shared prompt once (`benchmarks.shapes`). Both are
shares of `--peak`, the vendor's figure for dense bfloat16 on an H100 or H200; `matmul_tflops` is what a large product
reached in the same process; phases are wall time. A cell that runs out of memory is tried again with activations computed twice
(`recompute`), which no MFU is charged for.

AdamW with float32 masters takes 16 bytes a weight, 131 GB at 8B. So 8B runs with `recompute`, and with the moments on the CPU
(`learner.offload_optimizer`), whose seconds `mfu_fwd_bwd` leaves out. Or use `--lora 16` (peft) or `--layers 12`.

Needs torch, transformers, numpy, msgspec and xxhash; no ray, sglang, omegaconf or hub.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.measuring import ROOT, show
from benchmarks.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.gpu_cells import Cell

PARTS = ["steps", "variants"]
RECOMPUTE = "8b"
"""Shapes that start with recomputed activations, and with the moments on the CPU."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b", "1.7b", "8b"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 16384, 32768, 65536], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a step, at least")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=3, help="of each step, after one that is not counted")
    parser.add_argument("--recompute", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights are trained")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--peak", type=float, help="TFLOP/s; none: the vendor's, on a CPU what a product reaches")
    parser.add_argument("--seconds", type=float, default=1e6, help="for everything; what does not fit is left out")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    for cell in plan(arguments):
        for one in attempt(cell, deadline, retry=arguments.recompute == "auto"):
            show(one)


def plan(arguments: argparse.Namespace) -> "list[Cell]":
    """The cells, most wanted first. Variants are measured at the second budget."""
    is_cuda = arguments.device == "cuda"
    common = {"device": arguments.device, "runs": arguments.runs, "seed": arguments.seed, "peak": arguments.peak}
    middle = arguments.budgets[min(1, len(arguments.budgets) - 1)]
    variants: list[Cell] = [{"share": False}]
    if is_cuda:
        variants += [{"compile": True}, {"kernel": "varlen"}, {"kernel": "flash_attention_2"}]
    cells = []
    for name in arguments.shapes:
        is_full = not arguments.lora and arguments.layers is None
        step = common | {
            "shape": name,
            "layers": arguments.layers or SHAPES[name].layers,
            "tokens": arguments.tokens,
            "lora": arguments.lora,
            "recompute": arguments.recompute == "on" or (arguments.recompute == "auto" and name == RECOMPUTE),
            "offload": is_cuda and name == RECOMPUTE and is_full,
            "share": True,
            "compile": False,
            "kernel": "auto",
        }
        if "steps" in arguments.parts:
            cells += [step | {"budget": budget} for budget in arguments.budgets]
        if "variants" in arguments.parts:
            cells += [step | {"budget": middle} | variant for variant in variants]
    return cells


def attempt(cell: "Cell", deadline: float, *, retry: bool) -> list[dict]:
    """The lines of one cell, or why it failed."""
    left = deadline - time.monotonic()
    if left <= 0:
        return [failed(cell, "left out: no time")]
    command = [sys.executable, "-m", "benchmarks.gpu_cells", json.dumps(cell)]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if cell["device"] == "cpu" else {})
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=left)
    except subprocess.TimeoutExpired:
        return [failed(cell, "stopped: no time")]
    lines = [json.loads(text) for text in result.stdout.splitlines() if text.startswith("{")]
    if result.returncode == 0:
        return lines
    error = next(reversed(result.stderr.strip().splitlines()), f"exit status {result.returncode}")
    if error.startswith("out of memory") and retry and not cell.get("recompute", True):
        return [failed(cell, error), *attempt(cell | {"recompute": True}, deadline, retry=False)]
    return [*lines, failed(cell, error)]


def failed(cell: "Cell", error: str) -> dict:
    return {"what": "failed", "error": error, "cell": cell}


if __name__ == "__main__":
    main()
