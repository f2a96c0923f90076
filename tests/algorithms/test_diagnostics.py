import itertools
import math

import pytest
import torch

from asyncgrpo.algorithms.diagnostics import effective_sample_share, gap_sums, importance_sums, mean_sums, merge

MASK = torch.tensor([False, True, True, True, False, True, True])
LOG_RHO = torch.tensor([math.nan, 0.1, -0.4, 1.2, math.inf, 0.0, 24.0])


def all_sums(rows):
    mask, log_rho = MASK[rows], LOG_RHO[rows]
    sums = mean_sums(mask, entropy=log_rho.square(), clipped=log_rho > 0)
    return sums | importance_sums(log_rho, mask, cap=2.0) | gap_sums(log_rho, torch.zeros_like(log_rho), mask)


@pytest.mark.parametrize("cuts", [[0, 7], [0, 2, 7], [0, 1, 1, 4, 5, 7]])
def test_sums_of_any_split_are_the_sums_of_the_whole(cuts):
    whole = all_sums(slice(0, 7))
    parts = merge(all_sums(slice(a, b)) for a, b in itertools.pairwise(cuts))
    assert parts.keys() == whole.keys()
    for name in whole:
        assert parts[name].item() == pytest.approx(whole[name].item(), rel=1e-12), name


def test_values_follow_a_loop_over_the_trained_tokens():
    sums = {name: value.item() for name, value in all_sums(slice(0, 7)).items()}
    x = [v for v, m in zip(LOG_RHO.tolist(), MASK.tolist(), strict=True) if m]
    rho = [math.exp(min(v, 20.0)) for v in x]
    expected = {
        "tokens": 5,
        "entropy": sum(v * v for v in x),
        "clipped": 3,
        "importance": sum(rho),
        "importance_squares": sum(r * r for r in rho),
        "importance_capped": 2,
        "gap": sum(map(abs, x)),
        "gap_tokens": 5,
        "gap_max": 24.0,
    }
    assert sums == pytest.approx(expected, rel=1e-6)


def test_effective_sample_share_is_one_for_equal_weights_and_small_for_one_giant():
    assert effective_sample_share(4 * 0.5, 4 * 0.25, 4) == 1.0
    assert effective_sample_share(1e6, 1e12, 4) == 0.25
    assert effective_sample_share(0.0, 0.0, 0) == 1.0


def test_no_token_is_a_gap_of_zero():
    sums = gap_sums(torch.tensor([math.nan]), torch.tensor([0.0]), torch.tensor([False]))
    assert {name: value.item() for name, value in sums.items()} == {"gap": 0.0, "gap_tokens": 0.0, "gap_max": 0.0}
