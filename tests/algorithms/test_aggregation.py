"""Weights of tokens in the loss of a step."""

import math

import pytest
import torch

from asyncgrpo.algorithms.aggregation import (
    sequence_of_token,
    sum_by_sequence,
    token_weights,
    trained_sum,
    weighted_sum,
)
from tests.algorithms import oracle_losses as oracle
from tests.algorithms.batches import GROUPS, batch, tensor

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"]
MAX_LENGTH = 16


def of_sequences(b, mode: str, chosen: list[int]) -> torch.Tensor:
    """Weights of some of the batch's sequences, the counts being the whole batch's."""
    tokens = [t for i in chosen for t in b.sequences[i]]
    mask = torch.tensor([b.mask[t] for t in tokens], dtype=torch.bool)
    in_group = [
        sum(b.mask[t] for s, g in zip(b.sequences, GROUPS, strict=True) if g == group for t in s) for group in GROUPS
    ]
    return token_weights(
        mask,
        torch.tensor([0, *(len(b.sequences[i]) for i in chosen)]).cumsum(0),
        mode=mode,
        num_tokens=sum(b.mask),
        num_sequences=len(b.sequences),
        max_length=MAX_LENGTH,
        tokens_in_group=torch.tensor([in_group[i] for i in chosen]),
        num_groups=len(set(GROUPS)),
    )


@pytest.mark.parametrize("mode", MODES)
def test_weights_follow_the_formula_in_any_micro_batch(mode):
    for b in map(batch, range(3)):
        expected = oracle.token_weights(mode, b.mask, b.sequences, GROUPS, num_sequences=8, max_length=MAX_LENGTH)
        whole = of_sequences(b, mode, list(range(8)))
        assert whole.dtype == torch.float64
        torch.testing.assert_close(whole, tensor(expected), rtol=1e-15, atol=0.0)
    for parts in ([[7, 2], [1], [5, 0, 3], [6, 4]], [[i] for i in range(8)]):
        for chosen in parts:
            tokens = [t for i in chosen for t in b.sequences[i]]
            assert of_sequences(b, mode, chosen).equal(whole[tokens])


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_weighs_nothing(mode):
    nothing, none = torch.zeros(3, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    counts = {"num_tokens": 0, "num_sequences": 0, "max_length": 0, "tokens_in_group": none, "num_groups": 0}
    assert token_weights(nothing, torch.tensor([0, 3]), mode=mode, **counts).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_modes_that_weigh_all_tokens_alike_need_no_sequences(mode):
    weights = token_weights(torch.tensor([True, False]), None, mode=mode, num_tokens=4, num_sequences=4, max_length=1)
    assert weights.tolist() == [0.25, 0.0]


def test_a_weighted_sum_ignores_what_weighs_nothing():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 1.0, 0.0]))
    total.backward()
    assert total.item() == 3.5 and values.grad.tolist() == [0.5, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_find_their_sequence_past_empty_ones(dtype):
    cu = torch.tensor([0, 0, 2, 2, 2, 3, 3], dtype=dtype)
    assert sequence_of_token(cu, 3).tolist() == [1, 1, 4]
    assert sum_by_sequence(torch.tensor([1.0, 2.0, 4.0]), cu).tolist() == [0, 3, 0, 0, 4, 0]
    assert sequence_of_token(torch.zeros(1, dtype=dtype), 0).tolist() == []
    with_nan = sum_by_sequence(torch.tensor([1.0, math.nan, 4.0]), cu)
    torch.testing.assert_close(with_nan, torch.tensor([0, math.nan, 0, 0, 4.0, 0]), equal_nan=True)


def test_a_trained_sum_is_in_float64_and_past_nan():
    values = torch.tensor([1e8, math.nan, 1.0, math.inf], dtype=torch.float32)
    total = trained_sum(values, torch.tensor([True, False, True, False]), torch.tensor([0, 4]))
    assert total.dtype == torch.float64 and total.tolist() == [100000001.0]
