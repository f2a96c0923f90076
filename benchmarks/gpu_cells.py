"""One cell of `benchmarks.gpu_learner`, in a process of its own: both steps of a learner in turns.

A model is drawn where it will train, because to write 8B of weights and read them again takes minutes. Only that is
replaced: sharding, attention, adapters, optimizer and compiler are the learner's own.
"""

import json
import statistics
import sys
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncgrpo.config.schema import Config
from asyncgrpo.learner import head
from asyncgrpo.learner import model as learner_model
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import keep_gathered
from asyncgrpo.learner.packing import StepBatch
from asyncgrpo.learner.report import PhaseClock
from benchmarks.gpu_clock import Stopwatch, matmul_tflops
from benchmarks.measuring import line, rounded, show
from benchmarks.rollouts import VERSION, Lengths, make_groups, reasoning_lengths
from benchmarks.shapes import SHAPES, Shape, Work, qwen3, train_flops

VENDOR_TFLOPS = 989.0
"""The vendor's figure for dense bfloat16 of an H100 or H200 (SXM)."""
LONGEST = 7936
"""Tokens of a completion, which fits into the smallest budget with its prompt."""
Cell = dict[str, Any]


def run_cell(cell: Cell) -> None:
    """Print the lines of a cell. The last line on stderr says if it ran out of memory."""
    if cell["device"] == "cpu":
        torch.set_num_threads(1)
    try:
        run_steps(cell)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"out of memory: {' '.join(str(error).split())}") from error


def run_steps(cell: Cell) -> None:
    """Measure both steps in turns, and their ratio."""
    about = _about(cell)
    shape = SHAPES[cell["shape"]]._replace(layers=cell["layers"])
    lengths = _lengths(cell)
    groups = make_groups(lengths, vocabulary=shape.vocabulary, seed=cell["seed"])
    learner = make_learner(cell, shape, group_size=len(lengths.completions[0]))
    batch = learner._pack(groups, VERSION)
    assert not batch.not_run.mask.numel(), "every completion is to be trained"
    clocks = {"rl": Stopwatch(cell["device"]), "supervised": Stopwatch(cell["device"])}
    phases: dict[str, list[dict[str, float]]] = {"rl": [], "supervised": []}
    for _ in range(cell["runs"] + 1):
        for way, clock in clocks.items():
            with clock:
                seconds = learner.step(groups, VERSION).seconds if way == "rl" else supervised_step(learner, batch)
            phases[way].append(seconds)
    dist.destroy_process_group()

    whole, computed = Work.of_sequences(lengths.prompts, lengths.completions), Work.of_rows(batch.trained)
    about |= {"rows": len(batch.trained), "tokens": whole.tokens}
    about |= {"computed": computed.tokens, "scored": whole.scored}

    def mfu(work: Work, seconds: float) -> float:
        flops = train_flops(shape, work, trains_weights=not cell["lora"])
        return rounded(flops / seconds / (1e12 * about["peak_tflops"]), 3)

    for way, clock in clocks.items():
        middle, warm = statistics.median(clock.seconds[1:]), phases[way][1:]
        by_phase = {name: rounded(statistics.median(run[name] for run in warm)) for name in warm[0]}
        figures: dict[str, Any] = {
            "mfu": mfu(whole, middle),
            "mfu_computed": mfu(computed, middle),
            "mfu_fwd_bwd": mfu(whole, by_phase["forward_backward"]),
            "tokens_per_s": round(whole.tokens / middle),
            "peak_gib": clock.peak_gib(),
            "first_s": rounded(clock.seconds[0]),
            "phases": by_phase,
        }
        show(line(f"{way} step", clock.seconds[1:], clock.unit, seed=cell["seed"], **figures, **about))
    ratios = [b / a for a, b in zip(clocks["rl"].seconds, clocks["supervised"].seconds, strict=True)][1:]
    show(line("rl speed of supervised", ratios, "1", seed=cell["seed"], **about))


def make_learner(cell: Cell, shape: Shape, *, group_size: int) -> Learner:
    """The learner of a cell, with random weights."""
    settings = qwen3(shape)
    config = {
        "model": {"path": f"random Qwen3 {cell['shape']}", "dtype": "bfloat16", "lora": {"rank": cell["lora"]}},
        "data": {"train": "unused"},
        "sampling": {"max_tokens": LONGEST},
        "algorithm": {"group_size": group_size},
        "learner": {
            "device": cell["device"],
            "tokens_per_microbatch": cell["budget"],
            "share_prompts": cell["share"],
            "compile": cell["compile"],
            "activation_checkpointing": cell["recompute"],
            "offload_optimizer": cell["offload"],
        },
    }

    def draw(path: str, *, longest: int, key: str) -> tuple[PreTrainedModel, None]:
        torch.manual_seed(cell["seed"])
        with torch.device(cell["device"]):
            drawn: PreTrainedModel = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        return drawn.eval(), None

    device = "cuda:0" if cell["device"] == "cuda" else "cpu"
    chosen = {"choose_kernel": lambda device, dtype: cell["kernel"]} if cell["kernel"] != "auto" else {}
    with mock.patch.multiple(learner_model, unread_language_model=draw, **chosen):
        learner = Learner(msgspec.convert(config, Config), rank=0, world=1, device=device)
    if cell["compile"]:
        learner.compile()
    return learner


def supervised_step(learner: Learner, batch: StepBatch) -> dict[str, float]:
    """Train the same rows as plain text, with all that the learner has; seconds by phase."""
    clock = PhaseClock(learner.device)
    with clock("forward_backward"):
        keep_gathered(learner.model, True)
        for number, row in enumerate(batch.trained):
            if number == len(batch.trained) - 1:
                keep_gathered(learner.model, False)
            learner.model(row.to(learner.device), _mean_of(batch.num_tokens)).loss.backward()
    with clock("optimizer"):
        learner._update(learner.config.learner.lr, {})
    return clock.seconds


def _mean_of(num_tokens: int) -> head.Objective:
    """The mean negative log-likelihood of so many tokens."""

    def gradients(tokens: slice, scores: head.TokenScores) -> head.LossGradients:
        return head.LossGradients(torch.full_like(scores.logprobs, -1 / num_tokens))

    return gradients


def _lengths(cell: Cell) -> Lengths:
    wanted: dict[str, Any] = {"tokens": cell["tokens"], "seed": cell["seed"]}
    if cell["shape"] == "tiny":
        return reasoning_lengths(prompt=(8, 16), median=24, longest=64, **wanted)
    return reasoning_lengths(longest=LONGEST, **wanted)


def _about(cell: Cell) -> dict[str, Any]:
    """Fields about the cell, the card, and what to compare with."""
    measured, is_cuda = matmul_tflops(cell["device"]), cell["device"] == "cuda"
    return {
        "card": torch.cuda.get_device_name() if is_cuda else "no card",
        "matmul_tflops": measured,
        "peak_tflops": cell["peak"] or (VENDOR_TFLOPS if is_cuda else measured),
        "cell": cell,
    }


if __name__ == "__main__":
    run_cell(json.loads(sys.argv[1]))
