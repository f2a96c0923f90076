"""A lease's deadline follows the median of what groups take, and neither collapses nor runs away."""

import math
import random
import statistics

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


def test_a_deadline_that_cuts_does_not_feed_on_itself():
    """Exponential durations, of which those that are cut count too: else the deadline would shrink to the shortest."""
    rng = random.Random(0)
    deadlines = Deadlines(2.0, 1e6)
    given = []
    for _ in range(3000):
        limit_s, takes_s = deadlines.seconds(is_last=False), rng.expovariate(1 / 1000.0)
        given.append(limit_s)
        deadlines.observe(min(takes_s, limit_s))
    assert statistics.median(given[1000:]) == pytest.approx(2 * 693.0, rel=0.15)
