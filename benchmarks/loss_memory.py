"""Memory and time of the loss alone, from hidden states and a head to their gradients, at growing sizes.

python -m benchmarks.loss_memory --vocabularies 32768 151936 --tokens 1024 4096 16384 --dtypes bfloat16 float32

    fused   `learner.head.fused_loss`: logits exist for a tile of tokens at a time, and are made once
    full    all logits, a float32 log-softmax, the same loss, torch's autograd; where it fits `--limit-gb`
    verl    verl's fused head in PyTorch, which makes the logits twice; with `--verl FOLDER`, an unpacked wheel of verl

Each cell is a fresh process of one thread. The loss is the clipped surrogate, of hidden states [N, 256] and a head [V, 256].
`value` is how much the peak of resident memory grows beyond these two, after a small warm-up. `gradients_mb` is a part of
it that both must have: [N, 256] and [V, 256], and the head's in float32 while it is summed, which in float32 is the same
tensor. The rest of `fused` does not grow with tokens x vocabulary; that of `full` does.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, PeakMemory, line, rounded, show

HIDDEN = 256
FULL_BYTES = 16
"""Bytes for a logit: bfloat16, float32, its log-softmax, and the gradients of two of these."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32768, 151936])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--runs", type=int, default=3, help="fresh processes of each cell")
    parser.add_argument("--limit-gb", type=float, default=6.0, help="cells of `full` beyond it are left out")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--verl", type=Path, help="folder with verl's package, whose head is measured beside ours")
    parser.add_argument("--cell", nargs=4, metavar=("WAY", "DTYPE", "N", "V"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.cell:
        way, dtype, tokens, vocabulary = arguments.cell
        print(json.dumps(run_cell(way, dtype, int(tokens), int(vocabulary), arguments.seed, arguments.verl)))
        return
    for dtype, vocabulary, tokens in itertools.product(arguments.dtypes, arguments.vocabularies, arguments.tokens):
        ways = ["fused", *(["verl"] if arguments.verl else [])]
        if FULL_BYTES * tokens * vocabulary < arguments.limit_gb * 1e9:
            ways.append("full")
        for found in measure(ways, dtype, tokens, vocabulary, arguments.runs, arguments.seed, arguments.verl):
            show(found)


def measure(
    ways: list[str], dtype: str, tokens: int, vocabulary: int, runs: int, seed: int, verl: Path | None
) -> list[dict[str, Any]]:
    """Measure the cells of one size in turns, each in processes of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _, way in itertools.product(range(runs), ways):
        command = [sys.executable, "-m", "benchmarks.loss_memory", "--seed", str(seed)]
        command += ["--cell", way, dtype, str(tokens), str(vocabulary), *(["--verl", str(verl)] if verl else [])]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
        found[way].append(json.loads(result.stdout.splitlines()[-1]))
    width = {"bfloat16": 2, "float32": 4}[dtype]
    gradients = width * (tokens + vocabulary) * HIDDEN + (4 * vocabulary * HIDDEN if width == 2 else 0)
    sizes = {"dtype": dtype, "tokens": tokens, "vocabulary": vocabulary, "hidden": HIDDEN}
    return [
        line("loss part, peak memory", [one["peak_mb"] for one in found[way]], "MB", seed=seed, way=way, **sizes)
        | {"gradients_mb": rounded(gradients / 1e6)}
        | _seconds([one["cpu_s"] for one in found["fused"]], [one["cpu_s"] for one in found[way]])
        for way in ways
    ]


def _seconds(ours: list[float], found: list[float]) -> dict[str, Any]:
    """CPU seconds of a way, and ours over them in each round: medians, the least and the largest."""
    ratios = [one / other for one, other in zip(ours, found, strict=True)]
    return {
        "cpu_s": rounded(statistics.median(found)),
        "cpu_s_spread": [rounded(min(found)), rounded(max(found))],
        "fused_to_this": rounded(statistics.median(ratios), 3),
        "fused_to_this_spread": [rounded(min(ratios), 3), rounded(max(ratios), 3)],
    }


def run_cell(
    way: str, dtype: str, tokens: int, vocabulary: int, seed: int, folder: Path | None = None
) -> dict[str, float]:
    """Peak memory and CPU seconds of one forward and backward, in this process."""
    import torch
    from torch import Tensor

    from asyncgrpo.learner.head import LossGradients, TokenScores, fused_loss

    torch.set_num_threads(1)
    exact: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(exact).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, HIDDEN, generator=generator)).to(exact).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    behaviour = torch.full((tokens,), -torch.tensor(float(vocabulary)).log().item())

    def fused(count: int) -> Tensor:
        def gradients(where: slice, scores: TokenScores) -> LossGradients:
            ratio = torch.exp(scores.logprobs - behaviour[where])
            return LossGradients(-ratio.clip(0.8, 1.2) * advantages[where] / tokens)

        return fused_loss(hidden[:count], weight, targets[:count], gradients, temperature=1.0)[0]

    def full(count: int) -> Tensor:
        log_p = (hidden[:count] @ weight.t()).float().log_softmax(-1)
        logprobs = log_p.gather(-1, targets[:count, None])[:, 0]
        ratio = torch.exp(logprobs.detach() - behaviour[:count])
        return -(ratio.clip(0.8, 1.2) * advantages[:count] * logprobs).sum() / tokens

    def verl(count: int) -> Tensor:
        spec = importlib.util.spec_from_file_location(
            "of_verl", f"{folder}/verl/utils/experimental/torch_functional.py"
        )
        assert spec is not None and spec.loader is not None, folder
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        logprobs, _ = module.FusedLinearForPPOFunction.apply(hidden[:count], weight, targets[:count], 1.0)
        ratio = torch.exp(logprobs.detach() - behaviour[:count])
        return -(ratio.clip(0.8, 1.2) * advantages[:count] * logprobs).sum() / tokens

    loss = {"fused": fused, "full": full, "verl": verl}[way]
    loss(32).backward()
    hidden.grad = weight.grad = None
    memory, started = PeakMemory(), time.process_time()
    loss(tokens).backward()
    return {"cpu_s": time.process_time() - started, "peak_mb": memory.mb()}


if __name__ == "__main__":
    main()
