"""Evaluation metrics from n completions per prompt: pass@k, maj@k, means, and their confidence intervals.

A completion is right or wrong. pass@k is the probability that one of k is right, maj@k the probability that the majority of k
final answers is right. Both are means over all subsets of k of the n completions, so they are unbiased for any k up to n.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959964
"""Standard deviations of a two-sided 95 % interval of the normal distribution."""


class Estimate(NamedTuple):
    """A value with its 95 % interval; None if a single prompt gives no interval."""

    value: float
    low: float | None
    high: float | None


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to `n`."""
    return [2**power for power in range(n.bit_length())]


def pass_at(k: int, is_right: Sequence[bool]) -> float:
    """Return the share of subsets of k completions with at least one right: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), in integers until the last division.
    """
    n, wrong = len(is_right), len(is_right) - sum(is_right)
    return 1 - math.comb(wrong, k) / math.comb(n, k)


def majority_at(ks: Sequence[int], votes: Sequence[str], is_right: Sequence[bool]) -> dict[int, float]:
    """Return for each k the share of subsets of k completions whose majority vote is right.

    Tied votes count with equal shares. A vote that is right in only some completions (their reward depends on more than the
    final answer) counts with that share.
    """
    counts, right = Counter(votes), Counter(vote for vote, good in zip(votes, is_right, strict=True) if good)
    if len(right) == 0 or right == counts:
        return dict.fromkeys(ks, float(bool(right)))
    n = len(votes)
    sums = np.sum([_won_with(most, counts, right) for most in range(1, max(counts.values()) + 1)], axis=0)
    return {k: float(sums[k]) / math.comb(n, k) for k in ks}


def _won_with(most: int, counts: Mapping[str, int], right: Mapping[str, int]) -> np.ndarray:
    """Return [n + 1]: the summed correctness of the leaders, over the subsets of each size whose leaders have `most` votes.

    Votes of fewer than `most` completions cannot lead, so any subset of them is allowed. The other votes are added in order,
    each with fewer than `most` completions, or with `most`, when it is one more leader.
    """
    n = sum(counts.values())
    large = {vote: count for vote, count in counts.items() if count >= most}
    small = n - sum(large.values())
    # [leaders, size of the subset]: number of subsets, and summed correctness of their leaders
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
    """Shift a table by subset size."""
    moved = np.zeros_like(table)
    moved[:, by:] = table[:, : table.shape[1] - by]
    return moved


def _times(table: np.ndarray, ways: Sequence[int]) -> np.ndarray:
    """Extend every subset by j others, which can be chosen in `ways[j]` ways."""
    return np.sum(
        [_later(table, chosen) * count for chosen, count in enumerate(ways) if chosen < table.shape[1]], axis=0
    )


def share_of(values: Sequence[float]) -> Estimate:
    """Return the mean of values between 0 and 1, one per prompt, with Wilson's interval over the number of prompts.

    Completions of one prompt are correlated, so trials are prompts. Unlike a bootstrap, the interval does not collapse if all
    prompts agree. For values between 0 and 1 it is slightly too wide, never too narrow.
    """
    n, mean = len(values), sum(values) / len(values)
    middle = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z95**2 / (4 * n**2))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of arbitrary values, one per prompt, with the interval of the central limit theorem."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return Estimate(mean, None, None)
    error = Z95 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - error, mean + error)
