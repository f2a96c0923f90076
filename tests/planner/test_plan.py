"""Profiles, their fits and the plan; formulas on cases worked out by hand, and against the product on the virtual clock."""

import dataclasses

import msgspec
import numpy as np
import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.plan import (
    DecodeCurve,
    LearnerTimes,
    Split,
    generate_seconds,
    groups_in_flight,
    learner_seconds,
    make_plan,
    predict,
    read_profile,
    splits,
    write_profile,
)
from asyncgrpo.wire.rollouts import SCORED_AT_ONCE_S
from tests.planner.profiles import SAME, long_tail, profile
from tests.planner.scheduler import Scheduled


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


def test_the_bound_is_the_smallest_that_costs_no_time():
    made = make_plan(TASK, 6)
    best = made.options[0]
    assert 0 < best.split.max_lag < 32
    smaller = dataclasses.replace(best.split, max_lag=best.split.max_lag // 2)
    assert predict(TASK, smaller).step_s > 1.01 * best.expected.step_s
    assert {option.split.max_lag for option in make_plan(TASK, 6, max_lag=3).options} == {3}


def test_the_learner_s_step_has_its_fixed_part_its_tokens_and_its_publication():
    assert learner_seconds(profile(), ranks=2) == pytest.approx(1.0 + 0.001 * 3200 / 2 + 0.5)
    with_prompts = profile(prompt_tokens=50.0)
    assert learner_seconds(with_prompts, 2) == pytest.approx(1.0 + 0.001 * (3200 + 8 * 50) / 2 + 0.5)
    apart = profile("learner.share_prompts=false", prompt_tokens=50.0)
    assert learner_seconds(apart, 2) == pytest.approx(1.0 + 0.001 * (3200 + 32 * 50) / 2 + 0.5)


def test_generation_takes_the_groups_over_the_rate_of_the_engines():
    seconds, running = generate_seconds(profile(), generators=2, in_flight=8)
    assert running == pytest.approx(16)  # four groups of four, all of one length
    assert seconds == pytest.approx(3200 / (2 * 16 / 0.036) + 0.2)


def test_a_slow_reward_gives_its_places_back():
    seconds, running = generate_seconds(profile("reward.workers=64", reward_s=1.0), generators=2, in_flight=8)
    sampled_s = 100 * (0.02 + 0.001 * running)
    assert running == pytest.approx(16 * sampled_s / (sampled_s + SCORED_AT_ONCE_S))
    assert seconds == pytest.approx(8 * (sampled_s + SCORED_AT_ONCE_S) / 8 + 0.2), "Little's law"
    seconds, _ = generate_seconds(profile(reward_s=1.0), generators=2, in_flight=8)
    assert seconds == pytest.approx(32 / 2 + 0.2), "few workers set the pace"
    found = predict(profile(reward_s=1.0), Split(2, 2, 4, 8))
    assert (found.bottleneck, found.lag_mean) == ("rewards", 8.0), "groups that await scores hold all slots"
    assert predict(profile(reward_s=1.0), Split(2, 2, 4, 0)).step_s > 32 / 2


def test_filtered_groups_are_generated_too_and_the_cache_limits_what_runs():
    plain, _ = generate_seconds(profile(), 2, 8)
    filtered, _ = generate_seconds(profile(filtered=0.5), 2, 8)
    assert filtered - 0.2 == pytest.approx(2 * (plain - 0.2))
    assert generate_seconds(profile(kv_completions=6), 2, 8)[1] == 6


def test_without_lag_nothing_overlaps():
    found = predict(profile(), Split(2, 2, 4, 0))
    assert found.step_s == pytest.approx(100 * 0.02 + 0.001 * 16 * 100 + 0.2 + learner_seconds(profile(), 2))
    assert (found.lag_mean, found.bottleneck) == (0.0, "longest completions")


def test_an_engine_is_filled_to_its_knee_where_the_knee_was_measured():
    assert groups_in_flight(profile()) == 15  # 60 completions of four a group
    assert groups_in_flight(TASK) == pytest.approx(60 * TASK.lengths.spread(4) / 4, abs=0.5)
    for curve in (DecodeCurve(base_s=0.02, each_s=0.0), DecodeCurve.fit([(10.0, 0.03)])):
        assert groups_in_flight(profile(decode=curve)) == 4
    slower = DecodeCurve.fit([(load, 0.01 * load**1.1) for load in (1.0, 8.0, 64.0)])
    assert slower.knee == 0.0, "a token takes longer than its load grows"
    found = predict(profile(decode=slower), Split(2, 2, 4, 4))
    assert found.saturation == found.running


@pytest.mark.parametrize(
    ("split", "base_s", "sigma", "filtered", "within"),
    [
        (Split(2, 2, 4, 4), 0.2, 0.5, 0.0, 0.1),  # generators decide
        (Split(2, 2, 4, 4), 0.2, 0.5, 0.5, 0.1),  # and half of the groups have no signal
        (Split(3, 2, 6, 1), 0.2, 0.5, 0.0, 0.1),  # the bound decides
        (Split(2, 2, 4, 0), 1.0, 0.5, 0.0, 0.1),  # nothing overlaps
        (Split(2, 2, 2, 0), 1.0, 0.5, 0.0, 0.1),  # and half of the groups wait for a place
        (Split(2, 2, 4, 0), 0.2, 0.5, 0.5, 0.1),  # or for one that has no signal
        (Split(4, 2, 8, 4), 6.0, 0.5, 0.0, 0.1),  # the learner decides
        (Split(4, 2, 8, 8), 3.0, 1.0, 0.0, 0.12),  # all three decide, with a long tail
    ],
)
def test_formulas_agree_with_the_product_on_the_virtual_clock(split, base_s, sigma, filtered, within):
    task = profile(learner=LearnerTimes(base_s=base_s, each_s=0.0005), pause_s=0.0, filtered=filtered)
    product = Scheduled(task, split, sigma=sigma, steps=30)
    formula = predict(msgspec.structs.replace(task, lengths=product.lengths), split)
    assert formula.step_s == pytest.approx(product.step_s, rel=within)
    assert formula.lag_mean == pytest.approx(product.lag_mean, rel=0.25, abs=0.05)
    assert filtered or formula.generator_idle == pytest.approx(product.generator_idle, abs=0.3)
