"""Which groups count as solved and which as hopeless: by their own rewards, whatever else is in the batch."""

import math

import pytest

from asyncgrpo.learner.packing import Shaping, StepBatch, pack
from tests.learner.helpers import make_group

LONGEST, FULL = 8, Shaping(longest=8, overlong_buffer=4, overlong_factor=2.0)
SHORT, LONG = 3, LONGEST
FEW = math.sqrt(2 / 48)
"""Factor of the learning rate where 2 of 48 groups have a signal and the others are solved."""


def step(
    others: float, *mixed: float, shaping: Shaping = FULL, long: int = 0, lengths: int = SHORT, **options
) -> StepBatch:
    """46 groups of one reward, one group of 1 and 0, and one of the rewards `mixed`, of which `long` are cut at the end."""
    rewards = [[others] * 4] * 46 + [[1.0, 0.0, 0.0, 1.0], list(mixed)]
    groups = []
    for number, of_group in enumerate(rewards):
        sizes = [LONG if number == 47 and index < long else lengths for index in range(4)]
        groups.append(make_group(number, of_group, [range(size) for size in sizes]))
    return pack(groups, None, rank=0, world=1, tokens_per_microbatch=4096, shaping=shaping, **options)


CASES = {
    "wrong": (lambda: step(0.0, 0, 1, 0, 1), 1.0, 2 / 48),
    "wrong, one of -1e6": (lambda: step(0.0, -1e6, 1, 0, 1), 1.0, 2 / 48),
    "wrong, one full overlong penalty": (lambda: step(0.0, 0, 1, 0, 1, long=1), 1.0, 2 / 48),
    "wrong, all of one group cut": (lambda: step(0.0, 0, 1, 0, 1, long=4), 1.0, 2 / 48),
    "wrong at 0.1": (lambda: step(0.1, 0, 1, 0, 1), 1.0, 2 / 48),
    "right": (lambda: step(1.0, 0, 1, 0, 1), FEW, 1.0),
    "right, one of 1e6": (lambda: step(1.0, 0, 1e6, 0, 1), FEW, 1.0),
    "right, one full overlong penalty": (lambda: step(1.0, 0, 1, 0, 1, long=1), FEW, 1.0),
    "right, and all are cut": (lambda: step(1.0, 0, 1, 0, 1, lengths=LONG), FEW, 1.0),
    "right, and cut completions count 0": (lambda: step(1.0, 0, 1, 0, 1, shaping=Shaping("zero")), FEW, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_one_completion_does_not_decide_what_46_groups_are(case):
    make, lr_factor, entropy_factor = CASES[case]
    batch = make()
    assert min(1.0, math.sqrt(batch.signal_share)) == pytest.approx(lr_factor)
    assert batch.bonus_share == pytest.approx(entropy_factor)
