"""Multithreaded work on the bytes of a publication, on machines with spare cores.

Copies, xxHash and NumPy release the GIL while they work, so threads run in parallel.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

from asyncgrpo.cores import cores

MOST = 8
CORES_EACH = 8
"""Cores per thread: a machine with GPUs has about so many per GPU, and its other processes work at the same time."""
SHARE_BYTES = 2**26
"""Bytes that a thread takes at once."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@cache
def num_threads() -> int:
    return max(1, min(MOST, cores() // CORES_EACH))


def spread(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """Apply `work` to every piece. Yield the results in the order of the pieces, and propagate exceptions.

    Closing the iterator waits for the pieces in progress.

    Args:
        pieces: consumed lazily, only a few ahead of the results.
    """
    if num_threads() == 1:
        yield from map(work, pieces)
        return
    under_way: deque[Future[Result]] = deque()
    try:
        for piece in pieces:
            if len(under_way) > num_threads():
                yield under_way.popleft().result()
            under_way.append(_pool().submit(work, piece))
        while under_way:
            yield under_way.popleft().result()
    finally:
        wait(under_way)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="weights-bytes")
