"""Does the learner see the groups that generators make, or only the quick ones? No sockets, no clock.

A group is *settled* when a batch takes it, when it is given up for its age, or when its lease runs out. Each counts once
among the generated, and the trained ones also among the trained, so nothing that merely waits makes a difference, and
where nothing is given up the distance is exactly 0. Over the last groups that were settled it compares, of groups,

    length    mean sampled tokens of an answer; under `mask` the trained ones count without their masked tokens
    reward    mean reward of the scored answers: how difficult the prompt is
    age       lag in optimizer steps when it was settled
    source    `source` of the prompt

Numbers are compared by the two-sample Kolmogorov-Smirnov distance (the largest difference of the two distribution
functions), sources by total variation. Both are at most the share that was given up. A lease that was cancelled or ran
out has no length; it was outrun by all that came, so it counts as longer than any of them, and its reward is not known.

Left out on both sides is what leaves for another reason, which is counted by name: groups without a signal, where
the learner wants to see others than are made, and groups that failed.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncgrpo.wire.messages import Deliver

BIAS_WINDOW = 1024
"""Groups over which distributions are taken."""
LEAST = 64
"""With fewer, chance is all there is to see."""
JUDGED = ("length", "reward", "source")
"""Of which a large distance is warned. That old groups are given up for their age is no news."""


@dataclass(frozen=True)
class Settled:
    """What the monitor keeps of a group."""

    source: str
    age: int
    """Optimizer steps."""
    length: float
    """Tokens of an answer; infinite where the group never came."""
    reward: float
    """NaN where it is not known."""
    trained_length: float | None
    """Tokens of an answer that have a weight; None: the group is not trained."""


class BiasMonitor:
    """Keeps the last settled groups and compares the trained ones with all."""

    def __init__(self, threshold: float) -> None:
        """
        Args:
            threshold: a distance above which `news` speaks.
        """
        self._threshold = threshold
        self._settled: deque[Settled] = deque(maxlen=BIAS_WINDOW)
        self._distances: dict[str, float] | None = None  # None: something was settled since
        self._above: set[str] = set()

    def settle(self, source: str, message: Deliver | None, *, age: int, masked: int | None) -> None:
        """A group's fate is known.

        Args:
            message: the group; None: it never came.
            age: lag, optimizer steps.
            masked: sampled tokens without weight in the step that trains it; None: it is not trained.
        """
        length, reward, trained_length = math.inf, math.nan, None
        if message is not None:
            answers = max(len(message.rollouts), 1)
            rewards = [r.score.value for r in message.rollouts if r.score.value is not None]
            length = sum(r.num_tokens for r in message.rollouts) / answers
            reward = sum(rewards) / len(rewards) if rewards else math.nan
            trained_length = None if masked is None else length - masked / answers
        self._settled.append(Settled(source, age, length, reward, trained_length))
        self._distances = None

    def distances(self) -> dict[str, float]:
        """The distances by name, each from 0 to 1; none before `LEAST` groups are settled."""
        if len(self._settled) < LEAST:
            return {}
        if self._distances is None:
            made = list(self._settled)
            trained = [(group, group.trained_length) for group in made if group.trained_length is not None]
            self._distances = {
                "length": ks_distance([length for _, length in trained], [g.length for g in made]),
                "reward": ks_distance(_known(g.reward for g, _ in trained), _known(g.reward for g in made)),
                "source": total_variation([g.source for g, _ in trained], [g.source for g in made]),
                "age": ks_distance([g.age for g, _ in trained], [g.age for g in made]),
            }
        return self._distances

    def news(self) -> list[str]:
        """A sentence for each distance that has risen above the threshold, once, until it was below again."""
        distances = self.distances()
        above = {name for name in JUDGED if distances.get(name, 0.0) > self._threshold}
        new, self._above = above - self._above, above
        given_up = sum(g.trained_length is None for g in self._settled)
        return [
            f"trained groups differ from generated ones in {name}: distance {distances[name]:.2f}, "
            f"{given_up} of the last {len(self._settled)} were given up for being slow or old"
            for name in sorted(new)
        ]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def ks_distance(some: Sequence[float], others: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov: the largest difference of the empirical distribution functions, 0 to 1.

    Values may be infinite. Nothing differs from nothing by 0, and from something by 1.
    """
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = np.sort(np.asarray(some, np.float64)), np.sort(np.asarray(others, np.float64))
    grid = np.concatenate([a, b])
    below_a = np.searchsorted(a, grid, side="right") / len(a)
    below_b = np.searchsorted(b, grid, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def total_variation(some: Sequence[Hashable], others: Sequence[Hashable]) -> float:
    """Half the sum of the differences of the shares of each name, 0 to 1. Nothing against something is 1."""
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = Counter(some), Counter(others)
    return sum(abs(a[name] / len(some) - b[name] / len(others)) for name in a | b) / 2
