"""`buffer.max_lag: auto` lowers the bound as soon as old tokens cost too much, and raises it where the learner waits for it."""

import math

import pytest

from asyncgrpo.buffer.auto_lag import STEPS, AutoLag
from asyncgrpo.config.load import load_config
from asyncgrpo.errors import ConfigError
from asyncgrpo.journal.format import BoundChanged
from tests.buffer.test_buffer import deliver, lease_all, make_buffer, v

WELL, LOW = 0.9, 0.3


def controller(max_lag: int | None = None, largest: int = 32) -> AutoLag:
    return AutoLag(largest, max_lag)


def run(auto: AutoLag, steps: int, shares: dict[int, float], waited: float = 0.0, start: int = 0) -> list[int]:
    return [auto.step_ended(version, shares, waited) for version in range(start, start + steps)]


@pytest.mark.parametrize(("given", "began"), [(None, 4), (0, 1), (9, 9), (99, 16)])
def test_it_begins_where_the_run_ended_within_its_bounds(given, began):
    assert controller(given, largest=16).max_lag == began


def test_a_learner_that_waits_for_the_bound_gets_more_as_long_as_the_share_is_high():
    auto = controller(4, largest=8)
    assert run(auto, 20, {1: WELL, 4: WELL}, waited=0.0) == [4] * 20, "nobody waits"
    assert run(auto, 5, {1: WELL, 4: WELL}, waited=0.5) == [5, 5, 5, 5, 5], "groups of the bound before come first"
    assert run(auto, 60, {4: WELL}, waited=0.5, start=5)[-1] == 8, "its largest"


def test_a_share_near_the_floor_raises_nothing():
    assert run(controller(4), 20, {4: 0.55}, waited=0.9) == [4] * 20


def test_it_is_lowered_to_the_lag_within_which_the_share_was_above_the_floor():
    auto = controller(20)
    assert run(auto, 1, {1: WELL, 4: 0.6, 8: 0.4, 13: LOW}) == [4]


def test_where_all_are_too_old_it_goes_down_by_a_quarter():
    assert run(controller(20), 1, {8: LOW}) == [6]


def test_one_outlier_is_none():
    auto = controller(4)
    run(auto, STEPS, {4: WELL})
    assert run(auto, 1, {4: LOW}) == [4]
    assert run(auto, 1, {4: LOW}) == [3], "two of three"


@pytest.mark.parametrize("share", [LOW, math.nan])
def test_the_smallest_bound_is_kept_whatever_the_share(share):
    assert set(run(controller(1), 20, {0: share, 1: share})) == {1}


def test_steps_of_groups_of_an_earlier_bound_say_nothing():
    auto = controller(16)
    assert run(auto, 1, {2: WELL, 16: LOW}) == [2]
    assert run(auto, 10, {0: LOW, 12: LOW}, start=1) == [2] * 10
    assert run(auto, 1, {0: WELL, 2: LOW}, start=11) == [1]


def test_it_settles_under_a_share_that_falls_with_the_lag():
    """A world where lag 8 is the last that is fine, and any bound is used up: it stays near it and does not swing."""
    auto, seen = controller(1), []
    for version in range(400):
        shares = {auto.max_lag: 1.0 - 0.06 * auto.max_lag}
        seen.append(auto.step_ended(version, shares, waited=0.3))
    assert set(seen[100:]) <= {6, 7, 8, 9} and len(set(seen[200:])) == 1


# -- in the buffer -----------------------------------------------------------------------------------------------------


def test_a_group_keeps_the_bound_of_its_lease_and_a_smaller_one_lets_none_begin_before_there_is_room():
    buffer = make_buffer(count=40, per_step=1, max_lag="auto")
    buffer.trained(v(0))
    leases = lease_all(buffer)
    assert len(leases) == 5 and buffer.max_lag == 4
    records: list = []
    buffer.journal.append = records.append
    buffer.step_ended(v(0), {0: WELL, 4: LOW}, 0.0)
    assert buffer.max_lag == 1 and records == [BoundChanged(version=v(0), max_lag=1)]
    for version, lease in enumerate(leases):
        assert version == 4 or buffer.lease("g", 0.0) is None, "more hold a slot than there are: two"
        assert buffer.accept(deliver(lease, 0), b"") is None
        (entry,) = buffer.take(v(version))
        assert entry.deadline == 4
        buffer.trained(v(version + 1))
    assert [buffer._entries[lease.group_id].deadline for lease in lease_all(buffer)] == [6, 6]


def test_the_earliest_deadline_is_trained_first_not_the_oldest_group():
    buffer = make_buffer(count=40, per_step=1, max_lag="auto")
    buffer.trained(v(0))
    first, old = buffer.lease("g", 0.0), buffer.lease("g", 0.0)
    buffer.accept(deliver(first, 0), b"")
    assert buffer.take(v(0)) is not None
    buffer.step_ended(v(0), {1: WELL, 4: LOW}, 0.0)
    buffer.trained(v(1))
    new = buffer.lease("g", 0.0)
    for lease, version in ((old, 0), (new, 1)):
        buffer.accept(deliver(lease, version), b"")
    assert [buffer._entries[lease.group_id].deadline for lease in (old, new)] == [4, 2]
    assert [entry.prompt_index for entry in buffer.take(v(1))] == [new.prompt_index]


def test_whether_the_bound_made_the_learner_wait():
    buffer = make_buffer(count=40, per_step=2, max_lag=1)
    buffer.trained(v(0))
    leases = lease_all(buffer)
    assert buffer.take(v(0)) is None and buffer.is_held_back, "all slots are taken"
    buffer = make_buffer(count=40, per_step=2, max_lag=1)
    buffer.trained(v(0))
    leases = [buffer.lease("g", 0.0) for _ in range(3)]
    assert buffer.take(v(0)) is None and not buffer.is_held_back, "generators have not begun more"
    for lease in leases[1:]:
        buffer.accept(deliver(lease, 0), b"")
    assert buffer.take(v(0)) is not None and not buffer.is_held_back


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["buffer.policy=mask"], "buffer.policy=mask bounds tokens"),
        (["buffer.policy=train"], "buffer.policy=train bounds no lag"),
    ],
)
def test_what_auto_does_not_go_with(settings, sentence):
    needed = ["model.path=m", "data.train=d.jsonl", "buffer.max_lag=auto"]
    assert load_config(None, needed).buffer.largest_max_lag == 32
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        load_config(None, [*needed, *settings])
