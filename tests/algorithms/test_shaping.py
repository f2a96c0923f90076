import math
import random

import pytest
import torch

from asyncgrpo.algorithms.aggregation import sum_by_sequence
from asyncgrpo.algorithms.shaping import apply_truncation, overlong_penalty, reward_with_kl

LENGTHS = [0, 3, 0, 0, 1, 4, 0]
CU_SEQLENS = torch.tensor([0, 0, 3, 3, 3, 4, 8, 8], dtype=torch.int32)


def test_sums_keep_a_nan_in_its_sequence_and_give_zero_for_an_empty_one():
    values = torch.tensor([1.0, 2.0, 3.0, math.nan, 1.0, 1.0, 1.0, 0.5])
    sums = sum_by_sequence(values, CU_SEQLENS)
    torch.testing.assert_close(sums, torch.tensor([0, 6.0, 0, 0, math.nan, 3.5, 0]), equal_nan=True)


def test_a_sum_hands_its_gradient_to_every_token():
    values = torch.ones(8, requires_grad=True)
    (sum_by_sequence(values, CU_SEQLENS) * torch.arange(7.0)).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 4, 5, 5, 5, 5]


def test_a_long_completion_loses_linearly_within_the_buffer_and_no_more_than_the_factor():
    lengths = torch.tensor([0, 1, 79, 80, 81, 90, 99, 100, 101, 5000])
    expected = [0, 0, 0, 0, -0.1, -1.0, -1.9, -2.0, -2.0, -2.0]
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)
    torch.testing.assert_close(penalty, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_kl_in_the_reward_is_summed_over_trained_tokens(dtype, tolerance):
    rng = random.Random(0)
    kl = [rng.gauss(0, 1) for _ in range(8)]
    mask = [True, False, True, True, False, False, True, True]
    kl[1] = math.nan  # an observation token
    rewards = [0.1, 1.0, math.nan, 0.0, -1.0, 0.5, 2.0]
    ours = reward_with_kl(
        torch.tensor(rewards, dtype=dtype), torch.tensor(kl, dtype=dtype), torch.tensor(mask), CU_SEQLENS, coef=0.3
    )
    expected, token = [], 0
    for reward, length in zip(rewards, LENGTHS, strict=True):
        trained = [kl[t] for t in range(token, token + length) if mask[t]]
        expected.append(reward - 0.3 * sum(trained))
        token += length
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=1e-7, equal_nan=True)


TRUNCATED = torch.tensor([False, True, True, False])
REWARDS = torch.tensor([1.0, 0.5, math.nan, 0.0])


@pytest.mark.parametrize(
    "rule,rewards,is_trained",
    [
        ("keep", [1.0, 0.5, math.nan, 0.0], [True] * 4),
        ("mask", [1.0, 0.5, math.nan, 0.0], [True, False, False, True]),
        ("zero", [1.0, 0.0, math.nan, 0.0], [True] * 4),
    ],
)
def test_truncated_completions_follow_the_rule(rule, rewards, is_trained):
    before = REWARDS.clone()
    ours = apply_truncation(REWARDS, TRUNCATED, rule=rule)
    torch.testing.assert_close(ours.rewards, torch.tensor(rewards, dtype=torch.float64), equal_nan=True)
    assert ours.is_trained.tolist() == is_trained
    torch.testing.assert_close(REWARDS, before, equal_nan=True)
