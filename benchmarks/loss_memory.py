"""Memory and time of the loss alone, from hidden states and a head to their gradients, at growing sizes.

python -m benchmarks.loss_memory --vocabularies 32768 151936 --tokens 1024 4096 16384 --dtypes bfloat16 float32

    fused   `learner.head.fused_loss`: logits exist for a tile of tokens at a time, and are made once
    full    all logits, a float32 log-softmax, the same loss, torch's autograd; where it fits `--limit-gb`

Each cell is a fresh process of one thread. The loss is the clipped surrogate, of hidden states [N, 256] and a head [V, 256].
`value` is how much the peak of resident memory grows beyond these two, after a small warm-up. `gradients_mb` is a part of
it that both must have: [N, 256] and [V, 256], and the head's in float32 while it is summed, which in float32 is the same
tensor. The rest of `fused` does not grow with tokens x vocabulary; that of `full` does.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

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
    parser.add_argument("--cell", nargs=4, metavar=("WAY", "DTYPE", "N", "V"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.cell:
        way, dtype, tokens, vocabulary = arguments.cell
        print(json.dumps(run_cell(way, dtype, int(tokens), int(vocabulary), arguments.seed)))
        return
    sizes = itertools.product(arguments.dtypes, arguments.vocabularies, arguments.tokens, ("fused", "full"))
    for dtype, vocabulary, tokens, way in sizes:
        if way == "fused" or FULL_BYTES * tokens * vocabulary < arguments.limit_gb * 1e9:
            show(measure(way, dtype, tokens, vocabulary, runs=arguments.runs, seed=arguments.seed))


def measure(way: str, dtype: str, tokens: int, vocabulary: int, *, runs: int, seed: int) -> dict:
    """Measure one cell, in processes of its own."""
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--seed", str(seed)]
    command += ["--cell", way, dtype, str(tokens), str(vocabulary)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for _ in range(runs):
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
        found.append(json.loads(result.stdout.splitlines()[-1]))
    seconds = [one["cpu_s"] for one in found]
    width = {"bfloat16": 2, "float32": 4}[dtype]
    gradients = width * (tokens + vocabulary) * HIDDEN + (4 * vocabulary * HIDDEN if width == 2 else 0)
    return line(
        "loss part, peak memory",
        [one["peak_mb"] for one in found],
        "MB",
        seed=seed,
        way=way,
        dtype=dtype,
        tokens=tokens,
        vocabulary=vocabulary,
        hidden=HIDDEN,
        gradients_mb=rounded(gradients / 1e6),
        cpu_s=rounded(sorted(seconds)[len(seconds) // 2]),
        cpu_s_spread=[rounded(min(seconds)), rounded(max(seconds))],
    )


def run_cell(way: str, dtype: str, tokens: int, vocabulary: int, seed: int) -> dict[str, float]:
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

    loss = {"fused": fused, "full": full}[way]
    loss(32).backward()
    hidden.grad = weight.grad = None
    memory, started = PeakMemory(), time.process_time()
    loss(tokens).backward()
    return {"cpu_s": time.process_time() - started, "peak_mb": memory.mb()}


if __name__ == "__main__":
    main()
