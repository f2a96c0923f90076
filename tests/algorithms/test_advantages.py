import math

import pytest
import torch

from asyncgrpo.algorithms.advantages import group_advantages, groups_with_signal
from tests.algorithms import oracle

REWARDS = [1.0, 0.0, 0.5, 0.1, 0.1, 0.1, math.nan, 0.3, 0.9, 2.5, math.nan, math.nan, -1.0, 7.0]
GROUPS = [4, 9, 4, 7, 7, 7, 9, 9, 9, 2, 3, 3, 4, 11]
"""Unequal and interleaved groups: a constant one, one with a missing reward, singletons, one without any reward."""


@pytest.mark.parametrize("scale", ["group_std", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_advantages_follow_the_formula(scale, dtype):
    rewards = torch.tensor(REWARDS, dtype=dtype)
    ours = group_advantages(rewards, torch.tensor(GROUPS), scale=scale)
    assert ours.dtype == torch.float64
    expected = oracle.advantages(rewards.double().tolist(), GROUPS, scale=scale)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_groups_of_every_size_are_exactly_zero(dtype):
    rewards, groups = [], []
    for size in range(2, 65):
        for cents in range(-100, 101):
            rewards += [cents / 100] * size
            groups += [size * 1000 + cents] * size
    advantages = group_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(groups))
    assert (advantages == 0).all()


def test_fifteen_times_098_is_exactly_zero():
    assert (group_advantages(torch.full((15,), 0.98), torch.zeros(15, dtype=torch.int64)) == 0).all()


def test_a_tiny_difference_of_two_rewards_is_a_signal():
    almost = 0.98 + 1e-12
    advantages = group_advantages(torch.tensor([0.98] * 7 + [almost], dtype=torch.float64), torch.zeros(8).long())
    assert advantages[-1] > 0 and (advantages[:-1] < 0).all()


def test_an_answer_without_reward_changes_nothing_for_the_others():
    with_missing = group_advantages(torch.tensor([1.0, math.nan, 0.0, 0.0]), torch.zeros(4).long())
    without = group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3).long())
    assert with_missing[1] == 0
    assert with_missing[[0, 2, 3]].equal(without)


@pytest.mark.parametrize("rewards", [[0.7], [0.7, math.nan], [math.nan, math.nan]])
def test_fewer_than_two_rewards_give_zero(rewards):
    assert (group_advantages(torch.tensor(rewards), torch.zeros(len(rewards)).long()) == 0).all()


def test_order_of_answers_and_names_of_groups_do_not_matter():
    rewards, groups = torch.tensor(REWARDS), torch.tensor(GROUPS)
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
    expected = group_advantages(rewards, groups)[order]
    torch.testing.assert_close(group_advantages(rewards[order], 100 - groups[order]), expected, rtol=1e-12, atol=1e-15)


def test_the_advantage_has_no_gradient():
    assert not group_advantages(torch.rand(4, requires_grad=True), torch.zeros(4).long()).requires_grad


def test_signal_is_two_different_rewards():
    signal = groups_with_signal(torch.tensor(REWARDS), torch.tensor(GROUPS))
    assert {g for g, s in zip(GROUPS, signal.tolist(), strict=True) if s} == {4, 9}
