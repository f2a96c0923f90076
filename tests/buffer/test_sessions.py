"""A lease goes to the generator that would finish it soonest, by what each has delivered, and to none that has become slow."""

import math

import msgspec
import pytest

from asyncgrpo.buffer.buffer import State
from asyncgrpo.buffer.fleet import FIRST_BENCH_S, IN_A_ROW_S, MEMORY, TOLERANCE, SlowGenerators, Speeds
from asyncgrpo.wire.rollouts import Cancel, Grant, LeaseFailed, Serving, Take, Trained
from asyncgrpo.wire.supervision import GeneratorLost
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1.0, TOKENS, 1), (0.999 * TOLERANCE, TOKENS, 1)),  # a difference that chance makes
        ((1.25, TOKENS, 1), (2.0, TOKENS, 4)),  # slow under a full load
        ((10.0, 10 * TOKENS, 1), (1.0, TOKENS, 1)),  # longer completions
    ],
)
def test_what_makes_no_generator_slower_than_another(one: tuple, other: tuple):
    speeds = Speeds()
    speeds.delivered("one", *one, 4)
    speeds.delivered("other", *other, 4)
    assert speeds.seconds_per_token("one", 0, 4) == pytest.approx(speeds.seconds_per_token("other", 0, 4))


def test_who_is_late_gets_what_no_other_has_room_for_until_it_delivers():
    speeds = measured(quick=1.0, slow=9.0)
    speeds.late("quick")
    speeds.late("new")
    assert order(speeds, quick=0, new=0, slow=3) == ["slow", "quick", "new"]
    assert order(speeds, quick=1, new=0, slow=3) == ["slow", "new", "quick"], "of two that are late the emptier one"
    speeds.delivered("quick", 0.0, 0, 1, 4)
    assert order(speeds, quick=0, new=0, slow=0) == ["quick", "slow", "new"]


def test_where_nothing_is_known_the_emptiest_window_is_first_and_a_new_one_counts_as_the_quickest():
    speeds = Speeds()
    assert speeds.seconds_per_token("large", 4, 8) < speeds.seconds_per_token("small", 3, 4)
    assert speeds.seconds_per_token("small", 0, 4) == speeds.seconds_per_token("large", 1, 8)
    speeds = measured(quick=1.0, slow=2.0)
    assert order(speeds, quick=1, new=0, slow=0) == ["new", "quick", "slow"]
    speeds.forget("slow")
    for seconds in (math.nan, math.inf, -1.0, 0.0):  # these are no times
        speeds.delivered("slow", seconds, TOKENS, 1, 4)
    assert speeds.seconds_per_token("slow", 0, 4) == speeds.seconds_per_token("quick", 0, 4), "it has started again"


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


def test_the_buffer_leases_to_the_generator_that_finishes_soonest():
    served, seconds = Served(per_step=2, max_lag=1), {"slow": 9.0, "quick": 1.0}
    for name in seconds:
        served.join(name, window=4)
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


# -- generators that become slow ---------------------------------------------------------------------------------------


def three(**token_s: float) -> SlowGenerators:
    slow = SlowGenerators()
    for name, seconds in ({"a": 0.1, "b": 0.12, "c": 0.1} | token_s).items():
        assert not slow.heard(name, seconds, 8, 0.0)
    return slow


def test_who_is_slow_twice_in_a_row_rests_each_time_for_longer():
    slow = three()
    now_s = 0.0
    for rest_s in (FIRST_BENCH_S, 2 * FIRST_BENCH_S, 4 * FIRST_BENCH_S):
        assert not slow.heard("c", 1.0, 8, now_s), "once may be chance"
        assert slow.heard("c", 1.0, 8, now_s + 1.0)
        now_s += 1.0 + rest_s
        assert slow.is_benched("c", now_s - 0.1) and not slow.is_benched("c", now_s) and slow.on_probation("c")
    assert not slow.heard("c", 0.1, 8, now_s) and not slow.on_probation("c"), "quick again"
    assert [slow.heard("c", 1.0, 8, now_s + second) for second in (1, 2)] == [False, True]
    assert slow.is_benched("c", now_s + 1.9 + FIRST_BENCH_S) and not slow.is_benched("c", now_s + 2.1 + FIRST_BENCH_S)


def test_less_is_slow_while_the_learner_waits_for_it_and_one_that_was_slow_is_tried_until_it_is_not():
    slow = three()
    assert not any(slow.heard("c", 0.3, 8, second) for second in range(9)), "it keeps up"
    assert [slow.heard("c", 0.3, 8, second, is_awaited=True) for second in range(2)] == [False, True]
    now_s = 1.0 + FIRST_BENCH_S
    assert not slow.is_benched("c", now_s)
    assert not slow.heard("c", 0.3, 8, now_s) and slow.on_probation("c"), "neither quick nor slow: one lease"
    assert not slow.heard("c", 0.19, 8, now_s) and not slow.on_probation("c")


def slow_ones(
    slow: SlowGenerators, name: str, *token_s: float | None, running: int = 8, every_s: float = 1.0
) -> list[bool]:
    return [slow.heard(name, one, running, number * every_s) for number, one in enumerate(token_s)]


def test_what_is_not_slow():
    assert not any(slow_ones(three(), "c", *[1.0, 0.1] * 20)), "a single slow second may be chance"
    apart = three()
    assert not any(slow_ones(apart, "c", *[1.0] * 9, every_s=60.0)), "between them nothing ran, or the run was paused"
    assert apart.heard("c", 1.0, 8, 8 * 60.0 + IN_A_ROW_S)
    assert not any(slow_ones(SlowGenerators(), "a", *[100.0] * 9)), "alone"
    assert not any(slow_ones(three(a=1.0, b=1.0), "c", *[1.0] * 9)), "as most others"
    assert not any(slow_ones(three(a=1e-4, b=1e-4), "c", *[0.019] * 9)), "quick in any case"
    assert not any(slow_ones(three(a=0.0, b=0.0), "c", *[1.0] * 9)), "a token that takes no time says nothing"
    assert not any(slow_ones(three(), "a", *[None] * 9, running=0)), "nothing runs"


@pytest.mark.parametrize(
    ("token_s", "running", "is_slow"),
    [(0.39, 8, False), (0.41, 8, True), (0.79, 16, False), (0.81, 16, True), (0.41, 4, True)],
)
def test_where_more_completions_run_a_token_may_take_longer_in_proportion(token_s: float, running: int, is_slow: bool):
    assert slow_ones(three(), "c", token_s, token_s, running=running, every_s=0.0)[-1] is is_slow


def test_a_generator_that_is_gone_is_forgotten():
    slow = three()
    for _ in range(2):
        assert slow_ones(slow, "c", 1.0, 1.0) == [False, True]
        slow.forget("c")
        assert not slow.on_probation("c")
    slow.forget("a")
    slow.forget("b")
    assert not any(slow.heard("c", 1.0, 8, 1e6 + second) for second in range(9)), "nothing is left to compare it with"


def says(served: Served, name: str, token_s: float, version: int = 0) -> list[tuple[str, str]]:
    return served.hear(name, Serving(generator_id=name, version=v(version), token_s=token_s, running=8))


def two(window: int, **settings) -> Served:
    """Two generators, a and b, that have all the leases there are."""
    served = Served(**settings)
    for name in ("a", "b"):
        served.join(name, window=window)
        says(served, name, 0.1)
    served.hear("learner", Trained(version=v(0)))
    return served


def test_others_go_on_with_the_leases_of_a_slow_generator_and_it_gets_one_when_it_has_rested():
    served = two(window=4, per_step=4, max_lag=0)
    assert [served.buffer.held_by(name) for name in ("a", "b")] == [2, 2]
    served.now_s += 1.0
    assert says(served, "b", 1.0) == []
    served.now_s += 1.0
    says(served, "a", 0.1)
    assert says(served, "b", 1.0) == [("b", "Cancel"), ("a", "Grant"), ("a", "Grant")]
    assert [m.reason for _, m in served.lines.sent if isinstance(m, Cancel)] == ["slow"]
    assert not served.buffer._attempts.total(), "it costs the prompts nothing"
    served.now_s += FIRST_BENCH_S
    for name in ("a", "b"):
        says(served, name, 0.1) if name == "a" else served.hear(name, Serving(generator_id=name, version=v(0)))
    served.hear("a", LeaseFailed(generator_id="a", lease_id="1.2.1", reason="failed"))
    served.hear("a", LeaseFailed(generator_id="a", lease_id="1.3.1", reason="failed"))
    assert [served.buffer.held_by(name) for name in ("a", "b")] == [3, 1], "one, to be tried"


def test_a_generator_three_times_slower_is_slow_once_the_learner_waits_for_its_group():
    served = two(window=1, per_step=1, max_lag=1)
    slow = served.buffer.oldest_lease().holder
    quick = {"a": "b", "b": "a"}[slow]

    def a_second(version: int) -> list[tuple[str, str]]:
        served.now_s += 1.0
        return says(served, quick, 0.1, version) + says(served, slow, 0.3, version)

    for step in range(2):  # the bound lets one group overtake that of the slow one
        said = [each for _ in range(3) for each in a_second(step)]
        assert (slow, "Cancel") not in said
        lease = next(e.lease for e in served.buffer._entries.values() if e.holder == quick and e.state is State.LEASED)
        served.hear("learner", Take(step=step, version=v(step)))
        served.hear(quick, deliver(lease, step), PAYLOAD)
        served.hear("learner", Trained(version=v(1)))
    assert (slow, "Cancel") not in a_second(1)
    said = a_second(1)
    assert (slow, "Cancel") in said and (quick, "Grant") in said


def test_the_only_generator_works_however_slow_it_is():
    served = two(window=4, per_step=2, max_lag=0)
    for _ in range(2):
        served.now_s += 1.0
        says(served, "a", 0.1)
        says(served, "b", 1.0)
    assert served.buffer.held_by("b") == 0
    served.hear("driver", GeneratorLost(generator_id="a", incarnation="0", reason="test"))
    assert served.buffer.held_by("b") == 2
