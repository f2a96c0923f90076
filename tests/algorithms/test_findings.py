"""Faults that were found in systems of the field, each as a test that it would fail.

Numbered as in the survey of their code; 1 and 3, which are about advantages, are tested there.
"""

import math

import pytest
import torch

from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import importance
from asyncgrpo.algorithms.diagnostics import outside_sums, ratio_sums
from asyncgrpo.algorithms.surrogates import cispo, dppo_kl, dppo_tv, gmpo, reinforce

YES = torch.tensor([True])


def one(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("low", "high"), [(0.99, 1.001), (0.6, 1.6)])
def test_2_bounds_are_on_the_ratio_and_not_on_its_reciprocal(level, low, high):
    def keeps(rho: float) -> bool:
        cu = torch.tensor([0, 1])
        correction = importance(
            one(math.log(rho)), YES, cu, level=level, action="reject", low_ratio=low, high_ratio=high
        )
        return correction.keep.item()

    inside_only_as_ratio, inside_only_as_reciprocal = (low + 1 / high) / 2, (high + 1 / low) / 2
    if low > 1 / high:
        inside_only_as_ratio, inside_only_as_reciprocal = inside_only_as_reciprocal, inside_only_as_ratio
    assert keeps(inside_only_as_ratio) and not keeps(inside_only_as_reciprocal)
    assert keeps(low * 1.0001) and keeps(high * 0.9999) and not keeps(low * 0.9999) and not keeps(high * 1.0001)


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


@pytest.mark.parametrize("surrogate", [dppo_tv, dppo_kl])
@pytest.mark.parametrize(("max_ratio", "expected"), [(3.0, 3.0), (20.0, 8.0), (None, 8.0)])
def test_6_the_cap_of_dppo_is_the_one_that_was_asked_for(surrogate, max_ratio, expected):
    """Not the constant of another loss, found under the same key. A rising bad token: inside, however far."""
    ours = surrogate(one(math.log(0.8)), one(math.log(0.1)), one(-1.0), YES, None, max_ratio=max_ratio)
    assert ours.objective_gradient.item() == pytest.approx(-expected) and not ours.clipped.item()


@pytest.mark.parametrize("surrogate", [dppo_tv, dppo_kl])
def test_7_dppo_has_no_cap_by_default(surrogate):
    ours = surrogate(one(math.log(1e-3)), one(math.log(1e-8)), one(1.0), YES, None)
    assert ours.objective_gradient.item() == pytest.approx(1e5)


def test_8_the_mean_over_a_sequence_is_divided_by_its_length_exactly():
    lengths = [1, 3, 7, 10, 49]
    mask, cu = torch.ones(70, dtype=torch.bool), torch.tensor([0, *lengths]).cumsum(0)
    weights = token_weights(mask, cu, mode="seq-mean-token-mean", num_tokens=70, num_sequences=5)
    assert weights.tolist() == [1 / (n * 5) for n in lengths for _ in range(n)]
    assert weights[0].item() != 1 / ((1 + 1e-8) * 5)


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
