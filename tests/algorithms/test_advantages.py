import itertools
import math

import pytest
import torch

from asyncgrpo.algorithms.advantages import ESTIMATORS, apply_truncation, reward_with_kl, signal_of
from tests.algorithms import oracle_advantages as oracle

NAMES = sorted(ESTIMATORS)
OF_GROUPS = [name for name in NAMES if name != "remax"]
SEEDS = range(12)


def estimate(name, rewards, groups, lengths, greedy):
    return ESTIMATORS[name](rewards, groups, lengths=lengths, baseline_rewards=greedy)


def tensors(batch, dtype=torch.float64):
    rewards, greedy = (torch.tensor(x, dtype=dtype) for x in (batch.rewards, batch.greedy))
    return rewards, torch.tensor(batch.groups), torch.tensor(batch.lengths), greedy


def alone(rewards, name, dtype=torch.float64, greedy=0.0):
    """Advantages of one group, each completion of three tokens."""
    rewards = torch.tensor(rewards, dtype=dtype)
    same = torch.zeros(len(rewards), dtype=torch.int64)
    return estimate(name, rewards, same, torch.full_like(same, 3), torch.full_like(rewards, greedy))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_every_estimator_follows_its_formula(name, dtype, tolerance):
    for seed in SEEDS:
        batch = oracle.batch(seed)
        rewards, groups, lengths, greedy = tensors(batch, dtype)
        ours = estimate(name, rewards, groups, lengths, greedy)
        expected = oracle.estimate(name, rewards.tolist(), batch.groups, batch.lengths, greedy.tolist())
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_groups_of_every_size_are_exactly_zero(name, dtype):
    """One group with signal is beside them: batch statistics must not lift the others from zero."""
    rewards, groups = [], []
    for size, cents in itertools.product(range(2, 65), range(-100, 101, 3)):
        rewards += [cents / 100] * size
        groups += [size * 1000 + cents] * size
    rewards, groups = torch.tensor([*rewards, 1.0, 0.0, 0.0], dtype=dtype), torch.tensor([*groups, -1, -1, -1])
    lengths = 1 + torch.arange(len(rewards)) % 7
    ours = estimate(name, rewards, groups, lengths, None)
    assert (ours[:-3] == 0).all() and (ours[-3:] != 0).any()


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 0.0], [0.5, 0.5], [1.0, math.nan, 1.0, 0.2]])
def test_pass_at_k_gives_nothing_where_two_share_the_best(rewards):
    assert (alone(rewards, "pass_at_k") == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_and_a_gradient_are_no_trouble(name):
    nothing = torch.zeros(0)
    assert estimate(name, nothing, nothing.long(), nothing.long(), nothing).shape == (0,)
    rewards = torch.rand(4, requires_grad=True)
    groups = torch.zeros(4).long()
    assert not estimate(name, rewards, groups, groups + 2, torch.rand(4, requires_grad=True)).requires_grad
    assert estimate(name, rewards.detach(), groups, groups, rewards.detach()).isfinite().all(), "empty completions"


SCALE_FREE = ("grpo", "lite", "pass_at_k", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e200, 1e300])
def test_huge_rewards_are_compared_like_others(name, size):
    """Their squares overflow; advantages would be 0 without a word, or no numbers."""
    rewards, groups, lengths, greedy = tensors(oracle.batch(0))
    usual = estimate(name, 1e8 * rewards, groups, lengths, 1e8 * greedy)
    huge = estimate(name, size * rewards, groups, lengths, size * greedy)
    assert (usual != 0).any() and huge.isfinite().all()
    scale = 1.0 if name in (*SCALE_FREE, "max_rl") else size / 1e8
    torch.testing.assert_close(huge / scale, usual, rtol=1e-6, atol=1e-9)
    for tiny in (1e-300, 1e-320):
        assert estimate(name, tiny * rewards, groups, lengths, tiny * greedy).isfinite().all()


def test_kl_in_the_reward_is_summed_over_trained_tokens():
    kl, mask = torch.tensor([1.0, math.nan, 3.0, 5.0]), torch.tensor([True, False, True, False])
    ours = reward_with_kl(torch.tensor([0.5, math.nan, 2.0]), kl, mask, torch.tensor([0, 3, 3, 4]), coef=0.25)
    assert ours.dtype == torch.float64 and ours.tolist() == pytest.approx([0.5 - 1.0, math.nan, 2.0], nan_ok=True)


def test_a_missing_reward_of_a_completion_that_was_cut_stays_missing():
    """The rules themselves: `tests/learner/test_batching.py`."""
    rewards, is_trained = apply_truncation(torch.tensor([0.5, math.nan]), torch.tensor([True, True]), rule="zero")
    assert rewards.tolist() == pytest.approx([0.0, math.nan], nan_ok=True) and is_trained.all()


def share(*groups: list[float], success: float = 1.0) -> float:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return signal_of(rewards, ids, ESTIMATORS["grpo"](rewards, ids) != 0, success=success).share


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 0.25),
        ([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], 1.0),  # hopeless groups have nothing to lose
        ([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], 0.5),
        ([[0.63, 1.0], [0.99, 0.99]], 1.0),
        ([[0.0, 0.0], [0.0, 0.0]], 1.0),
        ([[1.0, 1.0], [0.0, 0.0]], 0.0),
    ],
)
def test_the_share_is_of_groups_that_are_solved_or_have_a_signal(groups: list[list[float]], expected: float):
    assert share(*groups) == expected


def test_what_is_right_is_a_setting():
    groups = [[-3.0, 0.0], [0.0, 0.0], [-3.0, -3.0]]
    assert [share(*groups, success=success) for success in (1.0, 0.0, -3.0)] == [1.0, 1 / 2, 1 / 3]


def test_a_batch_of_nothing_is_not_solved():
    nothing = torch.zeros(0)
    signal = signal_of(nothing.double(), nothing.long(), nothing.bool(), success=1.0)
    assert (signal.share, signal.not_hopeless) == (1.0, 1.0)
