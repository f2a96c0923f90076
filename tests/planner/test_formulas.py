"""The formulas, on cases that are worked out by hand, and against the product's own scheduler on the virtual clock."""

import msgspec
import pytest

from asyncgrpo.planner.plan import (
    DecodeCurve,
    LearnerTimes,
    Split,
    generate_seconds,
    groups_in_flight,
    learner_seconds,
    predict,
)
from asyncgrpo.wire.rollouts import SCORED_AT_ONCE_S
from tests.planner.profiles import profile
from tests.planner.scheduler import Scheduled


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


def test_filtered_groups_are_generated_too_and_the_cache_limits_what_runs():
    plain, _ = generate_seconds(profile(), 2, 8)
    filtered, _ = generate_seconds(profile(filtered=0.5), 2, 8)
    assert filtered - 0.2 == pytest.approx(2 * (plain - 0.2))
    assert generate_seconds(profile(kv_completions=6), 2, 8)[1] == 6


def test_without_lag_nothing_overlaps():
    found = predict(profile(), Split(2, 2, 4, 0))
    assert found.step_s == pytest.approx(100 * 0.02 + 0.001 * 16 * 100 + learner_seconds(profile(), 2))
    assert (found.lag_mean, found.bottleneck) == (0.0, "longest completions")


def test_the_knee_in_groups():
    assert groups_in_flight(profile()) == 15  # 60 completions of four a group
    assert groups_in_flight(profile(decode=DecodeCurve(base_s=0.02, each_s=0.0))) == 4
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
        (Split(4, 2, 8, 8), 3.0, 1.0, 0.0, 0.12),  # all three decide, with a long tail
    ],
)
def test_formulas_agree_with_the_product_on_the_virtual_clock(split, base_s, sigma, filtered, within):
    task = profile(learner=LearnerTimes(base_s=base_s, each_s=0.0005), pause_s=0.0, filtered=filtered)
    product = Scheduled(task, split, sigma=sigma, steps=30)
    formula = predict(msgspec.structs.replace(task, lengths=product.lengths), split)
    assert formula.step_s == pytest.approx(product.step_s, rel=within)
    assert formula.lag_mean == pytest.approx(product.lag_mean, rel=0.25, abs=0.05)
