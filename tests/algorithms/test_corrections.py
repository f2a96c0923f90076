"""Corrections and anchors against scalar loops, and what all corrections promise."""

import itertools
import math

import pytest
import torch

from asyncgrpo.algorithms import corrections
from asyncgrpo.algorithms.corrections import Correction, combine, divergence, importance, interpolated, m2po, opsm, veto
from tests.algorithms import oracle_losses as oracle
from tests.algorithms.batches import VERSION, batch, tensor

BOUNDS = [(None, None), (None, 2.0), (0.5, 5.0), (0.999, 1.001), (0.0, 1.0), (1.5, None)]
CASES = [
    ("importance", {"level": level, "action": action, "low_ratio": low, "high_ratio": high})
    for level, action, (low, high) in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "clip", "mask", "reject"), BOUNDS
    )
    if action != "truncate" or low is None
]
CASES += [
    ("veto", {"low_ratio": 1e-4}),
    ("veto", {"low_ratio": 0.5, "high_ratio": 2.0}),
]
CASES += [("divergence", {"estimator": e, "level": "token", "max_nats": h}) for e in ("k2", "k3") for h in (0.01, 0.2)]
CASES += [
    ("divergence", {"estimator": e, "level": "sequence", "max_nats": h})
    for e, h in itertools.product(("k2", "k3"), (0.1, 1.0))
]
CASES += [("opsm", {"max_nats": d}) for d in (1e-4, 0.5)] + [
    ("m2po", {"max_mean_square": m}) for m in (0.04, 0.2, 1e-9, 1e9)
]


def ours(name: str, b, dtype=torch.float64, junk: float = math.nan, **parameters) -> Correction:
    mask = torch.tensor(b.mask, dtype=torch.bool)
    log_rho, advantages = (tensor(values, dtype).masked_fill(~mask, junk) for values in (b.log_rho, b.advantages))
    if name == "m2po":
        return m2po(log_rho, mask, **parameters)
    if name == "opsm":
        return opsm(log_rho, advantages, mask, b.cu_seqlens, **parameters)
    return getattr(corrections, name)(log_rho, mask, b.cu_seqlens, **parameters)


def expected(name: str, b, **parameters) -> list[oracle.Verdict]:
    if name == "m2po":
        return oracle.m2po(b.log_rho, b.mask, **parameters)
    if name == "opsm":
        return oracle.opsm(b.log_rho, b.advantages, b.mask, b.sequences, **parameters)
    return getattr(oracle, name)(b.log_rho, b.mask, b.sequences, **parameters)


def assert_follows(correction: Correction, verdicts: list[oracle.Verdict], rtol: float) -> None:
    weight, keep = (list(column) for column in zip(*verdicts, strict=True))
    torch.testing.assert_close(correction.weight.double(), tensor(weight), rtol=rtol, atol=0.0)
    assert correction.keep.tolist() == keep


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_weights_and_verdicts_follow_the_formula(name, parameters):
    for seed in range(3):
        b = batch(seed)
        verdicts = expected(name, b, **parameters)
        assert_follows(ours(name, b, **parameters), verdicts, 1e-9)
        assert_follows(ours(name, b, torch.float32, **parameters), verdicts, 2e-5)
    b.mask, b.anchor, b.behaviour, b.advantages, b.sequences = [], [], [], [], [[], []]
    assert ours(name, b, **parameters).keep.shape == (0,), "an empty batch"


def test_nothing_has_a_gradient():
    log_rho = torch.tensor([0.1, -0.2], requires_grad=True)
    mask, cu = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    results = [
        importance(log_rho, mask, cu, level="sequence", action="clip", high_ratio=2.0),
        veto(log_rho, mask, cu, low_ratio=1e-4),
    ]
    results += [opsm(log_rho, log_rho, mask, cu, max_nats=0.1), m2po(log_rho, mask)]
    results += [divergence(log_rho, mask, cu, estimator="k3", level="sequence", max_nats=0.1)]
    assert not any(x.requires_grad for result in [*results, combine(results)] for x in result)
    assert not interpolated(log_rho, log_rho, torch.tensor([1, 2]), 3).requires_grad


def test_extreme_ratios_are_cut_in_the_weight_but_not_in_the_verdict():
    log_rho, mask = torch.tensor([-math.inf, -25.0, 0.0, 25.0, math.inf]), torch.ones(5, dtype=torch.bool)
    weight = importance(log_rho, mask, None, level="token", action="truncate").weight
    torch.testing.assert_close(weight, torch.tensor([-20.0, -20.0, 0.0, 20.0, 20.0]).exp())
    capped = importance(log_rho, mask, None, level="token", action="truncate", high_ratio=2.0).weight
    assert capped[3:].tolist() == [2.0, 2.0]
    keep = importance(log_rho, mask, None, level="token", action="reject", low_ratio=1e-10, high_ratio=1e10).keep
    assert keep.tolist() == [False, False, True, False, False]


def test_a_trained_token_that_is_not_a_number_is_never_kept():
    log_rho, mask, cu = torch.tensor([math.nan, 0.0]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    rejected, masked = (
        importance(log_rho, mask, None, level="token", action=action, high_ratio=2.0) for action in ("reject", "mask")
    )
    assert rejected.keep.tolist() == [False, True] and masked.weight.tolist() == [0.0, 1.0]
    assert veto(log_rho, mask, cu, low_ratio=1e-4).keep.tolist() == [False, False]
    assert m2po(log_rho, mask).keep.tolist() == [False, True]


def test_combined_weights_multiply_and_verdicts_and():
    b = batch()
    cases = [
        CASES[0],
        ("veto", {"low_ratio": 1e-4}),
        ("importance", {"level": "geometric", "action": "reject", "low_ratio": 0.8, "high_ratio": 1.3}),
    ]
    together = combine([ours(name, b, **parameters) for name, parameters in cases])
    assert_follows(together, oracle.combine([expected(name, b, **parameters) for name, parameters in cases]), 1e-9)


def test_the_interpolated_anchor_follows_the_formula():
    b = batch()
    anchor = interpolated(tensor(b.policy), tensor(b.behaviour), torch.tensor(b.versions), VERSION)
    for t in (t for t, trained in enumerate(b.mask) if trained):
        lag = VERSION - b.versions[t]
        share = max(0.0, min((VERSION - 1 - b.versions[t]) / lag, 1.0)) if lag else 0.0
        assert anchor[t].item() == pytest.approx(b.behaviour[t] + share * (b.policy[t] - b.behaviour[t]), abs=1e-12)
