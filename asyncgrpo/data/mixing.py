"""The order of prompts of several sources, of which each has its share.

An epoch issues as many prompts as all sources have together. Each source has the same number of places in every epoch, by
its weight, and they are spread evenly over it: any stretch of the order, also one batch, has each source by its share.
Each source goes round by itself: all of its prompts once, in its own order, then all of them again. Where a source is
in its round when an epoch ends, there the next one goes on.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

Round = Callable[[int, int, int], Indices]
"""`(source, number of the round, size of the source)` gives the order of this round: [size] indices within the source."""


class Mixture:
    """Which prompt comes when, as the module's text says. A pure function of sizes, weights and the orders of rounds."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """
        Args:
            sizes: prompts of each source, at least one each; they follow each other in the list of all prompts.
            weights: of each source, above 0. Only their ratios count.
        """
        self._sizes, self.places = tuple(sizes), places(sum(sizes), weights)
        self.begins = tuple(accumulate(sizes, initial=0))[:-1]
        """Where the prompts of each source begin."""

    @property
    def longest_round(self) -> int:
        """Places, of all sources, in which each source has gone round once."""
        return max(-(-sum(self._sizes) * size // count) for size, count in zip(self._sizes, self.places, strict=True))

    def order(self, epoch: int, round_order: Round) -> Indices:
        """[sum of sizes] indices into the list of all prompts, in the order of `epoch`."""
        source_at = _spread(self.places)
        found = np.empty(len(source_at), np.int64)
        for source, (begin, size, count) in enumerate(zip(self.begins, self._sizes, self.places, strict=True)):
            first, offset = divmod(epoch * count, size)
            rounds = range(first, first + -(-(offset + count) // size))
            issued = np.concatenate([round_order(source, number, size) for number in rounds])
            found[source_at == source] = begin + issued[offset : offset + count]
        return found


def places(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """How many of `total` places each weight has: its share, rounded so that they add up, and at least one."""
    whole = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / whole for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while (missing := total - sum(counts)) != 0:
        behind = [(share - count, -i) for i, (share, count) in enumerate(zip(exact, counts, strict=True))]
        if missing > 0:
            counts[-max(behind)[1]] += 1
        else:
            counts[-min(one for one in behind if counts[-one[1]] > 1)[1]] -= 1
    return tuple(counts)


def _spread(counts: Sequence[int]) -> Indices:
    """[sum of counts] the source at each place: those of one source stand at equal distances."""
    at = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(at, kind="stable")]
