"""A lease goes to the generator that would finish it soonest, by what each has delivered."""

import math

import msgspec
import pytest

from asyncgrpo.buffer.sessions import MEMORY, TOLERANCE, Speeds
from asyncgrpo.wire import PROTOCOL
from asyncgrpo.wire.rollouts import Grant, Register, Serving, Take, Trained
from tests.buffer.test_buffer import deliver, v
from tests.buffer.test_incarnations import PAYLOAD, Served

TOKENS = 100


def order(speeds: Speeds, **held: int) -> list[str]:
    """Generators with windows of 4, the first to get a lease first."""
    return sorted(held, key=lambda name: speeds.seconds_per_token(name, held[name], 4))


def measured(**seconds: float) -> Speeds:
    speeds = Speeds()
    for name, one in seconds.items():
        speeds.delivered(name, one, TOKENS, 1, 4)
    return speeds


def test_the_quicker_one_is_first_until_its_load_makes_it_the_slower_one():
    speeds = measured(quick=1.0, slow=1.5 * TOLERANCE)
    assert order(speeds, slow=0, quick=0) == ["quick", "slow"]
    assert order(speeds, quick=2, slow=1) == ["quick", "slow"], "1 + 3/4 against 1.5 (1 + 2/4)"
    assert order(speeds, slow=0, quick=3) == ["slow", "quick"], "1.5 (1 + 1/4) against 1 + 4/4"


def test_a_difference_that_chance_makes_counts_for_nothing():
    speeds = measured(one=1.0, other=0.999 * TOLERANCE)
    assert speeds.seconds_per_token("one", 2, 4) == speeds.seconds_per_token("other", 2, 4)


def test_who_was_slow_under_a_full_load_is_not_slow():
    speeds = Speeds()
    speeds.delivered("empty", 1.25, TOKENS, 1, 4)
    speeds.delivered("full", 2.0, TOKENS, 4, 4)
    assert speeds.seconds_per_token("empty", 0, 4) == pytest.approx(speeds.seconds_per_token("full", 0, 4))


def test_length_is_no_slowness():
    speeds = Speeds()
    speeds.delivered("long", 10.0, 10 * TOKENS, 1, 4)
    speeds.delivered("short", 1.0, TOKENS, 1, 4)
    assert speeds.seconds_per_token("long", 0, 4) == pytest.approx(speeds.seconds_per_token("short", 0, 4))


def test_who_is_late_gets_what_no_other_has_room_for_until_it_delivers():
    speeds = measured(quick=1.0, slow=9.0)
    speeds.late("quick")
    speeds.late("new")
    assert order(speeds, quick=0, new=0, slow=3) == ["slow", "quick", "new"]
    assert order(speeds, quick=1, new=0, slow=3) == ["slow", "new", "quick"], "of two that are late the emptier one"
    speeds.delivered("quick", 0.0, 0, 1, 4)
    assert order(speeds, quick=0, new=0, slow=0) == ["quick", "slow", "new"]


def test_where_nothing_is_known_the_emptiest_window_is_first():
    speeds = Speeds()
    assert speeds.seconds_per_token("large", 4, 8) < speeds.seconds_per_token("small", 3, 4)
    assert speeds.seconds_per_token("small", 0, 4) == speeds.seconds_per_token("large", 1, 8)


def test_who_is_not_known_counts_as_the_quickest_and_so_does_who_started_again():
    speeds = measured(quick=1.0, slow=2.0)
    assert order(speeds, quick=1, new=0, slow=0) == ["new", "quick", "slow"]
    speeds.forget("slow")
    assert speeds.seconds_per_token("slow", 0, 4) == speeds.seconds_per_token("quick", 0, 4)


@pytest.mark.parametrize("is_late", [False, True])
def test_of_whom_nothing_came_for_long_is_tried_again(is_late: bool):
    speeds = measured(slow=100.0)
    if is_late:
        speeds.late("slow")
    for _ in range(2 * MEMORY - 1):
        speeds.delivered("quick", 1.0, TOKENS, 1, 4)
    assert order(speeds, slow=0, quick=3) == ["quick", "slow"]
    speeds.delivered("quick", 1.0, TOKENS, 1, 4)
    assert order(speeds, slow=0, quick=3) == ["slow", "quick"]


def test_a_generator_that_becomes_quicker_is_known_as_quick_after_some_groups():
    speeds = measured(was_slow=100.0, steady=1.0)
    for _ in range(8 * MEMORY):
        speeds.delivered("was_slow", 0.5, TOKENS, 1, 4)
        speeds.delivered("steady", 1.0, TOKENS, 1, 4)
    assert order(speeds, steady=0, was_slow=0) == ["was_slow", "steady"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_what_is_no_time_is_left_out(seconds: float):
    speeds = measured(a=1.0)
    before = speeds.seconds_per_token("a", 0, 4)
    speeds.delivered("a", seconds, TOKENS, 1, 4)
    assert speeds.seconds_per_token("a", 0, 4) == before


def test_the_buffer_leases_to_the_generator_that_finishes_soonest():
    served, seconds = Served(per_step=2, max_lag=1), {"slow": 9.0, "quick": 1.0}
    for name in seconds:
        served.hear(name, Register(protocol=PROTOCOL, generator_id=name, incarnation="0", window=4))
        served.hear(name, Serving(generator_id=name, version=v(0)))
    served.hear("learner", Trained(version=v(0)))
    firsts = {peer: message.lease for peer, message in served.lines.sent if isinstance(message, Grant)}
    assert {name: served.buffer.held_by(name) for name in seconds} == {"slow": 2, "quick": 2}
    for name, lease in firsts.items():
        timings = {"generate": seconds[name], "reward": 1.0}
        served.hear(name, msgspec.structs.replace(deliver(lease, 0), timings=timings), PAYLOAD)
    served.hear("learner", Take(step=0, version=v(0)))
    for _ in range(2):  # in the first moments of a version each gets its part
        served.now_s += 1.0
        for name in seconds:
            served.hear(name, Serving(generator_id=name, version=v(1)))
    granted = [peer for peer, kind in served.hear("learner", Trained(version=v(1))) if kind == "Grant"]
    assert granted == ["quick", "quick"], "each holds one lease, and has as much room"
