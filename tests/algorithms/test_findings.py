"""Faults that were found in systems of the field, each as a test that it would fail.

Numbered as in the survey of their code. The other numbers are tested where the formulas are.
"""

import math

import pytest
import torch

from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import importance
from asyncgrpo.algorithms.diagnostics import outside_sums, ratio_sums
from asyncgrpo.algorithms.surrogates import cispo, gmpo, reinforce

YES = torch.tensor([True])


def one(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


def test_4_denominators_do_not_shrink_when_tokens_are_rejected():
    """75 of 104 tokens kept: the others must not weigh 104/75 more, nor the report lose sight of the rejected."""
    log_rho = torch.cat([torch.zeros(75), torch.full((29,), 3.0)]).double()
    mask, cu = torch.ones(104, dtype=torch.bool), torch.tensor([0, 75, 104])
    policy = torch.full((104,), -1.0, dtype=torch.float64)
    surrogate = reinforce(policy, policy, torch.ones(104), mask, cu)
    correction = importance(log_rho, mask, cu, level="token", action="reject", high_ratio=2.0)
    weights = token_weights(mask, cu, mode="token-mean", num_tokens=104, num_sequences=2)
    loss = weighted_sum(-correction.weight * correction.keep * surrogate.value, weights)
    assert correction.keep.sum() == 75 and mask.all()
    assert loss.item() == pytest.approx(75 / 104)
    assert outside_sums("x", log_rho, mask, cu, level="token", high_ratio=2.0)["x_above"] == 29
    assert ratio_sums(log_rho, mask, cu)["rho_tokens"] == 104


def test_5_gmpo_is_averaged_by_the_aggregation_and_by_counts_of_the_whole_step():
    """Its sequences are neither always averaged alike nor over the micro-batch, and an empty one adds no row."""
    x = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    advantages, mask, cu = torch.tensor([1.0, 1.0, -2.0]), torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 2, 3])
    value = gmpo(x, torch.zeros(3, dtype=torch.float64), advantages, mask, cu).value
    first, second = math.exp(-0.05), -2 * math.exp(0.3)
    counts = {"num_tokens": 30, "num_sequences": 12}

    def total(mode: str) -> float:
        return weighted_sum(value, token_weights(mask, cu, mode=mode, **counts)).item()

    assert total("seq-mean-token-mean") == pytest.approx((first + second) / 12)
    assert total("seq-mean-token-sum") == pytest.approx((2 * first + second) / 12)
    assert total("token-mean") == pytest.approx((2 * first + second) / 30)


@pytest.mark.parametrize(
    ("parameters", "lowest", "highest"),
    [
        ({}, 0.0, 5.0),  # TRL's and ScaleRL's epsilon_high = 5.0
        ({"clip_low": 1.0, "clip_high": 5.0}, 0.0, 6.0),  # NeMo's recipe; and what 5.0 copied from TRL would mean
        ({"clip_low": 10.0, "clip_high": 0.2}, 0.0, 1.2),  # verl's example
        ({"clip_low": 0.1, "clip_high": 0.1}, 0.9, 1.1),  # ROLL's 0.9 to 1.1
    ],
)
def test_9_cispo_bounds_are_distances_from_one(parameters, lowest, highest):
    weights = [
        cispo(one(-0.1 + min(x, 0)), one(-0.1 - max(x, 0)), one(1.0), YES, None, **parameters) for x in (-15.0, 15.0)
    ]
    assert [w.objective_gradient.item() for w in weights] == pytest.approx([lowest, highest], abs=1e-6)
    assert not any(w.clipped.item() for w in weights)
