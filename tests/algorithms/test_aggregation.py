"""Weights of tokens in the loss of a step. That they follow the formulas: `tests/learner/test_objective.py`."""

import math
from typing import get_args

import pytest
import torch

from asyncgrpo.algorithms.aggregation import Aggregation, token_weights, trained_sum, weighted_sum


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_a_step_without_tokens_weighs_nothing_and_waits_for_no_device(mode):
    """Tensors on `meta` have no numbers that could be read back."""
    for device in ("cpu", "meta"):
        nothing, none, cu = (x.to(device) for x in (torch.zeros(3).bool(), torch.zeros(1).long(), torch.tensor([0, 3])))
        counts = {"num_tokens": 0, "num_sequences": 0, "max_length": 0, "tokens_in_group": none, "num_groups": 0}
        weights = token_weights(nothing, cu, mode=mode, **counts)
        assert weights.device.type == weighted_sum(weights, weights).device.type == device
        assert device == "meta" or weights.tolist() == [0, 0, 0]


def test_a_weighted_sum_ignores_what_weighs_nothing():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 1.0, 0.0]))
    total.backward()
    assert total.item() == 3.5 and values.grad.tolist() == [0.5, 0.0, 1.0, 0.0]


def test_a_trained_sum_is_in_float64_and_past_nan():
    values = torch.tensor([1e8, math.nan, 1.0, math.inf], dtype=torch.float32)
    total = trained_sum(values, torch.tensor([True, False, True, False]), torch.tensor([0, 4]))
    assert total.dtype == torch.float64 and total.tolist() == [100000001.0]
