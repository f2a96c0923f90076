"""Work on the bytes of a publication by several threads, on machines with cores to spare.

Copies, xxHash and NumPy let the interpreter go while they work, so threads share it as processes would.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

from asyncgrpo.cores import cores

MOST = 8
CORES_EACH = 8
"""A machine with GPUs has about so many cores for each, and its other processes do the same at the same time."""
SHARE_BYTES = 2**26
"""What a thread takes at once."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@cache
def num_threads() -> int:
    return max(1, min(MOST, cores() // CORES_EACH))


def spread(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """Do `work` with every piece. Yields what it returns, in the order of the pieces, and raises what it raises.

    Whoever stops to take results waits for the pieces that are under way.

    Args:
        pieces: taken one by one, not far ahead of the results: they may be made on the way.
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
