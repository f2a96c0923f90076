"""One full learner step: CPU seconds, tokens per CPU second and peak memory, beside a supervised step.

python -m benchmarks.learner_step --model tiny --batch tail --rounds 5

Every cell is a fresh process with one thread, and the cells of a round run one after the other, so that what a shared
machine does to one it does to its neighbours; figures are CPU seconds of the process, median of the steps after the
first. The last lines have, for each pair, the median, least and largest of the rounds' ratios.

    asyncgrpo             `Learner.step`, bfloat16, float32 masters, AdamW, learner.compile=false
    asyncgrpo compiled    the same with learner.compile=true, which is the default of a run that is long enough
    asyncgrpo apart       the same with learner.share_prompts=false
    supervised            the same model, rows, attention, optimizer and FSDP, trained to repeat the completions: all logits of
    supervised compiled   a row, in float32, torch's own cross-entropy and autograd
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cells import GROUP_SIZE, SEED, make_batch, make_model
from benchmarks.measuring import PeakMemory, line, show

OURS = {
    "asyncgrpo": {"compile": False},
    "asyncgrpo compiled": {"compile": True},
    "asyncgrpo apart": {"share_prompts": False, "compile": False},
    "supervised": {"compile": False},
    "supervised compiled": {"compile": True},
}
PAIRS = (
    ("asyncgrpo", "asyncgrpo apart"),
    ("supervised", "asyncgrpo"),
    ("supervised compiled", "asyncgrpo compiled"),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch", default="tail")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured in each cell")
    parser.add_argument("--budget", type=int, default=2048, help="learner.tokens_per_microbatch")
    parser.add_argument("--cells", nargs="+", choices=list(OURS), default=list(OURS), help="only these")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="where models are kept; none: a temporary folder")
    arguments = parser.parse_args(argv)
    if arguments.cell:
        run_cell(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        compare(arguments, Path(arguments.folder or scratch))


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all cells, round by round, and their ratios."""
    model, tokens = make_model(folder, arguments.model), make_batch(arguments.batch).num_tokens
    seconds: dict[str, list[float]] = {cell: [] for cell in arguments.cells}
    about = {"model": arguments.model, "batch": arguments.batch, "tokens": tokens, "budget": arguments.budget}
    for number in range(arguments.rounds):
        for cell in arguments.cells:
            found = _run(arguments, cell, model)
            seconds[cell].append(median := statistics.median(found["cpu_s"]))
            sizes = {"tokens_per_s": round(tokens / median), "peak_mb": round(found["peak_mb"]), **about}
            show(line("learner step", found["cpu_s"], "CPU s", seed=SEED, cell=cell, round=number, **sizes))
    for one, other in PAIRS:
        if seconds.get(one) and seconds.get(other):
            ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
            show(line("ratio of CPU s, by rounds", ratios, "", seed=SEED, of=one, to=other, **about))


def _run(arguments: argparse.Namespace, cell: str, model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.learner_step", "--cell", cell, "--model", str(model)]
    command += ["--batch", arguments.batch, "--steps", str(arguments.steps), "--budget", str(arguments.budget)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"cpu_s"')]
    if not lines:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_cell(arguments: argparse.Namespace) -> None:
    """Measure one cell, in this process."""
    import msgspec
    import torch

    from asyncgrpo.config.schema import Config
    from asyncgrpo.learner import model
    from asyncgrpo.learner.learner import Learner
    from asyncgrpo.types import PolicyVersion

    torch.set_num_threads(1)
    settings = {
        "model": {"path": arguments.model, "dtype": "bfloat16"},
        "data": {"train": "unused"},
        "sampling": {"max_tokens": 1024},
        "algorithm": {"group_size": GROUP_SIZE},
        "learner": {"device": "cpu", "lr": 1e-6, "tokens_per_microbatch": arguments.budget} | OURS[arguments.cell],
    }
    is_supervised = arguments.cell.startswith("supervised")
    if is_supervised:
        model.fused_loss = _cross_entropy  # type: ignore[assignment]
    learner = Learner(msgspec.convert(settings, Config), rank=0, world=1, device="cpu")
    if learner.config.learner.compile:
        learner.compile()  # at once: the first step is not measured
    groups, version = _groups(arguments.batch), PolicyVersion(0, 0)
    step: Callable[..., object] = _without_rl if is_supervised else Learner.step
    seconds, memory = [], PeakMemory()
    for _ in range(arguments.steps + 1):
        started = time.process_time()
        step(learner, groups, version)
        seconds.append(time.process_time() - started)
    show({"cpu_s": seconds[1:], "peak_mb": memory.mb()})


def _without_rl(learner: Any, groups: list[Any], version: Any) -> None:
    """A step on the same rows that trains the model to repeat the completions."""
    from benchmarks.gpu_cells import supervised_step

    supervised_step(learner, learner._pack(groups, version))


def _cross_entropy(hidden: Any, weight: Any, targets: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Replaces `head.fused_loss`. It takes the mean over a row, because the scale of a gradient costs nothing."""
    import torch.nn.functional as F

    from asyncgrpo.learner.head import TokenScores

    none = hidden.new_zeros(len(targets))
    return F.cross_entropy((hidden @ weight.t()).float(), targets), TokenScores(none, none)


def _groups(name: str) -> list[Any]:
    """The batch as groups that one policy version sampled."""
    from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, VersionSpan

    batch, groups = make_batch(name), []
    for start in range(0, len(batch.completions), GROUP_SIZE):
        rollouts = []
        for i in range(start, start + GROUP_SIZE):
            spans = (VersionSpan(PolicyVersion(0, 0), 0, len(batch.completions[i])),)
            completion = Completion(i - start, batch.completions[i].astype("int32"), batch.logprobs[i], spans, "stop")
            rollouts.append(Rollout(completion, Score(value=float(batch.rewards[i]))))
        number = start // GROUP_SIZE
        prompt = Prompt(prompt_id=f"p/{number}", token_ids=tuple(batch.prompts[start].tolist()))
        groups.append(Group(f"g{number}", f"l{number}", 0, number, "train", prompt, tuple(rollouts)))
    return groups


if __name__ == "__main__":
    main()
