"""The monitor sees what is kept from the learner for its age, and nothing where nothing is."""

import random
from collections.abc import Iterable

import pytest

from asyncgrpo.buffer.group_health import BIAS_WINDOW, MIN_SETTLED, BiasMonitor, ks_distance
from asyncgrpo.wire.rollouts import Deliver
from tests.buffer.test_buffer import begun, deliver, lease_all, v
from tests.buffer.test_policies import balance, spanning
from tests.generators.test_rollout import make_lease


def group(length: int, rewards=(0.0, 1.0)) -> Deliver:
    """Two completions of this many tokens."""
    return deliver(make_lease(2), 0, rewards, tokens=length)


def steps_apart(some, others) -> float:
    """By the definition: the distribution functions at every value."""
    points = {*some, *others}
    share = lambda values, x: sum(v <= x for v in values) / len(values)  # noqa: E731
    return max(abs(share(some, x) - share(others, x)) for x in points)


def test_the_distances_are_those_of_their_definitions():
    rng = random.Random(0)
    for _ in range(50):
        some, others = ([rng.choice((1, 2, 3, float("inf"))) for _ in range(rng.randint(1, 9))] for _ in "ab")
        assert ks_distance(some, others) == pytest.approx(steps_apart(some, others))
    assert ks_distance([1, 2], [3, 4]) == 1 and ks_distance([1, 2], [2, 1]) == 0
    assert ks_distance([], []) == 0 and ks_distance([1], []) == 1


def distances(settled: Iterable[tuple[Deliver | None, bool]]) -> dict[str, float]:
    """What the monitor says after groups that were trained, or were not."""
    monitor = BiasMonitor()
    for message, is_trained in settled:
        monitor.settle(message, is_trained=is_trained)
    return monitor.distances()


def test_all_that_is_trained_is_at_no_distance_and_little_says_nothing():
    trained = [(group(length + 1), True) for length in range(MIN_SETTLED)]
    assert distances(trained[1:]) == {} and distances(trained) == {"length": 0, "reward": 0}


@pytest.mark.parametrize(
    ("of", "kept", "lost"),
    [
        ("length", group(5), group(50)),
        ("length", group(5), None),  # cancelled: longer than all
        ("reward", group(5), group(5, (1.0, 1.0))),
    ],
)
def test_what_is_given_up_shows_by_its_share_in_the_respect_in_which_it_differs(of, kept, lost):
    found = distances((kept if number % 4 else lost, number % 4 != 0) for number in range(100))
    assert found.pop(of) == pytest.approx(0.25)
    assert set(found.values()) == {0.0}


def test_length_is_of_a_completion_however_many_a_group_has_and_what_is_long_ago_is_forgotten():
    large_and_small = [(group(5, (0.5,) * 3), False), (group(5), True)]
    assert distances(large_and_small * 50)["length"] == 0
    assert distances([(group(50), False)] * 60 + [(group(5), True)] * BIAS_WINDOW)["length"] == 0


def test_a_lease_that_was_too_slow_counts_and_one_that_fails_does_not():
    for reason, distance in (("lease_timeout", 0.2), ("failed", 0.0)):
        buffer = begun(400, per_step=4, max_lag=0, max_attempts=1000)
        for version in range(20):
            leases = lease_all(buffer)
            buffer.fail(leases[0].lease_id, reason)
            for lease in [*leases[1:], *lease_all(buffer)]:
                buffer.accept(deliver(lease, version), b"")
            assert buffer.take(v(version)) is not None
            buffer.trained(v(version + 1))
        assert buffer.bias.distances()["length"] == pytest.approx(distance)
    for policy in ("wait", "drop"):  # one prompt in four is given up for its age, under `drop`
        buffer = begun(400, per_step=3, max_lag=1, policy=policy)
        for version in range(40):
            for lease in lease_all(buffer):
                if policy == "wait" or lease.attempt or lease.prompt_index % 4:
                    buffer.accept(spanning(lease, version), b"")
            buffer.take(v(version))
            buffer.trained(v(version + 1))
        balance(buffer)
        assert (buffer.bias.distances()["length"] > 0.1) == (policy == "drop")


def test_what_has_no_signal_is_on_neither_side():
    buffer = begun(400, per_step=2, max_lag=0, filters=True)
    for version in range(100):
        for number, lease in enumerate(lease_all(buffer)):
            scores = (0.0, 1.0) if number else (1.0, 1.0)
            buffer.accept(deliver(lease, version, scores), b"")
        for lease in lease_all(buffer):
            buffer.accept(deliver(lease, version), b"")
        assert buffer.take(v(version)) is not None
        buffer.trained(v(version + 1))
    assert buffer.outcomes["filtered_zero_signal"] == 100
    assert set(buffer.bias.distances().values()) == {0.0}
