"""A profile is read as it was written, its fits find what data was made with, and its plan ranks all splits."""

import dataclasses

import msgspec
import numpy as np
import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.plan import (
    DecodeCurve,
    LearnerTimes,
    groups_in_flight,
    make_plan,
    predict,
    read_profile,
    splits,
    write_profile,
)
from tests.planner.profiles import SAME, long_tail, profile


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = profile(lengths=long_tail(), decode=DecodeCurve.fit([(1.0, 0.1), (8.0, 0.2)]), kv_completions=7)
    write_profile(made, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == made


def test_what_is_no_profile_is_refused_with_its_file_and_its_key(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=r"mine.json cannot be read .*asyncgrpo tune"):
        read_profile(path)
    unequal, empty = ({"lengths": {"groups": groups}} for groups in ([[1.0, 2.0], [3.0]], [[]]))
    wrong = [({"publish_s": -1}, "publish_s"), ({"speed": 3}, "speed")]
    for change, said in [*wrong, (unequal, "different numbers of completions"), (empty, r"lengths\.groups")]:
        path.write_bytes(msgspec.json.encode(msgspec.to_builtins(profile()) | change))
        with pytest.raises(ConfigError, match=f"mine.json.*{said}"):
            read_profile(path)


def test_the_curve_is_the_line_through_the_points():
    curve = DecodeCurve.fit([(b, 0.02 + 0.0005 * b) for b in (1.0, 4.0, 16.0, 64.0)])
    assert (curve.base_s, curve.each_s) == pytest.approx((0.02, 0.0005))
    assert curve.residual < 1e-9 and curve.knee == pytest.approx(120)
    assert curve.is_near(90) and not curve.is_near(100)
    assert curve.rate(curve.knee) == pytest.approx(0.75 / 0.0005), "three quarters of the most there is"


def test_neither_part_of_a_curve_is_negative_and_one_load_leaves_open_which_part_is_its_own():
    curve = DecodeCurve.fit([(10.0, 0.04), (12.0, 0.04)])
    assert (curve.at(11.0), curve.base_s) == pytest.approx((0.04, 0.02))
    falling = DecodeCurve.fit([(1.0, 0.03), (8.0, 0.02)])
    assert falling.each_s == 0 and 0.02 < falling.base_s < 0.03
    through_less_than_nothing = DecodeCurve.fit([(1.0, 0.001), (8.0, 0.02)])
    assert through_less_than_nothing.base_s == 0 and through_less_than_nothing.each_s > 0


def test_the_learner_s_line_is_found_at_two_sizes_and_goes_through_zero_at_one():
    two = LearnerTimes.fit([(100.0, 1.5), (400.0, 3.0)])
    assert (two.base_s, two.each_s) == pytest.approx((1.0, 0.005))
    assert two.at(400.0) == pytest.approx(3.0)
    assert LearnerTimes.fit([(100.0, 1.0), (101.0, 1.0)]).base_s == 0


def test_draws_have_the_mean_the_tail_and_the_likeness_of_the_measured_groups():
    lengths = long_tail()
    measured = np.array(lengths.groups)
    assert lengths.mean == pytest.approx(measured.mean(), rel=0.05)
    assert lengths.longest_of(1, 4) == pytest.approx(measured.max(axis=1).mean(), rel=0.05)
    assert lengths.longest_of(1, 8) > lengths.longest_of(1, 4)
    drawn = lengths.sample(3, 4)
    assert all(sorted(row) in np.sort(measured, axis=1).tolist() for row in drawn.tolist()), "whole groups"
    assert SAME.spread(16) == pytest.approx(1.0)


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
    task = profile("generators.gpus_each=2")
    assert [(s.generators, s.ranks) for s in splits(task, 6)] == [(1, 4), (2, 2)]
    with pytest.raises(ConfigError, match=r"2 GPUs are too few: an engine takes 2"):
        splits(task, 2)


def test_the_gpus_of_teachers_are_not_shared():
    taught = ("teacher.path=t", "teacher.gpus_each=4", "algorithm.kl_coef=1", "algorithm.kl_kind=k2")
    made = make_plan(profile(*taught, "generators.gpus_each=2"), 10)
    assert {(o.split.generators, o.split.ranks) for o in made.options} == {(1, 4), (2, 2)}


def test_ranks_are_a_multiple_of_what_the_measured_layout_needs():
    task = profile("learner.ranks=6", "learner.parallel.context=2", "learner.parallel.expert=3")
    assert [(s.generators, s.ranks) for s in splits(task, 14)] == [
        (1, 12), (2, 12), *((n, 6) for n in range(3, 9))
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"6 GPUs are too few: learner.parallel takes a multiple of 6 ranks"):
        splits(task, 6)


def test_an_engine_is_filled_to_its_knee_where_the_knee_was_measured():
    assert groups_in_flight(TASK) == pytest.approx(60 * TASK.lengths.spread(4) / 4, abs=0.5)
    one_load = profile(decode=DecodeCurve.fit([(10.0, 0.03)]))
    assert groups_in_flight(one_load) == 4


def test_the_bound_is_the_smallest_that_costs_no_time():
    made = make_plan(TASK, 6)
    best = made.options[0]
    assert 0 < best.split.max_lag < 32
    smaller = dataclasses.replace(best.split, max_lag=best.split.max_lag // 2)
    assert predict(TASK, smaller).step_s > 1.01 * best.expected.step_s
    assert {option.split.max_lag for option in make_plan(TASK, 6, max_lag=3).options} == {3}
