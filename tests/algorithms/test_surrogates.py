"""Every surrogate against scalar loops, and what all of them promise."""

import math
from typing import get_args

import pytest
import torch

from asyncgrpo.algorithms.advantages import ESTIMATORS
from asyncgrpo.algorithms.surrogates import (
    SEQUENCE_LEVEL,
    SURROGATES,
    TRAINS_ZERO_ADVANTAGE,
    WITH_RATIO,
    KlKind,
    Surrogate,
    dppo_kl,
    kl_penalty,
)
from asyncgrpo.config import schema
from tests.algorithms import oracle_losses as oracle
from tests.algorithms.batches import batch, tensor

VARIANTS = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.4, "clip_high": 0.4, "dual_ratio": 3.0}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.5}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("dppo_tv", {}),
    ("dppo_tv", {"low_prob": 0.05, "high_prob": 0.15, "max_ratio": 3.0}),
    ("dppo_kl", {}),
    ("dppo_kl", {"low_nats": 0.01, "high_nats": 0.2, "max_ratio": 1e4}),
    ("sapo", {}),
    ("sapo", {"tau_positive": 0.5, "tau_negative": 3.0}),
    ("gmpo", {}),
    ("gmpo", {"clip_low_nats": 0.1, "clip_high_nats": 0.7}),
    ("vespo", {}),
    ("vespo", {"k_positive": 1.0, "lam_positive": 1.0, "k_negative": 0.5, "lam_negative": 0.1}),
    ("dro", {"beta": 0.1}),
    ("topr", {}),
    ("reinforce", {}),
]
ONE_OF_EACH = list({name: (name, parameters) for name, parameters in VARIANTS}.values())


def call(name: str, b, dtype=torch.float64, **parameters) -> Surrogate:
    """Positions that are not trained hold no numbers."""
    mask = torch.tensor(b.mask)
    policy, anchor, advantages = (tensor(values, dtype) for values in (b.policy, b.anchor, b.advantages))
    return SURROGATES[name](policy.masked_fill(~mask, math.nan), anchor, advantages, mask, b.cu_seqlens, **parameters)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return ((ours.double() - expected).abs() / expected.abs().clamp(min=1.0)).max().item()


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_gradient_value_and_clip_follow_the_formula(name, parameters):
    for b in map(batch, range(4)):
        points = oracle.surrogate(name, b.policy, b.anchor, b.advantages, b.mask, b.sequences, **parameters)
        coefficient, value, clipped = (list(column) for column in zip(*points, strict=True))
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):  # x itself is only good to 24 * 2^-24
            ours = call(name, b, dtype, **parameters)
            assert ours.objective_gradient.dtype == ours.value.dtype == dtype
            assert relative_error(ours.objective_gradient, tensor(coefficient)) < tolerance
            assert relative_error(ours.value, tensor(value)) < tolerance
            assert ours.clipped.tolist() == clipped


@pytest.mark.parametrize(("name", "parameters"), ONE_OF_EACH)
def test_all_take_bfloat16_and_empty_batches_give_no_gradient_and_wait_for_no_device(name, parameters):
    policy = torch.tensor([-3.015625, -0.125]).bfloat16().requires_grad_()
    anchor, advantages = torch.tensor([-3.0, -0.12]).bfloat16(), torch.tensor([1.0, -1.0]).bfloat16()
    mask, cu = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1, 2])
    ours = SURROGATES[name](policy, anchor, advantages, mask, cu, **parameters)
    upcast = SURROGATES[name](policy.float(), anchor.float(), advantages.float(), mask, cu, **parameters)
    assert ours.objective_gradient.dtype == torch.float32 and not any(field.requires_grad for field in ours)
    assert ours.objective_gradient.equal(upcast.objective_gradient) and ours.value.equal(upcast.value)
    elsewhere = (x.to("meta") for x in (policy, anchor, advantages, mask, cu))
    assert all(field.is_meta for field in SURROGATES[name](*elsewhere, **parameters)), "no number is read back"
    nothing = torch.zeros(0)
    for num_sequences in (0, 3):
        cu = torch.zeros(num_sequences + 1, dtype=torch.int32)
        ours = SURROGATES[name](nothing, nothing, nothing, nothing.bool(), cu, **parameters)
        assert [field.shape for field in ours] == [(0,)] * 3


@pytest.mark.parametrize(("name", "parameters"), ONE_OF_EACH)
def test_sequence_level_is_exactly_what_depends_on_other_tokens(name, parameters):
    """The others need no sequences."""

    def first_coefficient(second: float) -> float:
        policy, anchor = tensor([-1.1, second, -0.3]), tensor([-1.0, -2.0, -0.25])
        mask, cu = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]) if name in SEQUENCE_LEVEL else None
        ours = SURROGATES[name](policy, anchor, tensor([1.0, 1.0, 1.0]), mask, cu, **parameters)
        return ours.objective_gradient[0].item()

    assert (first_coefficient(-2.1) != first_coefficient(-2.2)) == (name in SEQUENCE_LEVEL)


@pytest.mark.parametrize(
    ("policy", "anchor", "advantage", "clipped"),
    [
        (0.0, 0.0, 1.0, False),  # both certain: no distance
        (0.0, -1e-9, 1.0, False),
        (0.0, -0.5, 1.0, True),  # certain now, not before: infinitely far
        (0.0, -0.5, -1.0, False),  # but on the way back
        (-0.5, 0.0, -1.0, True),
        (-0.5, 0.0, 0.0, False),  # no gradient to lose
        (-40.0, -41.0, -1.0, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_coin_kl_is_exact_where_a_probability_is_one(policy, anchor, advantage, clipped, dtype):
    inputs = (torch.tensor([v], dtype=dtype) for v in (policy, anchor, advantage))
    ours = dppo_kl(*inputs, torch.tensor([True]), None)
    assert ours.clipped.item() is clipped and ours.objective_gradient.isfinite().all()


def test_the_configuration_reads_the_names_that_are_registered():
    """`algorithm.loss` and `.advantage` are made from the text of modules, so that the command line starts without torch."""
    assert list(SURROGATES) == schema._functions("surrogates.py", "surrogate")
    assert list(ESTIMATORS) == [*schema._functions("advantages.py", "estimator"), "remax"]


def test_what_is_told_of_a_surrogate_is_true():
    b = batch()
    b.advantages = [0.0] * len(b.advantages)
    for name, parameters in ONE_OF_EACH:
        moved = call(name, b, **parameters).objective_gradient.any().item()
        assert moved == (name in TRAINS_ZERO_ADVANTAGE), name
    for name, parameters in ONE_OF_EACH:
        b, further = batch(), batch()
        further.anchor = [anchor - 0.05 for anchor in b.anchor]
        ours, theirs = (call(name, x, **parameters).objective_gradient for x in (b, further))
        assert ours.equal(theirs) == (name not in WITH_RATIO and name != "dro"), name


# -- penalties ---------------------------------------------------------------------------------------------------------

KINDS = list(get_args(KlKind))
POLICY = [-45.0, -13.0, -6.0, -5.0, -3.1, -3.0, -2.9, -1.0, -0.1]
REFERENCE, LOG_RATIO = -3.0, 0.4


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


@pytest.mark.parametrize("kind", KINDS)
def test_elementwise_without_gradient_upcast_and_without_waiting_for_the_device(kind):
    policy = torch.tensor([-1.0, math.nan, -0.7]).bfloat16().requires_grad_()
    reference, log_ratio = torch.tensor([-1.1, 0.0, -0.6]).bfloat16(), torch.zeros(3)
    ours = kl_penalty(policy, reference, kind=kind, log_ratio=log_ratio)
    assert not ours.value.requires_grad and not ours.loss_gradient.requires_grad
    exact = kl_penalty(policy[::2].double(), reference[::2].double(), kind=kind, log_ratio=log_ratio[::2].double())
    torch.testing.assert_close(ours.value[::2].double(), exact.value, rtol=1e-4, atol=1e-9)
    assert ours.loss_gradient.dtype == torch.float32
    elsewhere = (x.to("meta") for x in (policy, reference))
    assert all(x.is_meta for x in kl_penalty(*elsewhere, kind=kind, log_ratio=log_ratio.to("meta")))
