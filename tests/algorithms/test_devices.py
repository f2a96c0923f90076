"""No function reads a number back from the device: all of them run on tensors that have a shape and no numbers."""

import itertools
from typing import get_args

import pytest
import torch

from asyncgrpo.algorithms import diagnostics
from asyncgrpo.algorithms.aggregation import Aggregation, token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import combine, divergence, importance, interpolated, m2po, opsm, veto
from asyncgrpo.algorithms.surrogates import SURROGATES, KlKind, kl_penalty

X = torch.zeros(8, device="meta")
MASK = torch.zeros(8, dtype=torch.bool, device="meta")
CU = torch.zeros(4, dtype=torch.int32, device="meta")
IDS = torch.zeros(8, dtype=torch.int64, device="meta")


def assert_on_device(results) -> None:
    assert all(x.is_meta for x in results)


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_wait_for_nothing(name):
    parameters = {"dro": {"beta": 0.1}, "ppo_clip": {"dual_ratio": 3.0}, "dppo_tv": {"max_ratio": 3.0}}.get(name, {})
    assert_on_device(SURROGATES[name](X, X, X, MASK, CU, **parameters))


def test_corrections_wait_for_nothing():
    found = [veto(X, MASK, CU, low_ratio=1e-4), opsm(X, X, MASK, CU, max_nats=0.1), m2po(X, MASK)]
    for level, action in itertools.product(("token", "sequence", "geometric"), ("truncate", "clip", "mask", "reject")):
        found.append(importance(X, MASK, CU, level=level, action=action, high_ratio=2.0))
    found.append(divergence(X, MASK, CU, estimator="k3", level="sequence", max_nats=0.1))
    assert_on_device(combine(found))
    assert_on_device([interpolated(X, X, IDS, 3), interpolated(X, X, IDS, IDS[0])])


def test_weights_and_penalties_wait_for_nothing():
    counts = {"num_tokens": 8, "num_sequences": 3, "max_length": 4, "tokens_in_group": IDS[:3], "num_groups": 2}
    for mode in get_args(Aggregation):
        weights = token_weights(MASK, CU, mode=mode, **counts)
        assert_on_device([weights, weighted_sum(X, weights)])
    for kind in get_args(KlKind):
        assert_on_device(kl_penalty(X, X, kind=kind, log_ratio=X))


def test_diagnostics_wait_for_nothing():
    sums = diagnostics.mean_sums(MASK, x=X)
    sums |= diagnostics.gap_sums(X, X, MASK) | diagnostics.ratio_sums(X, MASK, CU)
    sums |= diagnostics.outside_sums("x", X, MASK, CU, level="geometric", low_ratio=0.5, high_ratio=2.0)
    sums |= diagnostics.kept_sums("y", MASK, MASK, CU) | diagnostics.update_sums(X, X, MASK, MASK, dual_ratio=3.0)
    sums |= diagnostics.lag_sums(IDS, 3, MASK, CU) | diagnostics.share_sums(X, IDS, 3, MASK, CU)
    assert_on_device(diagnostics.merge([sums, sums]).values())
