"""One awkward batch for all tests of losses: as plain lists for the oracle, as tensors for the library.

It has an empty sequence, one without trained tokens, a one-token sequence, observation gaps, several versions in one
sequence, log-ratios of ±6 and ±24, and NaN and infinities wherever nothing is trained.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = [6, 0, 1, 3, 9, 2, 5, 8]
UNTRAINED = 3
"""The sequence without trained tokens."""
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]
VERSION = 7


@dataclass
class Batch:
    sequences: list[list[int]]
    """Of the tokens' indices."""
    mask: list[bool]
    policy: list[float]
    anchor: list[float]
    behaviour: list[float]
    reference: list[float]
    advantages: list[float]
    versions: list[int]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *map(len, self.sequences)]).cumsum(0).to(torch.int32)

    @property
    def log_rho(self) -> list[float]:
        return [a - b for a, b in zip(self.anchor, self.behaviour, strict=True)]

    def trained(self, values: list[float]) -> list[float]:
        return [value for value, trained in zip(values, self.mask, strict=True) if trained]


def tensor(values: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def batch(seed: int = 0, *, spread: float = 0.4) -> Batch:
    """Log-ratios have the standard deviation `spread`, but for the planted ones."""
    rng = random.Random(seed)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    sequences = [list(range(start, start + n)) for start, n in zip(starts, LENGTHS, strict=True)]
    num_tokens = sum(LENGTHS)
    mask = [rng.random() < 0.8 for _ in range(num_tokens)]
    for tokens in sequences:
        if len(tokens) > 1:
            mask[tokens[0]] = False  # the prompt
            mask[tokens[-1]] = True
    mask[sequences[2][0]] = True
    for t in sequences[UNTRAINED]:
        mask[t] = False

    trained = [t for t in range(num_tokens) if mask[t]]
    planted = dict(zip(rng.sample([t for t in trained if t not in sequences[2]], 4), [6, -6, 24, -24], strict=True))
    update = [planted.get(t, rng.gauss(0, spread)) for t in range(num_tokens)]
    drift = [rng.gauss(0, spread) for _ in range(num_tokens)]
    drift[trained[1]], drift[trained[-2]] = 24.0, -6.0

    policy, anchor, behaviour, reference = ([0.0] * num_tokens for _ in range(4))
    for t in range(num_tokens):
        highest = -rng.uniform(0.01, 2.0)  # the largest of the three
        policy[t] = highest - max(0.0, -update[t], drift[t] - update[t])
        anchor[t] = policy[t] - update[t]
        behaviour[t] = anchor[t] - drift[t]
        reference[t] = -rng.uniform(0.01, 4.0)
    advantages, versions = [0.0] * num_tokens, [-1] * num_tokens
    for tokens in sequences:
        advantage = rng.choice([-1, 1]) * rng.uniform(0.2, 2.0)
        for t in tokens:
            advantages[t] = advantage
            versions[t] = VERSION - rng.randrange(4)
    for t in range(num_tokens):
        if not mask[t]:
            advantages[t] = rng.choice([math.nan, math.inf, 0.0])
            anchor[t], behaviour[t] = (rng.choice([math.nan, math.inf, -math.inf, 0.0]) for _ in range(2))
            reference[t], versions[t] = math.nan, -1
    return Batch(sequences, mask, policy, anchor, behaviour, reference, advantages, versions)
