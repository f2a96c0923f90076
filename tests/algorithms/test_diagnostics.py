import math

import pytest
import torch

from asyncgrpo.algorithms.diagnostics import (
    effective_sample_share,
    gap_sums,
    kept_sums,
    lag_report,
    lag_sums,
    mean_sums,
    merge,
    outside_sums,
    ratio_report,
    ratio_sums,
    share_report,
    share_sums,
    shares,
    shares_within,
    update_report,
    update_sums,
)
from asyncgrpo.algorithms.surrogates import ppo_clip
from tests.algorithms.batches import VERSION, batch, tensor

MASK = torch.tensor([False, True, True, True, False, True, True])
LOG_RHO = torch.tensor([math.nan, 0.1, -0.4, 1.2, math.inf, 0.0, 24.0])


def numbers(sums) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def all_sums(x: torch.Tensor, versions: torch.Tensor, mask: torch.Tensor, cu: torch.Tensor):
    """Every diagnostic. That those of a split add up: `tests/learner/test_objective.py`."""
    sums = mean_sums(mask, x=x) | gap_sums(x, x, mask) | ratio_sums(x, mask, cu)
    sums |= outside_sums("x", x, mask, cu, level="geometric", low_ratio=0.5, high_ratio=2.0)
    sums |= kept_sums("y", mask, mask, cu) | update_sums(x, x, mask, mask, dual_ratio=3.0)
    return sums | lag_sums(versions, VERSION, mask, cu) | share_sums(x, versions, VERSION, mask, cu)


def test_sums_wait_for_no_device():
    """Tensors on `meta` have no numbers that could be read back."""
    x = torch.zeros(8, device="meta")
    sums = all_sums(x, x.long(), x.bool(), torch.zeros(4, dtype=torch.int32, device="meta"))
    assert all(total.is_meta for total in merge([sums, sums]).values())


def test_values_follow_a_loop_over_the_trained_tokens():
    sums = mean_sums(MASK, entropy=LOG_RHO.square(), clipped=LOG_RHO > 0)
    sums |= gap_sums(LOG_RHO, torch.zeros_like(LOG_RHO), MASK)
    x = [v for v, m in zip(LOG_RHO.tolist(), MASK.tolist(), strict=True) if m]
    expected = {"tokens": 5, "entropy": sum(v * v for v in x), "clipped": 3}
    expected |= {"gap": sum(map(abs, x)), "gap_tokens": 5, "gap_max": 24.0}
    assert numbers(sums) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("x", [-700.0, -50.0, 50.0, 700.0])
def test_a_large_gap_is_cut_in_the_exponential_alone(x):
    report = ratio_report(numbers(ratio_sums(torch.tensor([x, 0.0]), torch.tensor([True, True]), torch.tensor([0, 2]))))
    assert report["kl_k3"] == pytest.approx((math.exp(max(min(x, 20), -20)) - 1 - x) / 2, rel=1e-12)
    extremes = [math.exp(max(min(y, 20), -20)) for y in sorted((x, 0.0))]
    assert [report["ratio_min"], report["ratio_max"]] == pytest.approx(extremes)
    if x < 0:  # where the exponential is next to nothing, the estimate is the distance itself, as k1
        assert report["kl_k3"] == pytest.approx(report["kl_k1"], rel=0.03)


def test_of_nothing_the_report_is_that_of_agreement():
    b = batch()
    nothing = ratio_report(
        numbers(ratio_sums(tensor(b.log_rho), torch.zeros(len(b.mask), dtype=torch.bool), b.cu_seqlens))
    )
    agreement = ratio_report(numbers(ratio_sums(torch.zeros(len(b.mask)), torch.tensor(b.mask), b.cu_seqlens)))
    assert nothing == agreement and set(agreement.values()) == {0.0, 1.0}


def test_bounds_are_counted_on_each_side_in_tokens_and_sequences():
    log_rho = torch.tensor([0.0, 1.0, 2.0, -3.0, 0.0, math.nan, 0.1])
    mask, cu = torch.tensor([True] * 5 + [False, True]), torch.tensor([0, 1, 5, 6, 7])
    token = outside_sums("x", log_rho, mask, cu, level="token", low_ratio=0.5, high_ratio=2.0)
    assert numbers(token) == {
        "x_tokens": 6, "x_sequences": 3, "x_below": 1, "x_above": 2, "x_sequences_below": 1, "x_sequences_above": 1
    }  # fmt: skip
    assert shares("x", numbers(token)) == pytest.approx(
        {"x_below": 1 / 6, "x_above": 2 / 6, "x_sequences_below": 1 / 3, "x_sequences_above": 1 / 3}
    )
    sequence = outside_sums("y", log_rho, mask, cu, level="sequence", high_ratio=1.05)
    assert shares("y", numbers(sequence)) == pytest.approx(
        {"y_below": 0.0, "y_above": 1 / 6, "y_sequences_below": 0.0, "y_sequences_above": 1 / 3}
    )


def test_clipped_tokens_are_told_apart_by_side():
    log_ratio = torch.tensor([1.0, -1.0, 2.0, 0.1, math.nan])
    advantages, mask = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]), torch.tensor([True] * 4 + [False])
    clipped = ppo_clip(log_ratio, torch.zeros(5), advantages, mask, None, dual_ratio=3.0).clipped
    report = update_report(numbers(update_sums(log_ratio, advantages, clipped, mask, dual_ratio=3.0)))
    shares = {f"update_clipped_{side}": 0.25 for side in ("high", "low", "dual")}
    assert report == pytest.approx({"update_ratio_min": math.exp(-1), "update_ratio_max": math.exp(2)} | shares)


def test_lag_is_reported_by_token_and_by_oldest_token():
    versions = torch.tensor([-1, 5, 7, 6, -1, 6, 6, 3])
    mask = torch.tensor([False, True, True, True, False, True, True, False])
    report = lag_report(numbers(lag_sums(versions, 7, mask, torch.tensor([0, 4, 4, 7, 8]))))
    assert report == {"lag_mean": 1.0, "lag_max": 2.0, "lag_mixed_share": 0.5}


def test_the_sample_share_is_told_by_the_lag_of_a_completion_s_oldest_token():
    versions = torch.tensor([9, 9, 9, 6, 9, 0, 8])  # four completions of lag 0, 3, 9 and 1, at version 9
    log_rho = torch.tensor([0.0, math.log(3), 0.0, math.log(3), math.nan, math.log(7), 0.0])
    mask, cu = torch.tensor([True, True, True, True, False, True, True]), torch.tensor([0, 2, 5, 6, 7])
    sums = numbers(share_sums(log_rho, versions, 9, mask, cu) | lag_sums(versions, 9, mask, cu))
    assert share_report(sums) == pytest.approx({
        "ess_lag_0": 16 / (2 * 10), "ess_lag_1": 1.0, "ess_lag_4": 16 / (2 * 10), "ess_lag_16": 1.0
    })  # fmt: skip
    assert shares_within(sums) == pytest.approx({
        0: 16 / (2 * 10), 1: 25 / (3 * 11), 4: 81 / (5 * 21), 9: 256 / (6 * 70)
    })  # fmt: skip
    assert shares_within(sums)[9] == pytest.approx(effective_sample_share(16, 70, 6)), "that of the whole step"
