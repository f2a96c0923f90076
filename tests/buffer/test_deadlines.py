"""A lease's deadline follows the median of what groups take, and stays between a floor and a ceiling."""

import math

import pytest

from asyncgrpo.buffer.group_health import DEADLINE_WINDOW, MIN_GROUPS, SHORTEST_S, Deadlines


def after(durations, factor=3.0, longest_s=1800.0) -> Deadlines:
    deadlines = Deadlines(factor, longest_s)
    for seconds in durations:
        deadlines.observe(seconds)
    return deadlines


@pytest.mark.parametrize(
    ("durations", "settings", "seconds"),
    [
        ([50.0] * DEADLINE_WINDOW + [100.0] * DEADLINE_WINDOW, {}, 300.0),  # a multiple of the median of the newest
        ([40.0] * 6 + [60.0] * 7, {}, 180.0),
        ([0.1] * 20, {}, SHORTEST_S),
        ([1000.0] * 20, {}, 1800.0),
        ([50.0] * (MIN_GROUPS - 1), {}, 1800.0),  # little is known
        ([50.0] * 20, {"factor": 0.0}, 1800.0),
        ([50.0] * 20 + [0.0, -1.0, math.nan, math.inf] * 30, {}, 150.0),  # these are no times
    ],
)
def test_a_deadline_follows_the_median_between_a_floor_and_a_ceiling(durations, settings, seconds):
    assert after(durations, **settings).seconds(is_last=False) == seconds
    assert after(durations, **settings).seconds(is_last=True) == 1800.0, "the last lease of a prompt has all the time"
