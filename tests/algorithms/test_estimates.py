"""pass@k and maj@k against all subsets, one by one; intervals against what they promise."""

import random
from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest

from asyncgrpo.algorithms.estimates import majority_at, mean_of, pass_at, powers_up_to, share_of


def by_all_subsets(k: int, answers: list[str], is_right: list[bool]) -> tuple[float, float]:
    """pass@k and maj@k as they are defined."""
    share = {a: fmean(r for b, r in zip(answers, is_right, strict=True) if a == b) for a in answers}
    passed, won = [], []
    for subset in combinations(range(len(answers)), k):
        passed.append(any(is_right[i] for i in subset))
        votes = Counter(answers[i] for i in subset)
        leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
        won.append(fmean(share[answer] for answer in leaders))
    return fmean(passed), fmean(won)


@pytest.mark.parametrize("seed", range(40))
def test_pass_and_majority_are_means_over_all_subsets(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 10)
    answers = [draw.choice("abcdef"[: draw.randint(1, 6)]) for _ in range(n)]
    right = draw.choice("abc")
    is_right = [answer == right and draw.random() < (1.0 if seed % 4 else 0.7) for answer in answers]
    ks = list(range(1, n + 1))
    majority = majority_at(ks, answers, is_right)
    for k in ks:
        expected = by_all_subsets(k, answers, is_right)
        assert (pass_at(k, is_right), majority[k]) == pytest.approx(expected, abs=1e-12)


def test_many_completions_are_counted_exactly_enough():
    """The right answer has 200 of 256 votes, and each other one."""
    answers, is_right = ["right"] * 200 + [str(i) for i in range(56)], [True] * 200 + [False] * 56
    majority = majority_at([1, 128, 256], answers, is_right)
    assert (
        majority[1] == pytest.approx(200 / 256)
        and majority[128] == pytest.approx(1)
        and majority[256] == pytest.approx(1)
    )
    assert pass_at(64, [False] * 192 + [True] * 64) == pytest.approx(1, abs=1e-6)


def test_k_are_the_powers_of_two_up_to_n():
    assert [powers_up_to(n) for n in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8]]


@pytest.mark.parametrize("chance", [0.03, 0.3, 0.95])
def test_intervals_hold_the_truth_in_nineteen_of_twenty(chance):
    draw, held, means = random.Random(7), 0, 0
    for _ in range(400):
        values = [fmean(float(draw.random() < chance) for _ in range(2)) for _ in range(60)]
        held += share_of(values).low <= chance <= share_of(values).high
        estimate = mean_of([10 * value for value in values])
        means += estimate.low <= 10 * chance <= estimate.high
    assert held >= 0.93 * 400
    assert means >= 0.80 * 400, "few prompts of a rare success are far from normal: that is what Wilson's is for"


def test_an_interval_is_there_where_all_prompts_agree_and_none_for_one_prompt():
    assert share_of([1.0] * 20) == pytest.approx((1.0, 0.8389, 1.0), abs=1e-4)
    assert share_of([0.0] * 20) == pytest.approx((0.0, 0.0, 0.1611), abs=1e-4)
    assert mean_of([3.0]) == (3.0, None, None)
    assert mean_of([1.0, 3.0]) == pytest.approx((2.0, 2 - 1.96, 2 + 1.96), abs=1e-3)
