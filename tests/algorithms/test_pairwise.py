import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from asyncgrpo.algorithms.pairwise import pairs, pairwise
from tests.algorithms import oracle_advantages as oracle

SEEDS = range(12)


def chosen(rewards, groups, kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    winner, loser = pairs(torch.tensor(rewards), torch.tensor(groups), kind=kind, generator=generator)
    return list(zip(winner.tolist(), loser.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["best_worst", "random"])
def test_a_group_with_signal_gives_one_pair_and_no_other_gives_any(kind):
    for seed in SEEDS:
        batch = oracle.batch(seed)
        possible = oracle.pairs(batch.rewards, batch.groups)
        ours = chosen(batch.rewards, batch.groups, kind, seed)
        assert set(ours) <= possible
        per_group = Counter(batch.groups[winner] for winner, _ in ours)
        assert per_group == Counter({batch.groups[winner] for winner, _ in possible})
        everything = chosen(batch.rewards, batch.groups, "all")
        assert len(everything) == len(possible) and set(everything) == possible
        for winner, loser in ours if kind == "best_worst" else ():
            members = [i for i, g in enumerate(batch.groups) if g == batch.groups[winner]]
            scored = [i for i in members if not math.isnan(batch.rewards[i])]
            assert winner == max(scored, key=lambda i: (batch.rewards[i], -i))
            assert loser == min(scored, key=lambda i: (batch.rewards[i], i))


def test_a_draw_is_repeatable_and_every_pair_is_as_likely():
    rewards, groups = [1.0, 0.0, 0.5, 0.5, math.nan], [3] * 5
    assert chosen(rewards, groups, "random", seed=5) == chosen(rewards, groups, "random", seed=5)
    generator = torch.Generator().manual_seed(0)
    counts = Counter()
    for _ in range(500):
        winner, loser = pairs(torch.tensor(rewards), torch.tensor(groups), kind="random", generator=generator)
        counts[winner.item(), loser.item()] += 1
    assert counts.keys() == oracle.pairs(rewards, groups)  # five pairs
    assert all(70 <= n <= 130 for n in counts.values()), counts


def test_a_hopeless_pair_and_a_settled_one_stay_finite():
    policy = torch.tensor([-5000.0, 0.0])
    both = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), torch.tensor([1, 0])
    ours = pairwise(policy, torch.tensor([0, 1, 2]), *both, beta=1.0)
    assert ours.value.tolist() == [-5000.0, 0.0]
    assert ours.objective_gradient.tolist() == [1.0, -1.0]


def test_what_is_not_trained_does_not_count_and_nothing_is_worth_nothing():
    """That value and gradient follow the formula: `tests/learner/test_objective.py`."""
    policy, mask = torch.tensor([-1.0, math.nan, -2.0]).requires_grad_(), torch.tensor([True, False, True])
    reference, cu_seqlens = torch.tensor([-1.5, -math.inf, -1.0]), torch.tensor([0, 2, 3, 3])
    winner, loser, none = torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64)
    options = {"beta": 0.3, "reference_logprobs": reference, "length_normalised": True}
    ours = pairwise(policy, cu_seqlens, mask, winner, loser, **options)
    torch.testing.assert_close(ours.value, F.logsigmoid(0.3 * torch.tensor([0.5 + 1.0, 0.5]).double()))
    assert ours.objective_gradient[1] == 0 and not ours.objective_gradient.requires_grad
    empty = pairwise(policy, cu_seqlens, mask, none, none, **options)
    assert empty.value.shape == (0,) and (empty.objective_gradient == 0).all()
