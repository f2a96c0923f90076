"""A lease goes to the generator with the shortest time of a token, and to none that has become slow."""

import pytest

from asyncgrpo.buffer.buffer import State
from asyncgrpo.buffer.fleet import BENCH_S, TOLERANCE, Speeds
from asyncgrpo.wire.rollouts import Cancel, Grant, RequestEval, Serving, Trained
from asyncgrpo.wire.supervision import GeneratorLost
from tests.buffer.test_buffer import prompts, v
from tests.buffer.test_incarnations import Served


def order(speeds: Speeds, **load: float) -> list[str]:
    """Generators, the first to get a lease first."""
    return sorted(load, key=lambda name: speeds.seconds_per_token(name, load[name], speeds.fastest_s))


def measured(running: int = 8, **token_s: float) -> Speeds:
    """Speeds after one heartbeat of each generator at an empty window."""
    speeds = Speeds()
    for name, seconds in token_s.items():
        assert not speeds.heard(name, seconds, running, 0.0, 0.0)
    return speeds


def test_the_quicker_one_is_first_until_its_load_makes_it_the_slower_one():
    speeds = measured(quick=1.0, slow=1.5 * TOLERANCE)
    assert order(speeds, slow=0.25, quick=0.25) == ["quick", "slow"]
    assert order(speeds, quick=0.75, slow=0.5) == ["quick", "slow"], "1 + 3/4 against 1.5 (1 + 2/4)"
    assert order(speeds, slow=0.25, quick=1.0) == ["slow", "quick"], "1.5 (1 + 1/4) against 1 + 4/4"


@pytest.mark.parametrize(
    "other", [(0.999 * TOLERANCE, 0.0), (2.0, 1.0)], ids=["a difference that chance makes", "load"]
)
def test_what_makes_no_generator_slower_than_another(other: tuple[float, float]):
    speeds = measured(one=1.0)
    speeds.heard("other", other[0], 8, other[1], 0.0)
    assert speeds.seconds_per_token("one", 0.5, speeds.fastest_s) == pytest.approx(
        speeds.seconds_per_token("other", 0.5, speeds.fastest_s)
    )


def test_where_nothing_is_known_the_emptiest_window_is_first_and_a_new_one_counts_as_the_quickest():
    assert order(Speeds(), small=1.0, large=5 / 8) == ["large", "small"]
    speeds = measured(quick=1.0, slow=2.0)
    assert order(speeds, quick=0.5, new=0.25, slow=0.25) == ["new", "quick", "slow"]


def test_who_is_late_gets_what_no_other_has_room_for_until_it_delivers():
    speeds = measured(quick=1.0, slow=3.0)
    speeds.note("quick", is_late=True)
    assert order(speeds, quick=0.0, slow=0.75) == ["slow", "quick"]
    speeds.note("quick", is_late=False)
    assert order(speeds, quick=0.0, slow=0.75) == ["quick", "slow"]


# -- generators that become slow ---------------------------------------------------------------------------------------


def three(**token_s: float) -> Speeds:
    return measured(**({"a": 0.1, "b": 0.12, "c": 0.1} | token_s))


def slow_ones(speeds: Speeds, name: str, *token_s: float | None, running: int = 8) -> list[bool]:
    return [speeds.heard(name, one, running, 0.0, second) for second, one in enumerate(token_s)]


def test_who_is_slow_twice_in_a_row_rests_and_is_tried_again():
    speeds = three()
    assert slow_ones(speeds, "c", 1.0, 1.0, 1.0) == [False, True, False]
    assert speeds.is_benched("c", 0.9 + BENCH_S) and not speeds.is_benched("c", 1.0 + BENCH_S)
    assert order(speeds, b=0.0, c=0.0) == ["b", "c"], "its speed is unknown again"


def test_what_is_not_slow():
    assert not any(slow_ones(three(), "c", *[1.0, 0.1] * 20)), "a single slow second may be chance"
    assert not any(slow_ones(Speeds(), "a", *[100.0] * 9)), "alone"
    assert not any(slow_ones(three(a=1.0, b=1.0), "c", *[1.0] * 9)), "as most others"
    assert not any(slow_ones(three(a=1e-4, b=1e-4), "c", *[0.019] * 9)), "quick in any case"
    assert not any(slow_ones(three(a=0.0, b=0.0), "c", *[1.0] * 9)), "a token that takes no time says nothing"
    assert not any(slow_ones(three(), "a", *[None] * 9, running=0)), "nothing runs"


@pytest.mark.parametrize(
    ("token_s", "running", "is_slow"),
    [(0.39, 8, False), (0.41, 8, True), (0.79, 16, False), (0.81, 16, True), (0.41, 4, True)],
)
def test_where_more_completions_run_a_token_may_take_longer_in_proportion(token_s: float, running: int, is_slow: bool):
    assert slow_ones(three(), "c", token_s, token_s, running=running)[-1] is is_slow


# -- in the service ----------------------------------------------------------------------------------------------------


def says(served: Served, name: str, token_s: float | None) -> list[tuple[str, str]]:
    return served.hear(name, Serving(generator_id=name, version=v(0), token_s=token_s, running=8))


def two(window: int, speeds: dict[str, float] | None = None, **settings) -> Served:
    """Two generators, a and b, that have all the leases there are."""
    served = Served(**settings)
    for name in ("a", "b"):
        served.join(name, window=window)
        says(served, name, (speeds or {}).get(name, 0.1))
    served.hear("learner", Trained(version=v(0)))
    return served


def test_the_buffer_leases_to_the_generator_that_finishes_soonest():
    served = two(4, {"a": 0.35}, per_step=4, max_lag=0, max_attempts=9)
    assert [served.buffer.held_by(name) for name in ("a", "b")] == [2, 2], "just after a version each gets its part"
    served.now_s += 1.0
    for name in ("a", "b"):
        says(served, name, None)
    for entry in [entry for entry in served.buffer._entries.values() if entry.state is State.LEASED]:
        served.buffer.fail(entry.lease.lease_id, "failed")
    assert {peer for peer, kind in says(served, "b", None) if kind == "Grant"} == {"b"}


def test_others_go_on_with_the_leases_of_a_slow_generator_and_it_is_tried_when_it_has_rested():
    served = two(window=4, per_step=4, max_lag=0)
    assert [served.buffer.held_by(name) for name in ("a", "b")] == [2, 2]
    served.now_s += 1.0
    assert says(served, "b", 1.0) == []
    served.now_s += 1.0
    says(served, "a", 0.1)
    assert says(served, "b", 1.0) == [("b", "Cancel"), ("a", "Grant"), ("a", "Grant")]
    assert [m.reason for _, m in served.lines.sent if isinstance(m, Cancel)] == ["slow"]
    assert not served.buffer._attempts.total(), "it costs the prompts nothing"
    served.now_s += BENCH_S
    for name in ("a", "b"):
        says(served, name, None)
    assert served.buffer.held_by("a") == 4
    served.buffer.give_back(served.oldest_lease().lease_id)
    says(served, "a", None)
    assert [to for to, message in served.lines.sent if isinstance(message, Grant)] == ["b"]


def test_the_only_generator_works_however_slow_it_is():
    served = two(window=4, per_step=2, max_lag=0)
    for _ in range(2):
        served.now_s += 1.0
        says(served, "a", 0.1)
        says(served, "b", 1.0)
    assert served.buffer.held_by("b") == 0
    served.hear("driver", GeneratorLost(generator_id="a", incarnation="0"))
    assert served.buffer.held_by("b") == 2


@pytest.mark.parametrize("leases", [8, 64])
def test_generators_are_compared_once_for_each_of_them_and_each_lease(leases: int, monkeypatch: pytest.MonkeyPatch):
    """Comparing all of them for each took half a second a message with 1,024 generators."""
    calls = []
    right = Speeds.seconds_per_token
    monkeypatch.setattr(Speeds, "seconds_per_token", lambda *given: calls.append(given) or right(*given))
    served = Served(count=leases, per_step=leases, max_lag=0)
    for name in range(16):
        served.join(str(name), window=leases)
    served.hear("learner", Trained(version=v(0)))
    assert sum(map(len, served.grants().values())) == leases
    assert len(calls) <= 16 + leases
    calls.clear()
    says(served, "0", 1.0)
    assert not calls, "no slot is free"


# -- leases that a broken connection lost ------------------------------------------------------------------------------


def holds(served: Served, name: str, *leases: str) -> list[tuple[str, str]]:
    return served.hear(name, Serving(generator_id=name, version=v(0), leases=leases))


def granted_ids(served: Served, name: str) -> list[str]:
    return [said.lease.lease_id for to, said in served.lines.sent if isinstance(said, Grant) and to == name]


def test_leases_that_a_generator_has_not_received_are_granted_again_and_those_that_it_has_are_not():
    served = Served()
    served.join("a", window=2)
    served.hear("learner", Trained(version=v(0)))
    first, second = granted_ids(served, "a")
    assert holds(served, "a") == [], "they may be on the way"
    served.pass_time(4.0, "a")
    assert holds(served, "a", first) == []
    served.pass_time(2.0, "a")
    assert holds(served, "a", first, second) == []
    assert holds(served, "a", first) == [("a", "Cancel"), ("a", "Grant")], "one that comes late has no effect"
    assert served.lines.sent[0][1].lease_ids == (second,)
    (again,) = granted_ids(served, "a")
    assert served.buffer.held_by("a") == 2 and served.buffer.outcomes["requeued"] == 1
    assert holds(served, "a", first, again) == []


def test_messages_that_queue_up_are_no_silence():
    served = two(window=4)
    before = [served.buffer.held_by(name) for name in "ab"]
    for _ in range(20):
        served.now_s += 0.5
        old = Serving(generator_id="b", version=v(0), leases=())  # sent before the leases arrived
        assert served.hear("b", old) == []
    assert [served.buffer.held_by(name) for name in "ab"] == before and all(before)
    served.pass_time(0.2)
    assert [served.buffer.held_by(name) for name in "ab"] == [0, 4], "nothing of a was unread"


def test_evaluation_leases_that_a_generator_has_not_received_are_granted_again():
    served = Served(held_out=prompts(1))
    served.join("a", window=2)
    served.hear("learner", RequestEval(step=0))
    served.hear("learner", Trained(version=v(0)))
    evaluated, *trained = granted_ids(served, "a")
    served.pass_time(6.0, "a")
    holds(served, "a", *trained)
    assert granted_ids(served, "a") == [evaluated], "the same attempt: the prompt is not why it was lost"
    assert holds(served, "a", *trained, evaluated) == []
