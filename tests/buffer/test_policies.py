"""Each policy keeps its own promise about age, fills the slot of what it gives up with exactly one, and counts it."""

import math

import msgspec
import pytest

from asyncgrpo.buffer.admission import AutoLag, JustInTime
from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.journal.history import Dropped
from asyncgrpo.types import Lease, VersionSpan
from asyncgrpo.wire.rollouts import Deliver
from tests.buffer.test_buffer import Recording, begun, deliver, lease_all, v

TOKENS = 4


def spanning(lease: Lease, *versions: int, scores: tuple[float | None, ...] = (0.0, 1.0)) -> Deliver:
    """A group of two completions of four tokens each, which these versions sampled one after the other in equal parts."""
    each = TOKENS // len(versions)
    spans = tuple(VersionSpan(v(version), i * each, (i + 1) * each) for i, version in enumerate(versions))
    message = deliver(lease, versions[0], scores)
    rollouts = (msgspec.structs.replace(one, num_tokens=TOKENS, spans=spans) for one in message.rollouts)
    return msgspec.structs.replace(message, rollouts=tuple(rollouts))


def started(policy: str, **settings) -> tuple[Buffer, list[Lease]]:
    buffer = begun(policy=policy, **({"count": 20, "per_step": 1, "max_lag": 1} | settings))
    return buffer, lease_all(buffer)


def step(buffer: Buffer, version: int) -> list[int] | None:
    batch = buffer.take(v(version))
    if batch is not None:
        buffer.trained(v(version + 1))
    return None if batch is None else [entry.prompt_index for entry in batch]


def balance(buffer: Buffer) -> None:
    out, tokens = buffer.outcomes, buffer.tokens
    gone = sum(n for name, n in out.items() if name.startswith("dropped_"))
    here = sum(buffer.count(state) for state in State)
    assert out["leased"] == here + out["trained"] + gone + out["requeued"] + out["filtered_zero_signal"]
    fates = tokens.total() - tokens["generated"]
    assert tokens["generated"] == fates + buffer.tokens_in_flight


def test_what_is_given_up_for_its_age_is_recorded_by_its_state_until_its_last_attempt():
    journal = Recording()
    buffer, leases = started("drop", journal=journal)
    for version in (9, 19, 29):
        buffer.accept(spanning(leases[0], version - 9), b"")
        buffer.trained(v(version))
        leases = lease_all(buffer)
    drops = [(record.reason, record.is_final) for record in journal.records if isinstance(record, Dropped)]
    assert drops == [("stale", False), ("cancelled", False)] * 2 + [("always_stale", True)] * 2
    balance(buffer)


# -- admission just in time --------------------------------------------------------------------------------------------

SLOTS = 144


def admission_after_a_step(in_flight: int = 96, ready: int = 48) -> JustInTime:
    """An admission of P = 48 after its first step of 1 s, without a wait."""
    admission = JustInTime(48)
    assert see_step(admission, 0, SLOTS, 0) == SLOTS, "no step was trained before the first request"
    see_step(admission, 1, in_flight, ready)
    return admission


def see_step(admission: JustInTime, at_s: float, in_flight: int, ready: int, wait_s: float = 0.0) -> int:
    """Return what is wanted after a step whose batch the learner asks for at `at_s`, and gets `wait_s` later."""
    admission.batch_requested(in_flight, ready, at_s)
    admission.batch_taken(at_s + wait_s, SLOTS)
    return admission.wanted(SLOTS)


def test_a_start_takes_all_slots_and_then_no_less_than_a_batch():
    buffer = begun(count=200, per_step=4, max_lag=8, is_eager=False)
    leases = lease_all(buffer)
    assert len(leases) == 9 * 4, "nothing is measured yet"
    for version in range(40):  # whatever is leased is ready when the learner asks
        for lease in leases:
            assert buffer.accept(spanning(lease, version), b"") is None
        assert step(buffer, version) is not None
        leases = lease_all(buffer)
    assert buffer.wanted == buffer.count(State.LEASED) + buffer.count(State.READY) == 4


def test_a_learner_that_seldom_waits_and_then_for_long_gets_all_slots():
    admission, now_s = admission_after_a_step(), 1.0
    for number in range(48):  # seven steps find their batch ready, the eighth waits for one long completion
        wait_s = 4.0 if number % 8 == 7 else 0.0
        wanted = see_step(admission, now_s + 1.0, 48, 0 if wait_s else 96, wait_s)
        now_s += 1.0 + wait_s
    assert wanted == SLOTS and admission.wanted(96) == 96, "the bound has become smaller"


@pytest.mark.parametrize("needed", [60, 100])
def test_the_learner_waits_for_a_twentieth_of_its_time_whatever_number_that_takes(needed):
    """Each group that is missing of `needed` makes it wait for 1/48 of a step. Any number in flight needs itself."""
    admission, waited = admission_after_a_step(), []
    for second in range(2, 200):
        wanted = admission.wanted(SLOTS)
        waited.append(max(0, needed - wanted) / 48)
        see_step(admission, second, wanted - 48, ready=48, wait_s=waited[-1] / (1 + waited[-1]))
    assert abs(admission.wanted(SLOTS) - needed) <= 4
    assert sum(waited[-100:]) / 100 == pytest.approx(0.05, abs=0.02)


# -- buffer.max_lag: auto ----------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("bound", "shares", "then"),
    [
        (4, {4: 0.55}, 4),  # near the floor
        (20, {1: WELL, 4: 0.6, 8: 0.4, 13: LOW}, 4),  # the lag within which the share was above the floor
        (20, {8: LOW}, 6),  # all are too old: down by a quarter
        (1, {0: LOW, 1: LOW}, 1),  # the smallest
        (1, {0: math.nan, 1: math.nan}, 1),
    ],
)
def test_a_step_whose_share_is_low_lowers_the_bound_and_raises_none(bound, shares, then):
    assert set(run(controller(bound), 20, shares, waited=0.9)[:1]) == {then}


def test_one_outlier_and_steps_of_groups_of_an_earlier_bound_say_nothing():
    auto = controller(4)
    run(auto, AutoLag.STEPS, {4: WELL})
    assert run(auto, 2, {4: LOW}) == [4, 3], "two of three"
    auto = controller(16)
    assert run(auto, 1, {2: WELL, 16: LOW}) == [2]
    assert run(auto, 10, {0: LOW, 12: LOW}, start=1) == [2] * 10
    assert run(auto, 1, {0: WELL, 2: LOW}, start=11) == [1]
