"""Seconds and peak memory of a block on a card or on the CPU, and what the largest products reach there."""

import statistics
import time

import torch

from benchmarks.measuring import PeakMemory, rounded


class Stopwatch:
    """Seconds and peak memory of each block: of the clock and the card, or of the process where the CPU computes."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.unit = "s" if self.is_cuda else "CPU s"
        self.seconds: list[float] = []
        self._peaks: list[float] = []

    def peak_gib(self) -> float:
        """The largest but for the first: all that was allocated on the card, or what a block added to the process."""
        return rounded(max(self._peaks[1:]) / 2**30)

    def __enter__(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._memory = PeakMemory()
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(self._now() - self._started)
        self._peaks.append(torch.cuda.max_memory_allocated() if self.is_cuda else 1e6 * self._memory.mb())

    def _now(self) -> float:
        return time.perf_counter() if self.is_cuda else time.process_time()


def matmul_tflops(device: str) -> float:
    """Teraflops of a large bfloat16 product of random matrices, median of five."""
    size, repeats = (8192, 10) if device == "cuda" else (256, 2)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    clock = Stopwatch(device)
    for _ in range(6):
        with clock:
            for _ in range(repeats):
                torch.mm(a, b)
    return rounded(2 * size**3 * repeats / statistics.median(clock.seconds[1:]) / 1e12)
