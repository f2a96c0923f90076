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
        ours = gae(rewards, values, mask, cu_seqlens, gamma=gamma, lam=lam)
        expected = []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            expected += oracle.gae(rewards[a:b].tolist(), values[a:b].tolist(), mask[a:b].tolist(), gamma, lam)
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours.advantages, expected, rtol=tolerance, atol=1e-12)
        returns = torch.where(mask, expected + values, 0.0)
        torch.testing.assert_close(ours.returns, returns, rtol=tolerance, atol=1e-12)


def test_what_observation_tokens_hold_does_not_leak():
    rewards, values, mask, cu_seqlens = packed(2, torch.float64)
    clean = gae(rewards, values, mask, cu_seqlens, gamma=0.9, lam=0.8)
    bad_rewards, bad_values = rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf)
    dirty = gae(bad_rewards, bad_values, mask, cu_seqlens, gamma=0.9, lam=0.8)
    assert dirty.advantages.equal(clean.advantages) and dirty.returns.equal(clean.returns)
    assert (dirty.advantages[~mask] == 0).all() and (dirty.returns[~mask] == 0).all()


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


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_value_loss_and_its_coefficient_are_autograds(clip, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    values, returns, old_values = torch.randn(3, 400, dtype=dtype, generator=generator)
    ours = value_loss(values.requires_grad_(), returns, old_values, clip=clip)
    v, target, old = (x.detach().double() for x in (values, returns, old_values))
    v.requires_grad_()
    expected = 0.5 * (v - target) ** 2
    if clip is not None:
        held = old + (v - old).clamp(-clip, clip)
        expected = torch.maximum(expected, 0.5 * (held - target) ** 2)
    assert 0 < (ours.loss_gradient == 0).sum() < 400 or clip is None
    expected.sum().backward()
    torch.testing.assert_close(ours.value, expected.detach(), rtol=tolerance, atol=1e-12)
    torch.testing.assert_close(ours.loss_gradient, v.grad, rtol=tolerance, atol=1e-12)
    assert not ours.value.requires_grad and not ours.loss_gradient.requires_grad
    unmoved = value_loss(values, returns, values.detach(), clip=0.0)
    assert unmoved.loss_gradient.equal(value_loss(values, returns, old_values, clip=None).loss_gradient)
