"""Rows hold every answer once, keep to the budget, are few, and cost about the same on every rank."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.learner.packing import PackedRow, rows_for_ranks

PAIR_COST = 1 / 400
"""Attention that costs as much as everything else at 400 tokens of context."""


def tokens_of(row: PackedRow, prompts, completions) -> int:
    """Counted token by token, not as the module does it."""
    return sum(prompts[group] + sum(completions[group][a] for a in members) for _, group, members in row)


def pairs_of(row: PackedRow, prompts, completions) -> float:
    """Query-key pairs, half of a square for a sequence of its own."""
    pairs = 0.0
    for _, group, members in row:
        pairs += prompts[group] ** 2 / 2
        pairs += sum(prompts[group] * completions[group][a] + completions[group][a] ** 2 / 2 for a in members)
    return pairs


def check(prompts, completions, *, world: int, budget: int, share_prompts: bool, pair_cost: float = PAIR_COST):
    """Everything that every packing promises. Returns its rows, of all ranks."""
    dealt = rows_for_ranks(
        prompts, completions, world=world, budget=budget, share_prompts=share_prompts, pair_cost=pair_cost
    )
    assert len(dealt) == world
    assert len({len(rows) for rows in dealt}) == 1, "every rank runs its model equally often"
    rows = [row for rank in dealt for row in rank]
    found = Counter((piece.group, a) for row in rows for piece in row for a in piece.rollouts)
    assert found == Counter((g, a) for g, lengths in enumerate(completions) for a in range(len(lengths)))
    for row in rows:
        assert all(piece.rollouts for piece in row), "a prompt that nobody continues is not computed"
        is_one_sequence = len(row) == 1 and len(row[0].rollouts) == 1
        assert is_one_sequence or tokens_of(row, prompts, completions) <= budget
        if share_prompts:
            assert len({piece.group for piece in row}) == len(row), "a row computes a prompt once"
        else:
            assert all(len(piece.rollouts) == 1 for piece in row)
    filled = sum(bool(row) for row in rows)
    assert len(rows) - filled < world, "only the last turn has ranks without work"
    return rows


LENGTHS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), max_size=7)), max_size=8
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    LENGTHS,
    st.sampled_from([1, 2, 3, 4, 5, 40]),
    st.one_of(st.integers(1, 500), st.just(100_000)),
    st.booleans(),
    st.sampled_from([0.0, PAIR_COST, 1.0]),
)
def test_every_answer_is_in_one_row_within_the_budget_and_ranks_run_equally_often(
    groups, world, budget, share_prompts, pair_cost
):
    prompts, completions = [prompt for prompt, _ in groups], [lengths for _, lengths in groups]
    options = {"world": world, "budget": budget, "share_prompts": share_prompts, "pair_cost": pair_cost}
    rows = check(prompts, completions, **options)
    assert rows == [r for rank in rows_for_ranks(prompts, completions, **options) for r in rank], "always the same rows"
    # First fit would need fewer than twice the rows that the tokens fill, of those that are no longer than the budget.
    if not share_prompts:
        fitting = [p + a for p, lengths in groups for a in lengths if p + a <= budget]
        longer = sum(len(lengths) for _, lengths in groups) - len(fitting)
        assert sum(map(bool, rows)) <= max(2 * math.ceil(sum(fitting) / budget) + longer, 1) + world


def num_rows(prompts, completions, **options) -> int:
    options = {"world": 1, "share_prompts": True} | options
    return sum(map(len, rows_for_ranks(prompts, completions, **options)))


def test_there_are_no_more_rows_than_the_budget_needs():
    assert num_rows([2] * 32, [[8]] * 32, budget=80, world=2) == 4
    assert num_rows([2] * 32, [[8]] * 32, budget=79, world=2) == 6, "seven in a row, in a multiple of the ranks"
    assert num_rows([10], [[10] * 8], budget=90) == 1, "the prompt counts once"
    assert num_rows([10], [[10] * 8], budget=90, share_prompts=False) == 2
    assert num_rows([10], [[10] * 8], budget=50) == 2, "a group that does not fit is divided"
    assert num_rows([10, 10], [[10] * 8, [10] * 4], budget=80) == 2, "and what is left fills up with others"
    assert num_rows([5, 5], [[3, 200, 3], [3]], budget=50) == 2, "one that is longer than the budget is alone"
    assert num_rows([], [], budget=10) == num_rows([5], [[]], budget=10) == 0
    assert num_rows([1] * 3, [[99], [49], [49]], budget=100) == 2
    assert num_rows([1] * 6, [[69], [59], [49], [49], [39], [29]], budget=100) == 3, "long ones meet short ones"


@pytest.mark.parametrize("pair_cost", [0.0, PAIR_COST])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("where", ["completions", "prompts"])
def test_ranks_that_wait_for_one_another_have_about_equal_work(where, world, pair_cost):
    """Half of the tokens are in long sequences, whose attention costs several times that of as many short ones."""
    rng = np.random.default_rng(0)
    completions, prompts = rng.integers(10, 200, (400, 4)).tolist(), rng.integers(10, 60, 400).tolist()
    for group in range(0, 400, 10):
        if where == "completions":
            completions[group] = rng.integers(1000, 1900, 3).tolist()
        else:
            prompts[group] = int(rng.integers(1000, 1500))
    dealt = rows_for_ranks(prompts, completions, world=world, budget=2048, share_prompts=True, pair_cost=pair_cost)

    def cost(row):
        return tokens_of(row, prompts, completions) + pair_cost * pairs_of(row, prompts, completions)

    progress = [[cost(row) for row in turn] for turn in zip(*dealt, strict=True)]
    all_costs = [cost for turn in progress for cost in turn]
    assert pair_cost == 0 or max(all_costs) > 1.5 * min(all_costs), "the rows themselves are unequal"
    wasted = sum(max(turn) for turn in progress) * world / sum(all_costs) - 1
    assert wasted < 0.04, "little is spent waiting"


def long_tail(seed: int, groups: int = 128, size: int = 8) -> tuple[list[int], list[list[int]]]:
    """Lognormal lengths with a median of 700 tokens, cut at 8 and 8,192, as reasoning models completion."""
    rng = np.random.default_rng(seed)
    completions = np.exp(rng.normal(math.log(700), 0.9, (groups, size))).astype(int).clip(8, 8192)
    return rng.integers(64, 256, groups, endpoint=True).tolist(), completions.tolist()


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("world", [1, 8])
def test_a_long_tail_leaves_less_than_a_percent_of_the_rows_empty(world, share_prompts):
    for seed in range(3):
        prompts, completions = long_tail(seed)
        rows = check(prompts, completions, world=world, budget=16_384, share_prompts=share_prompts)
        sizes = [tokens_of(row, prompts, completions) for row in rows]
        assert sum(sizes) / (len(sizes) * max(sizes)) >= 0.99
        if share_prompts:  # dividing groups to fill rows computes few prompts twice
            assert sum(sizes) <= 1.02 * (sum(prompts) + sum(map(sum, completions)))
