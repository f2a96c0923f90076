"""What n completions to each of some prompts say of a model: pass@k, maj@k and how far both, and a mean, can be trusted.

A completion is right or not. pass@k is the chance that one of k is right; maj@k the chance that what most of k vote for,
their final answer, is right. Both are means over all subsets of k of the n completions, so they are unbiased for any k up
to n.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959964
"""The normal distribution has 95 % of its mass within so many standard deviations."""


class Estimate(NamedTuple):
    """A number with its 95 % interval; None where one prompt says nothing of the others."""

    value: float
    low: float | None
    high: float | None


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... up to `n`."""
    return [2**power for power in range(n.bit_length())]


def pass_at(k: int, is_right: Sequence[bool]) -> float:
    """The share of the subsets of k completions in which at least one is right: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), in whole numbers until the last division.
    """
    n, wrong = len(is_right), len(is_right) - sum(is_right)
    return 1 - math.comb(wrong, k) / math.comb(n, k)


def majority_at(ks: Sequence[int], votes: Sequence[str], is_right: Sequence[bool]) -> dict[int, float]:
    """How often what most of k completions vote for is right, over all subsets of k of the n; for each k.

    Where several have the most votes, each of them counts with its share. A vote that is right in some completions only
    (their reward looks at more than it) is right by that share.
    """
    counts, right = Counter(votes), Counter(vote for vote, good in zip(votes, is_right, strict=True) if good)
    if len(right) == 0 or right == counts:
        return dict.fromkeys(ks, float(bool(right)))
    n = len(votes)
    sums = np.sum([_won_with(most, counts, right) for most in range(1, max(counts.values()) + 1)], axis=0)
    return {k: float(sums[k]) / math.comb(n, k) for k in ks}


def _won_with(most: int, counts: Mapping[str, int], right: Mapping[str, int]) -> np.ndarray:
    """[n + 1]: over the subsets of each size whose leaders have `most` votes each, the sum of how right these are.

    What fewer than `most` completions vote for cannot lead: any subset of these will do. The others are taken one after
    the other, each with fewer than `most` votes, or with `most`, when one leader more shares the win.
    """
    n = sum(counts.values())
    large = {vote: count for vote, count in counts.items() if count >= most}
    small = n - sum(large.values())
    # [leaders, size of the subset]: how many subsets there are, and the sum of how right their leaders are
    ways, good = np.zeros((2, min(len(large), n // most) + 1, n + 1))
    ways[0, 0] = 1
    for vote, count in large.items():
        share = right.get(vote, 0) / count
        fewer = [math.comb(count, chosen) for chosen in range(most)]
        lead = math.comb(count, most)
        led, led_good = _later(ways, most)[:-1] * lead, _later(good, most)[:-1] * lead
        ways, good = _times(ways, fewer), _times(good, fewer)
        ways[1:] += led
        good[1:] += led_good + share * led
    shared = good[1:] / np.arange(1, len(good))[:, None]
    return _times(shared, [math.comb(small, chosen) for chosen in range(small + 1)]).sum(axis=0)


def _later(table: np.ndarray, by: int) -> np.ndarray:
    """Every subset larger by `by`."""
    moved = np.zeros_like(table)
    moved[:, by:] = table[:, : table.shape[1] - by]
    return moved


def _times(table: np.ndarray, ways: Sequence[int]) -> np.ndarray:
    """Every subset together with j others, which can be chosen in `ways[j]` ways."""
    return np.sum(
        [_later(table, chosen) * count for chosen, count in enumerate(ways) if chosen < table.shape[1]], axis=0
    )


def share_of(values: Sequence[float]) -> Estimate:
    """The mean of values between 0 and 1, one a prompt, with Wilson's interval for as many trials as there are prompts.

    Completions of one prompt are alike, so prompts are what is counted. Unlike a bootstrap the interval does not shrink
    to nothing where all prompts agree; for values between 0 and 1 it is a little too wide, never too narrow.
    """
    n, mean = len(values), sum(values) / len(values)
    middle = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z95**2 / (4 * n**2))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of values of any size, one a prompt, with the interval of the central limit theorem."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return Estimate(mean, None, None)
    error = Z95 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - error, mean + error)
