"""KL estimators: values and derivatives."""

import math
from typing import get_args

import pytest
import torch

from asyncgrpo.algorithms.penalties import KlKind, kl_penalty
from tests.algorithms import oracle_losses as oracle

KINDS = list(get_args(KlKind))
POLICY = [-45.0, -13.0, -6.0, -5.0, -3.1, -3.0, -2.9, -1.0, -0.1]
REFERENCE, LOG_RATIO = -3.0, 0.4


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_value_and_coefficient_follow_the_formula(kind, dtype, tolerance):
    policy = torch.tensor(POLICY, dtype=dtype)
    ours = kl_penalty(
        policy, torch.full_like(policy, REFERENCE), kind=kind, log_ratio=torch.full_like(policy, LOG_RATIO)
    )
    assert ours.value.dtype == ours.loss_gradient.dtype == dtype
    for i, logp in enumerate(policy.tolist()):
        value, coefficient = oracle.kl(kind, logp, REFERENCE, torch.tensor(LOG_RATIO, dtype=dtype).item())
        assert ours.value[i].item() == pytest.approx(value, rel=tolerance, abs=tolerance)
        assert ours.loss_gradient[i].item() == pytest.approx(coefficient, rel=tolerance, abs=tolerance)


def test_low_var_kl_is_cut_where_it_explodes():
    ours = kl_penalty(torch.tensor([-40.0, -5.0]), torch.tensor([-1.0, -1.0]), kind="low_var_kl")
    assert ours.value.tolist() == [10.0, 10.0] and ours.loss_gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_ratio", [-700.0, -50.0, 50.0, 700.0])
def test_a_penalty_is_bounded_under_any_gap(kind, log_ratio):
    """In float32, where e^89 is infinite: at most e^20 by each of the two ratios in the value, by one in the gradient."""
    policy, reference = torch.tensor([-700.5, -50.5, -0.5, -0.5]), torch.tensor([-0.5, -0.5, -50.5, -700.5])
    ours = kl_penalty(policy, reference, kind=kind, log_ratio=torch.full_like(policy, log_ratio))
    assert ours.value.isfinite().all() and (ours.value.abs() <= 2 * math.exp(40)).all()
    assert (ours.loss_gradient.abs() <= math.exp(20)).all()
    if kind == "k3_reweighted":
        assert (ours.loss_gradient == 0).all(), "beyond the cut the ratio is a constant of the broken token"


def full_kl(z: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(softmax(z) ‖ reference) over the vocabulary, and its derivative by z."""
    log_p = z.log_softmax(0)
    value = (log_p.exp() * (log_p - reference)).sum()
    return value.detach(), torch.autograd.grad(value, z)[0]


@pytest.mark.parametrize("kind", ["k2", "k1+", "abs+", "k3+", "low_var_kl+"])
def test_averaged_over_the_policy_it_has_the_gradient_of_the_true_kl(kind):
    z = logits(0, 6).requires_grad_()
    reference = logits(1, 6).log_softmax(0)
    logp = z.log_softmax(0)
    coefficient = kl_penalty(logp, reference, kind=kind).loss_gradient
    (estimated,) = torch.autograd.grad((logp.exp().detach() * coefficient * logp).sum(), z)
    torch.testing.assert_close(estimated, full_kl(z, reference)[1])


def test_reweighted_k3_has_the_gradient_of_the_true_kl_under_another_sampler():
    z = logits(0, 6).requires_grad_()
    reference, sampler, logp = logits(1, 6).log_softmax(0), logits(2, 6).log_softmax(0), z.log_softmax(0)
    ours = kl_penalty(logp, reference, kind="k3_reweighted", log_ratio=logp - sampler)
    (estimated,) = torch.autograd.grad((sampler.exp() * ours.loss_gradient * logp).sum(), z)
    torch.testing.assert_close(estimated, full_kl(z, reference)[1])
    torch.testing.assert_close((sampler.exp() * ours.value).sum(), full_kl(z, reference)[0])


def test_reweighting_needs_a_ratio():
    with pytest.raises(AssertionError, match="log_ratio"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind="k3_reweighted")


@pytest.mark.parametrize("kind", KINDS)
def test_elementwise_without_gradient_and_upcast(kind):
    policy = torch.tensor([-1.0, math.nan, -0.7]).bfloat16().requires_grad_()
    reference, log_ratio = torch.tensor([-1.1, 0.0, -0.6]).bfloat16(), torch.zeros(3)
    ours = kl_penalty(policy, reference, kind=kind, log_ratio=log_ratio)
    assert not ours.value.requires_grad and not ours.loss_gradient.requires_grad
    exact = kl_penalty(policy[::2].double(), reference[::2].double(), kind=kind, log_ratio=log_ratio[::2].double())
    torch.testing.assert_close(ours.value[::2].double(), exact.value, rtol=1e-4, atol=1e-9)
    assert ours.loss_gradient.dtype == torch.float32
