"""How much a batch has left to teach."""

import pytest
import torch

from asyncgrpo.algorithms.advantages import grpo, signal_of


def share(*groups: list[float], success: float = 1.0) -> float:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return signal_of(rewards, ids, grpo(rewards, ids) != 0, success=success).share


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 0.25),
        ([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], 1.0),  # hopeless groups have nothing to lose
        ([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], 0.5),
        ([[0.63, 1.0], [0.99, 0.99]], 1.0),
        ([[0.0, 0.0], [0.0, 0.0]], 1.0),
        ([[1.0, 1.0], [0.0, 0.0]], 0.0),
    ],
)
def test_the_share_is_of_groups_that_are_solved_or_have_a_signal(groups: list[list[float]], expected: float):
    assert share(*groups) == expected


def test_what_is_right_is_a_setting():
    groups = [[-3.0, 0.0], [0.0, 0.0], [-3.0, -3.0]]
    assert [share(*groups, success=success) for success in (1.0, 0.0, -3.0)] == [1.0, 1 / 2, 1 / 3]


def test_a_batch_of_nothing_is_not_solved():
    nothing = torch.zeros(0)
    signal = signal_of(nothing.double(), nothing.long(), nothing.bool(), success=1.0)
    assert (signal.share, signal.not_hopeless) == (1.0, 1.0)
