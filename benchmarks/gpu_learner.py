"""The learner on one card: share of its peak (MFU), memory, head tiles, and what RL costs beside supervised training.

python -m benchmarks.gpu_learner --shapes 0.6b 1.7b --seconds 560 --table gpu.md
python -m benchmarks.gpu_learner --shapes 8b --budgets 16384 32768 --tokens 65536 --runs 2 --seconds 560
python -m benchmarks.gpu_learner --device cpu --shapes tiny --budgets 256 512 --tokens 1024

NOT RUN ON A CARD YET: only `--device cpu --shapes tiny` was.

Models have random weights of Qwen3's shapes, drawn on the device: bfloat16 over float32 masters, AdamW. Rollouts have
the lengths of `benchmarks.rollouts`. Each cell is a fresh process in which both steps take turns, on the same rows:

    rl step           `Learner.step`: packing, forward, backward, report, optimizer
    supervised step   the baseline: rows packed before, the same model, attention, head and optimizer; constant loss
                      gradients, no
                      report
    head              `fused_loss` alone, forward and backward, with tiles and blocks of other sizes

`mfu` charges every completion with a prompt of its own, `mfu_computed` a shared prompt once (`benchmarks.shapes`). Both are
shares of `--peak`, the vendor's figure for dense bfloat16 on an H100 or H200; `matmul_tflops` is what a large product
reached in the same process; phases are wall time. A cell that runs out of memory is tried again with activations computed twice
(`recompute`), which no MFU is charged for.

AdamW with float32 masters takes 16 bytes a weight, 131 GB at 8B, which leaves too little of 139 GiB for activations. So
8B runs with `recompute`, and with the moments on the CPU (`learner.offload_optimizer`): moving them
takes seconds, in the phase `optimizer`, and `mfu_fwd_bwd` leaves that out. Other ways to make it fit are adapters
(`--lora 16`, needs peft) and fewer layers of the same width (`--layers 12`).

Needs torch, transformers, numpy, msgspec and xxhash; no ray, sglang, omegaconf or hub.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import ROOT, show, where
from benchmarks.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.gpu_cells import Cell

PARTS = ["steps", "variants", "head"]
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
    parser.add_argument("--table", type=Path, help="Markdown file, written anew after every cell")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    lines: list[dict] = []
    deadline = time.monotonic() + arguments.seconds
    for cell in plan(arguments):
        for one in attempt(cell, deadline, retry=arguments.recompute == "auto"):
            lines.append(one)
            show(one)
        if arguments.table:
            arguments.table.write_text(table(lines))


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
            "part": "step",
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
        if "head" in arguments.parts:
            cells.append(common | {"part": "head", "shape": name, "tokens": 16384 if is_cuda else 64})
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


def table(lines: list[dict]) -> str:
    """The lines as a Markdown table."""
    steps = [one for one in lines if one["what"] == "rl step"]
    heads = [one for one in lines if one["what"] == "head"]
    cards = sorted({one["card"] for one in steps + heads})
    products = [one["matmul_tflops"] for one in steps + heads] or [0.0]
    text = [
        f"{where()['date']}, {' and '.join(cards) or 'nothing ran'}, commit {where()['commit']}. A large product reached "
        f"{min(products)} to {max(products)} TFLOP/s.",
        "",
        "| shape | layers | row budget | rows | shared prompts | compiled | kernel | recompute | offload | LoRA | RL step s "
        "| supervised s | RL speed of supervised | MFU | MFU computed | MFU fwd+bwd | MFU supervised | peak GiB |",
        "|" + "---|" * 18,
    ]
    for step in steps:
        cell = step["cell"]
        floor = next(one for one in lines if one["what"] == "supervised step" and one["cell"] == cell)
        ratio = next(one for one in lines if one["what"] == "rl speed of supervised" and one["cell"] == cell)
        flags = (cell["share"], cell["compile"], cell["kernel"], cell["recompute"], cell["offload"], cell["lora"])
        shown = [cell["shape"], cell["layers"], cell["budget"], step["rows"], *flags, step["value"], floor["value"]]
        shown += [f"{one:.1%}" for one in (ratio["value"], step["mfu"], step["mfu_computed"], step["mfu_fwd_bwd"])]
        text.append(_row([*shown, f"{floor['mfu']:.1%}", step["peak_gib"]]))
    if heads:
        text += ["", "| head of | tokens | tile | block | s | TFLOP/s | peak GiB |", "|" + "---|" * 7]
    for one in heads:
        sizes = (f"2^{one['tile_log2']}", f"2^{one['block_log2']}")
        text.append(_row([one["cell"]["shape"], one["tokens"], *sizes, one["value"], one["tflops"], one["peak_gib"]]))
    failed = [one for one in lines if one["what"] == "failed"]
    text += ["", *(f"- {json.dumps(one['cell'])}: {one['error']}" for one in failed)]
    return "\n".join(text).rstrip() + "\n"


def _row(cells: list[Any]) -> str:
    named = {True: "yes", False: "no"}
    return "| " + " | ".join(named[c] if isinstance(c, bool) else str(c) for c in cells) + " |"


if __name__ == "__main__":
    main()
