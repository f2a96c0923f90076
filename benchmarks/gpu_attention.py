"""The learner's attention kernels on the card: error against float64, and time, forward and backward.

    python -m benchmarks.gpu_attention

Each kernel of `asyncgrpo/learner/attention.py` attends in bfloat16 over rows of segments with and without a shared prefix.
The reference is `scaled_dot_product_attention` in float64, segment by segment, over the same bfloat16 numbers. A whole
tensor's error is `|found - exact| / |exact|`. Times are of longer rows; operations count what a query sees, once.
"""

import statistics
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.learner.attention import KERNELS, Family, Segments
from benchmarks.gpu_clock import Stopwatch
from benchmarks.measuring import device_parser, line, rounded, show


class Heads(NamedTuple):
    """The heads of a model."""

    of: str
    queries: int
    keys: int
    width: int


HEADS = [Heads("Qwen3-0.6B", 16, 8, 128), Heads("Qwen3-8B", 32, 8, 128), Heads("Qwen2.5-0.5B", 14, 2, 64)]
TINY_HEADS = [Heads("tiny", 4, 2, 16)]

Row = list[tuple[int, list[int]]]
"""Prompts, each with the lengths of its completions."""
CHECKED: dict[str, Row] = {
    "alone": [(7, []), (1, []), (1024, []), (2048, [])],
    "prefixes": [(256, [1, 700, 31, 512]), (1, [300, 2]), (100, [1500])],
}
TIMED: dict[str, Row] = {
    "16 of 2,048": [(2048, [])] * 16,
    "4 prompts of 256, each 8 of 992": [(256, [992] * 8)] * 4,
    "1 prompt of 16, 4 of 8,188": [(16, [8188] * 4)],
}
TINY: dict[str, Row] = {"tiny": [(5, []), (3, [2, 9])]}
NAMES = ("output", "dQ", "dK", "dV")


def main(argv: list[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    runs = 1 if arguments.tiny else arguments.runs
    for heads in TINY_HEADS if arguments.tiny else HEADS:
        for kernel in ("varlen", "flash_attention_2", "sdpa") if arguments.device == "cuda" else ("cpu", "sdpa"):
            about = {"kernel": kernel, "heads": f"{heads.of}: {heads.queries}/{heads.keys} x {heads.width}"}
            try:
                for name, row in (TINY if arguments.tiny else CHECKED).items():
                    case = Case(row, heads, arguments.device, arguments.seed)
                    show({"what": "attention error", "row": name, **about, **case.errors(kernel)})
                for name, row in (TINY if arguments.tiny else TIMED).items():
                    Case(row, heads, arguments.device, arguments.seed).time(kernel, runs, {"row": name, **about})
            except (ImportError, RuntimeError, TypeError) as error:  # a kernel that is not there, or refuses
                show({"what": "attention failed", **about, "error": " ".join(str(error).split())[:300]})


class Case:
    """One row with random queries, keys, values and a gradient of the output, bfloat16."""

    def __init__(self, row: Row, heads: Heads, device: str, seed: int) -> None:
        self.device, self.scale, self.seed = device, heads.width**-0.5, seed
        self.segments = segments_of(row)
        size = int(self.segments.queries[-1])
        generator = torch.Generator(device).manual_seed(seed)
        counts = (heads.queries, heads.keys, heads.keys, heads.queries)
        self.tensors = [
            torch.randn(size, count, heads.width, generator=generator, device=device, dtype=torch.bfloat16)
            for count in counts
        ]
        self.operations = 4 * heads.queries * heads.width * pairs_of(self.segments)
        self.segments = self.segments.to(torch.device(device))

    def errors(self, kernel: str) -> dict[str, float]:
        """The error of the output and of each gradient."""
        exact = self._results("sdpa", torch.float64)
        found = self._results(kernel, torch.bfloat16)
        errors = [((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)]
        return {name: rounded(error, 3) for name, error in zip(NAMES, errors, strict=True)}

    def time(self, kernel: str, runs: int, about: dict[str, Any]) -> None:
        """Show the seconds of a forward pass, and of a forward and a backward pass."""
        forward, both = Stopwatch(self.device), Stopwatch(self.device)
        for _ in range(runs + 1):
            with forward, torch.no_grad():
                KERNELS[kernel](*self.tensors[:3], self.segments, self.scale)
        for _ in range(runs + 1):
            with both:
                self._results(kernel, torch.bfloat16)
        for what, clock, times in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
            seconds = clock.seconds[1:]
            tflops = rounded(times * self.operations / max(statistics.median(seconds), 1e-9) / 1e12)
            figures = {"tflops": tflops, "peak_gib": clock.peak_gib()}
            show(line(f"attention {what}", seconds, clock.unit, seed=self.seed, **about, **figures))

    def _results(self, kernel: str, dtype: torch.dtype) -> list[Tensor]:
        *leaves, gradient = (x.to(dtype) for x in self.tensors)
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = KERNELS[kernel](*leaves, self.segments, self.scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def segments_of(row: Row) -> Segments:
    """The segments of a row."""
    families, end = [], 0
    for prompt, completions in row:
        prefix = (end, end + prompt)
        families.append(Family((end, end), prefix))
        bounds = [prefix[1]]
        for length in completions:
            bounds.append(bounds[-1] + length)
        if completions:
            families.append(Family(prefix, tuple(bounds)))
        end = bounds[-1]
    return Segments.of(families)


def pairs_of(segments: Segments) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for (first, last), bounds in segments.families:
        for start, end in pairwise(bounds):
            size = end - start
            total += size * (last - first) + size * (size + 1) // 2
    return total


if __name__ == "__main__":
    main()
