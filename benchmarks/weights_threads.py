"""Work on the bytes of a publication by several threads, beside one. One JSON line for each kind of work.

python -m benchmarks.weights_threads --threads 2
"""

import argparse
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import digest as hashing
from asyncgrpo.weights.delta import Delta, Span, State, apply, encode
from asyncgrpo.weights.digest import box_digest, digest_pieces, spread
from benchmarks.cells import SEED
from benchmarks.measuring import line, show

CHANGED = 0.015
"""Share of the elements that change from one version to the next."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="MiB of weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = arguments.mb * 2**20
    for what, work in kinds_of_work(size).items():
        seconds = [(timed(work, 1), timed(work, arguments.threads)) for _ in range(arguments.rounds + 1)]
        times = [one / several for one, several in seconds[1:]]
        sizes = {"threads": arguments.threads, "mb": arguments.mb}
        show(line(f"{what} by threads", times, "times as fast as one", seed=SEED, **sizes))


def kinds_of_work(size: int) -> dict[str, Callable[[], object]]:
    random = np.random.default_rng(SEED)
    new = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
    base, copy = new.clone(), torch.empty_like(new)
    base.view(torch.int16)[torch.from_numpy(random.random(size // 2) < CHANGED)] ^= 1
    spans, before = [Span(0, size, 2, 0)], State(PolicyVersion(1, 0), "0" * 16)
    delta = Delta(before, State(PolicyVersion(1, 1), "1" * 16), size, encode(new, base, spans))
    pieces = [slice(start, start + size // 16) for start in range(0, size, size // 16)]
    matrix = new.view(torch.int16).view(-1, 512)
    rows = [slice(piece.start // 1024, piece.stop // 1024) for piece in pieces]
    return {
        "copy": lambda: list(spread(lambda at: np.copyto(copy[at].numpy(), new[at].numpy()), pieces)),
        "digest": lambda: digest_pieces(new, ((at.start, at.stop) for at in pieces)),
        "compare": lambda: encode(new, base, spans),
        "apply": lambda: apply(delta, base, before),
        "boxes": lambda: list(spread(lambda at: box_digest(matrix[at], "w", (1, 512), (0, 0)), rows)),
    }


def timed(work: Callable[[], object], threads: int) -> float:
    """Return the seconds of `work` by so many threads."""
    with mock.patch.object(hashing, "num_threads", lambda: threads):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
