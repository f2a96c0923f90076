"""Corrections against scalar loops, and what all promise. Several at once, and anchors: `tests/learner/test_objective.py`."""

import itertools
import math

import pytest
import torch

from asyncgrpo.algorithms import corrections
from asyncgrpo.algorithms.corrections import Correction, combine, divergence, importance, interpolated, m2po, opsm, veto
from tests.algorithms import oracle_losses as oracle
from tests.algorithms.batches import batch, tensor

BOUNDS = [(None, None), (None, 2.0), (0.5, 5.0), (0.999, 1.001), (0.0, 1.0), (1.5, None)]
CASES = [
    ("importance", {"level": level, "action": action, "low_ratio": low, "high_ratio": high})
    for level, action, (low, high) in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "clip", "mask", "reject"), BOUNDS
    )
    if action != "truncate" or low is None
]
CASES += [("veto", {"low_ratio": 1e-4}), ("veto", {"low_ratio": 0.5, "high_ratio": 2.0})]
CASES += [
    ("divergence", {"estimator": estimator, "level": level, "max_nats": nats})
    for estimator in ("k2", "k3")
    for level, nats in (("token", 0.01), ("token", 0.2), ("sequence", 0.1), ("sequence", 1.0))
]
CASES += [("opsm", {"max_nats": nats}) for nats in (1e-4, 0.5)]
CASES += [("m2po", {"max_mean_square": m}) for m in (0.04, 0.2, 1e-9, 1e9)]


def ours(name: str, b, dtype=torch.float64, junk: float = math.nan, **parameters) -> Correction:
    mask = torch.tensor(b.mask, dtype=torch.bool)
    log_rho, advantages = (tensor(values, dtype).masked_fill(~mask, junk) for values in (b.log_rho, b.advantages))
    if name == "m2po":
        return m2po(log_rho, mask, **parameters)
    if name == "opsm":
        return opsm(log_rho, advantages, mask, b.cu_seqlens, **parameters)
    return getattr(corrections, name)(log_rho, mask, b.cu_seqlens, **parameters)


def expected(name: str, b, **parameters) -> list[oracle.Verdict]:
    return oracle.correct(name, b.log_rho, b.advantages, b.mask, b.sequences, **parameters)


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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_has_a_gradient_and_nothing_waits_for_the_device(device):
    """Tensors on `meta` have no numbers that could be read back."""
    log_rho, mask = torch.tensor([0.1, -0.2], requires_grad=True).to(device), torch.ones(2, dtype=torch.bool).to(device)
    cu, versions = torch.tensor([0, 2], device=device), torch.tensor([1, 2], device=device)
    results = [veto(log_rho, mask, cu, low_ratio=1e-4), opsm(log_rho, log_rho, mask, cu, max_nats=0.1)]
    results += [m2po(log_rho, mask), divergence(log_rho, mask, cu, estimator="k3", level="sequence", max_nats=0.1)]
    for level, action in itertools.product(("token", "sequence", "geometric"), ("truncate", "clip", "mask", "reject")):
        results.append(importance(log_rho, mask, cu, level=level, action=action, high_ratio=2.0))
    anchors = [interpolated(log_rho, log_rho, versions, version) for version in (3, versions[0])]
    for x in itertools.chain(*results, combine(results), anchors):
        assert not x.requires_grad and x.device.type == device


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
