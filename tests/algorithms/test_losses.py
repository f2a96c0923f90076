"""Surrogates, corrections, penalties and weights against scalar loops, values and gradients."""

import math

import pytest
import torch

from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import truncated_importance
from asyncgrpo.algorithms.penalties import entropy, kl_penalty
from asyncgrpo.algorithms.surrogates import ppo_clip
from tests.algorithms import oracle

LOG_RATIOS = [-6.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 1.0, 6.0]
CLIP = {"low": 0.2, "high": 0.28}
KINDS = ["k1", "k2", "low_var_kl"]


@pytest.mark.parametrize("advantage", [1.5, -0.7, 0.0])
def test_ppo_value_and_gradient_follow_the_formula(advantage):
    x = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    surrogate = ppo_clip(x, torch.full_like(x, advantage), **CLIP)
    for i, log_ratio in enumerate(LOG_RATIOS):
        value = lambda z: oracle.ppo_value(z, advantage, **CLIP)  # noqa: E731
        assert surrogate.value[i].item() == pytest.approx(value(log_ratio), rel=1e-12)
        assert (surrogate.coefficient[i] * advantage).item() == pytest.approx(oracle.slope(value, log_ratio), abs=1e-6)


def test_ppo_gradient_is_autograds():
    x = torch.linspace(-2, 2, 41, dtype=torch.float64, requires_grad=True)
    advantages = torch.linspace(-1, 1, 41, dtype=torch.float64).roll(7)
    ratio = x.exp()
    torch.minimum(ratio * advantages, ratio.clip(0.8, 1.28) * advantages).sum().backward()
    torch.testing.assert_close(ppo_clip(x, advantages, **CLIP).coefficient * advantages, x.grad)


def test_on_policy_the_surrogate_is_reinforce():
    surrogate = ppo_clip(torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), **CLIP)
    assert surrogate.coefficient.tolist() == [1.0, 1.0, 1.0] and not surrogate.clipped.any()


def test_a_log_ratio_of_24_gives_no_gradient_and_stays_finite():
    surrogate = ppo_clip(torch.tensor([24.0, -24.0]), torch.tensor([-1.0, 1.0]), **CLIP)
    assert surrogate.coefficient.tolist() == [0.0, 0.0] and surrogate.value.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_importance_is_truncated_and_exact_at_the_ends(dtype):
    log_rho = torch.tensor([-math.inf, -1.0, 0.0, math.log(2.0), 0.8, 500.0, math.inf, math.nan], dtype=dtype)
    expected = torch.tensor([0.0, math.exp(-1.0), 1.0, 2.0, 2.0, 2.0, 2.0, 0.0], dtype=dtype)
    torch.testing.assert_close(truncated_importance(log_rho, cap=2.0), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_value_and_gradient_follow_the_formula(kind):
    policy = torch.tensor([-6.0, -5.0, -3.1, -3.0, -2.9, -1.0, -0.1], dtype=torch.float64)
    reference = torch.full_like(policy, -3.0)
    penalty = kl_penalty(policy, reference, kind=kind)
    for i, x in enumerate(policy.tolist()):
        value = lambda z: oracle.kl_value(z, -3.0, kind=kind)  # noqa: E731
        assert penalty.value[i].item() == pytest.approx(value(x), rel=1e-12, abs=1e-15)
        assert penalty.coefficient[i].item() == pytest.approx(oracle.slope(value, x), abs=1e-6)


def test_low_var_kl_is_cut_where_it_explodes():
    penalty = kl_penalty(torch.tensor([-40.0, -5.0]), torch.tensor([-1.0, -1.0]), kind="low_var_kl")
    assert penalty.value.tolist() == [10.0, 10.0] and penalty.coefficient.tolist() == [0.0, 0.0]


def test_k2_has_the_gradient_of_the_true_kl():
    """Averaged over the policy, its coefficient times the score is the gradient of KL by every logit."""
    logits = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    coefficient = kl_penalty(logp, reference, kind="k2").coefficient
    (estimated,) = torch.autograd.grad((logp.exp().detach() * coefficient * logp).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_entropy_is_the_definition_and_differentiable():
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    p = logits.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    torch.testing.assert_close(entropy(logits), expected)
    ours, theirs = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (entropy(logits), expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_weights_follow_the_formula_and_add_up_over_any_split(mode):
    sequences = [[False, True, True], [True], [False], [False, True, False, True], [True, True]]
    flat = torch.tensor([m for s in sequences for m in s])
    expected = torch.tensor(oracle.token_weight(mode, sequences, max_length=8))
    counts = {"num_tokens": int(flat.sum()), "num_sequences": len(sequences), "max_length": 8}
    parts = []
    for part in (sequences[:2], sequences[2:4], sequences[4:]):
        mask = torch.tensor([m for s in part for m in s])
        cu_seqlens = torch.tensor([0, *map(len, part)]).cumsum(0)
        parts.append(token_weights(mask, cu_seqlens, mode=mode, **counts))
    torch.testing.assert_close(torch.cat(parts), expected)


def test_a_step_without_tokens_weighs_nothing():
    nothing = torch.zeros(3, dtype=torch.bool)
    weights = token_weights(
        nothing, torch.tensor([0, 3]), mode="token-mean", num_tokens=0, num_sequences=0, max_length=4
    )
    assert weights.tolist() == [0, 0, 0]


def test_what_masked_tokens_hold_does_not_leak():
    """NaN and infinity at prompt positions change neither the loss nor the gradient of the others."""
    mask = torch.tensor([False, True, True, False])
    bad = torch.tensor([math.nan, -1.0, -2.0, math.inf])
    weights = token_weights(mask, torch.tensor([0, 4]), mode="token-mean", num_tokens=2, num_sequences=1, max_length=4)

    def loss_and_gradient(behaviour):
        policy = torch.tensor([-0.5, -1.1, -1.7, -0.5], requires_grad=True)
        advantages = torch.tensor([math.nan, 0.5, -0.5, math.nan]).where(behaviour.isfinite(), 0.0)
        coefficient = ppo_clip(policy.detach() - behaviour, advantages, **CLIP).coefficient
        coefficient = coefficient * truncated_importance(policy.detach() - behaviour, cap=2.0) * advantages
        loss = weighted_sum(-coefficient * policy, weights)
        loss.backward()
        return loss.item(), policy.grad[mask].tolist()

    assert loss_and_gradient(bad) == loss_and_gradient(bad.where(mask, 0.0))
    assert math.isfinite(loss_and_gradient(bad)[0])
