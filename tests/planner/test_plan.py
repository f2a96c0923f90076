"""A plan ranks all splits, and gives the lengths for which the best one holds."""

import dataclasses

import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.plan import DecodeCurve, groups_in_flight, make_plan, predict, splits
from tests.planner.profiles import long_tail, profile

TASK = profile(lengths=long_tail(), decode=DecodeCurve.fit([(b, 0.02 + 0.001 * b) for b in (1.0, 16.0, 64.0)]))


def test_every_split_of_the_gpus_is_there_and_the_shortest_step_is_first():
    made = make_plan(TASK, 6)
    assert {(o.split.generators, o.split.ranks) for o in made.options} == {(n, 6 - n) for n in range(1, 6)}
    steps = [option.expected.step_s for option in made.options]
    assert steps == sorted(steps)
    assert made.options[0].flags[:2] == [
        f"generators.count={made.options[0].split.generators}",
        f"learner.ranks={made.options[0].split.ranks}",
    ]


def test_engines_of_several_gpus_leave_the_rest_to_the_learner():
    assert [(s.generators, s.ranks) for s in splits(profile(gpus_each=2), 6)] == [(1, 4), (2, 2)]
    with pytest.raises(ConfigError, match=r"2 GPUs are too few: an engine takes 2"):
        splits(profile(gpus_each=2), 2)


def test_an_engine_is_filled_to_its_knee_where_the_knee_was_measured():
    assert groups_in_flight(TASK) == pytest.approx(60 * TASK.lengths.spread(4) / 4, abs=0.5)
    one_load = profile(decode=DecodeCurve.fit([(10.0, 0.03)]))
    assert groups_in_flight(one_load) == one_load.groups_in_flight


def test_the_bound_is_the_smallest_that_costs_no_time():
    made = make_plan(TASK, 6)
    best = made.options[0]
    assert 0 < best.split.max_lag < 32
    smaller = dataclasses.replace(best.split, max_lag=best.split.max_lag // 2)
    assert predict(TASK, smaller).step_s > 1.01 * best.expected.step_s
    assert {option.split.max_lag for option in make_plan(TASK, 6, max_lag=3).options} == {3}
