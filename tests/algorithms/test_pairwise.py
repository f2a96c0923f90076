import itertools
import math
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from asyncgrpo.algorithms.pairwise import pairs, pairwise
from tests.algorithms import oracle_advantages as oracle

SEEDS = range(12)
LENGTHS = [5, 0, 1, 9, 3, 0, 7]
PAIRS = [(0, 3), (0, 2), (3, 4), (1, 6), (2, 1), (5, 1)]
"""ScoredRollouts in several pairs, on both sides, with an empty completion, and between two empty ones."""


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


def packed(seed, dtype):
    rng = random.Random(seed)
    policy, reference = ([[rng.gauss(-1, 1) for _ in range(n)] for n in LENGTHS] for _ in range(2))
    mask = [[rng.random() < 0.7 for _ in range(n)] for n in LENGTHS]
    flat = [torch.tensor(list(itertools.chain(*rows)), dtype=dtype) for rows in (policy, reference)]
    flat_mask = torch.tensor(list(itertools.chain(*mask)))
    return flat[0], flat[1], flat_mask, torch.tensor([0, *itertools.accumulate(LENGTHS)])


def split(flat):
    return [part.tolist() for part in flat.split(LENGTHS)]


WINNER, LOSER = (torch.tensor(side) for side in zip(*PAIRS, strict=True))


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("length_normalised", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_value_follows_the_formula_and_coefficient_is_autograds(with_reference, length_normalised, dtype, tolerance):
    for seed in range(4):
        policy, reference, mask, cu_seqlens = packed(seed, dtype)
        options = {"beta": 0.3, "length_normalised": length_normalised}
        given = reference if with_reference else None
        ours = pairwise(policy, cu_seqlens, mask, WINNER, LOSER, reference_logprobs=given, **options)

        rows = split(reference) if with_reference else None
        expected = oracle.pairwise(split(policy), rows, split(mask), PAIRS, **options)
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours.value, expected, rtol=tolerance, atol=1e-12)

        logp = policy.double().requires_grad_()
        margin = logp - reference.double() if with_reference else logp
        completions = []
        for tokens, trained in zip(margin.split(LENGTHS), mask.split(LENGTHS), strict=True):
            total = tokens[trained].sum()
            completions.append(total / max(int(trained.sum()), 1) if length_normalised else total)
        loss = sum(-F.logsigmoid(0.3 * (completions[w] - completions[x])) for w, x in PAIRS)
        loss.backward()
        torch.testing.assert_close(ours.objective_gradient, -logp.grad, rtol=tolerance, atol=1e-12)


def test_what_masked_tokens_hold_does_not_leak():
    policy, reference, mask, cu_seqlens = packed(1, torch.float64)
    clean = pairwise(policy, cu_seqlens, mask, WINNER, LOSER, beta=0.3, reference_logprobs=reference)
    policy, reference = policy.masked_fill(~mask, math.nan), reference.masked_fill(~mask, -math.inf)
    dirty = pairwise(policy, cu_seqlens, mask, WINNER, LOSER, beta=0.3, reference_logprobs=reference)
    assert dirty.value.equal(clean.value) and dirty.objective_gradient.equal(clean.objective_gradient)
    assert (dirty.objective_gradient[~mask] == 0).all() and not dirty.objective_gradient.requires_grad
    none = torch.zeros(0, dtype=torch.int64)
    empty = pairwise(policy.requires_grad_(), cu_seqlens, mask, none, none, beta=0.1)
    assert empty.value.shape == (0,) and (empty.objective_gradient == 0).all()


def test_a_hopeless_pair_and_a_settled_one_stay_finite():
    policy = torch.tensor([-5000.0, 0.0])
    both = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), torch.tensor([1, 0])
    ours = pairwise(policy, torch.tensor([0, 1, 2]), *both, beta=1.0)
    assert ours.value.tolist() == [-5000.0, 0.0]
    assert ours.objective_gradient.tolist() == [1.0, -1.0]
