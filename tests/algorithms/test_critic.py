import itertools
import math
import random

import pytest
import torch

from asyncgrpo.algorithms.critic import gae, value_loss, whiten
from tests.algorithms import oracle_advantages as oracle

LENGTHS = [7, 0, 1, 12, 1, 33, 0, 5, 0]
"""Sequences of many lengths: empty ones in front of others and at the end, and single tokens."""


def packed(seed, dtype):
    """Tokens with observation gaps: at the start, inside, at the end, a whole sequence of them."""
    rng = random.Random(seed)
    mask = [rng.random() < 0.6 for _ in range(sum(LENGTHS))]
    mask[0], mask[7], mask[-5:] = False, True, [False] * 5
    rewards, values = (torch.tensor([rng.gauss(0, 1) for _ in mask], dtype=dtype) for _ in range(2))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    return rewards, values, torch.tensor(mask), cu_seqlens


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_gae_is_the_recursion_of_each_sequence(gamma, lam, dtype, tolerance):
    for seed in range(8):
        rewards, values, mask, cu_seqlens = packed(seed, dtype)
        junk = rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf)
        ours = gae(*junk, mask, cu_seqlens, gamma=gamma, lam=lam)
        expected = []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            expected += oracle.gae(rewards[a:b].tolist(), values[a:b].tolist(), mask[a:b].tolist(), gamma, lam)
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours.advantages, expected, rtol=tolerance, atol=1e-12)
        returns = torch.where(mask, expected + values, 0.0)
        torch.testing.assert_close(ours.returns, returns, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]])
def test_no_token_gives_no_advantage(cu_seqlens):
    nothing = torch.zeros(0)
    result = gae(nothing, nothing, nothing.bool(), torch.tensor(cu_seqlens), gamma=1.0, lam=1.0)
    assert result.advantages.shape == result.returns.shape == (0,)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_whitening_is_over_the_mask(dtype, tolerance):
    _, values, mask, _ = packed(3, dtype)
    expected = torch.tensor(oracle.whiten(values.tolist(), mask.tolist()), dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), expected, rtol=tolerance, atol=1e-12)
    assert whiten(values.masked_fill(~mask, math.nan), mask).equal(whiten(values, mask))


def test_a_value_that_moved_far_counts_as_one_that_moved_less_where_that_is_worse():
    """The third one did not: 0.7 + (0.1 - 0.7) is less than 0.1 by rounding alone."""
    values, old, returns = torch.tensor([[3.0, 3.0, 0.1], [0.0, 0.0, 0.7], [6.0, 0.5, 1.0]], dtype=torch.float64)
    ours = value_loss(values.requires_grad_(), returns, old, clip=1.0)
    assert ours.value.tolist() == pytest.approx([12.5, 3.125, 0.405]) and not ours.value.requires_grad
    assert ours.loss_gradient.tolist() == pytest.approx([0.0, 2.5, -0.9]) and not ours.loss_gradient.requires_grad
    free = value_loss(values, returns, old, clip=None)
    assert free.value.tolist() == pytest.approx([4.5, 3.125, 0.405])
    assert free.loss_gradient.tolist() == pytest.approx([-3.0, 2.5, -0.9])
