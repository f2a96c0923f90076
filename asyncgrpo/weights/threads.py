"""Work on the bytes of a publication by several threads, on machines with cores to spare.

Copies, xxHash and NumPy's sums let the interpreter go while they work, so threads share them as processes would.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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


def spread(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> list[Result]:
    """Do `work` with every piece. Returns what it returned, in the order of the pieces, or raises what it raised.

    Args:
        pieces: taken one by one, not far ahead of the work: they may be made on the way.
    """
    if num_threads() == 1:
        return [work(piece) for piece in pieces]
    done: list[Result] = []
    under_way: deque[Future[Result]] = deque()
    for piece in pieces:
        if len(under_way) > num_threads():
            done.append(under_way.popleft().result())
        under_way.append(_pool().submit(work, piece))
    return done + [one.result() for one in under_way]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="weights-bytes")
