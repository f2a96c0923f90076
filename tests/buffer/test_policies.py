"""Each policy keeps its own promise about age, fills the slot of what it gives up with exactly one, and counts it."""

import math

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncgrpo.buffer.admission import AutoLag, JustInTime
from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.config.schema import AutoLagConfig
from asyncgrpo.journal.history import BoundChanged
from asyncgrpo.types import Lease, VersionSpan
from asyncgrpo.wire.rollouts import Deliver
from tests.buffer.test_buffer import POLICIES, deliver, lease_all, make_buffer, v

TOKENS = 4


def spanning(lease: Lease, *versions: int, scores: tuple[float | None, ...] = (0.0, 1.0)) -> Deliver:
    """A group of two completions of four tokens each, which these versions sampled one after the other in equal parts."""
    each = TOKENS // len(versions)
    spans = tuple(VersionSpan(v(version), i * each, (i + 1) * each) for i, version in enumerate(versions))
    message = deliver(lease, versions[0], scores)
    rollouts = (msgspec.structs.replace(one, num_tokens=TOKENS, spans=spans) for one in message.rollouts)
    return msgspec.structs.replace(message, rollouts=tuple(rollouts))


def started(policy: str, **settings) -> tuple[Buffer, list[Lease]]:
    buffer = make_buffer(policy=policy, **({"count": 20, "per_step": 1, "max_lag": 1} | settings))
    buffer.trained(v(0))
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


@pytest.mark.parametrize(("policy", "taken"), [("wait", None), ("drop", [1]), ("train", [1])])
def test_whether_a_quick_group_may_overtake_an_old_one_at_its_deadline(policy, taken):
    buffer, (slow, quick) = started(policy)
    buffer.accept(spanning(quick, 0), b"")
    if policy == "wait":
        assert step(buffer, 0) == [quick.prompt_index], "it leaves `slow` with one step"
        later = buffer.lease("g", 0.0)
        buffer.accept(spanning(later, 1), b"")
        assert step(buffer, 1) is None, "the deadline of the slow one"
        buffer.accept(spanning(slow, 0), b"")
        assert step(buffer, 1) == [slow.prompt_index]
    else:
        assert step(buffer, 0) == taken
    balance(buffer)


class AnyPolicy(RuleBasedStateMachine):
    """Leases, groups of one or two versions, failures, losses and steps in any order, under any policy."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        is_eager=st.booleans(),
        per_step=st.integers(1, 3),
        max_lag=st.integers(0, 3),
        is_auto=st.booleans(),
        filters=st.booleans(),
        too_long=st.sets(st.integers(0, 13), max_size=6),
        max_attempts=st.sampled_from([3, 100]),
    )
    def start(self, policy, is_eager, per_step, max_lag, is_auto, filters, too_long, max_attempts):
        self.policy, self.per_step, self.count, self.max_attempts = policy, per_step, 14, max_attempts
        self.is_eager = is_eager
        self.is_auto = is_auto and policy in ("wait", "drop")
        self.max_lag = max(1, max_lag) if self.is_auto else max_lag
        chosen = {"max_lag": "auto", "auto_lag": AutoLagConfig(max=self.max_lag)} if self.is_auto else {}
        settings = {"max_lag": max_lag, "policy": policy, "is_eager": is_eager, "max_attempts": max_attempts} | chosen
        self.buffer = make_buffer(self.count, per_step, too_long=too_long, filters=filters, **settings)
        self.bounds: dict[str, int] = {}  # of every lease
        self.version = 0
        self.buffer.trained(v(0))
        self.leases: dict[str, tuple[Lease, int]] = {}
        self.trained: list[int] = []

    @rule(holder=st.sampled_from("ab"))
    def lease(self, holder):
        if (lease := self.buffer.lease(holder, 0.0)) is not None:
            assert self.buffer._attempts[lease.prompt_index] < self.max_attempts
            self.leases[lease.lease_id] = lease, self.version
            self.bounds[lease.lease_id] = self.buffer.max_lag

    @precondition(lambda self: self.is_auto)
    @rule(data=st.data())
    def change_the_bound(self, data):
        low, waited = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.5]))
        for _ in range(AutoLag.STEPS):
            self.buffer.step_ended(v(self.version), {0: 1.0, self.buffer.max_lag: 0.1 if low else 1.0}, waited)
        assert 1 <= self.buffer.max_lag <= self.max_lag

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), scores=st.sampled_from([(0.0, 1.0), (1.0, 1.0), (1.0, None)]), twice=st.booleans())
    def deliver(self, data, scores, twice):
        lease, version = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        newest = data.draw(st.integers(version, self.version))
        versions = (version, newest) if newest > version else (version,)
        known = self.buffer._leased(lease.lease_id) is not None
        if scores[1] is None and not self.buffer._filters:
            scores = (0.0, 1.0)
        group = spanning(lease, *versions, scores=scores)
        assert (self.buffer.accept(group, b"") is None) == known
        assert not twice or self.buffer.accept(group, b"") == ("duplicate" if known else "no_such_lease")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data):
        self.buffer.fail(self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))[0].lease_id, "failed")

    @rule(holder=st.sampled_from("ab"))
    def lose(self, holder):
        for lease_id in self.buffer.release(holder):
            del self.leases[lease_id]

    @rule()
    def step(self):
        batch = self.buffer.take(v(self.version))
        for entry in self.buffer.cancelled():
            assert self.policy == "drop"
            del self.leases[entry.lease.lease_id]
        if batch is None:
            return
        lags = [self.version - entry.oldest.number for entry in batch]
        if self.policy != "train":
            bounds = [self.bounds[entry.lease.lease_id] for entry in batch]
            assert all(lag <= bound <= self.max_lag for lag, bound in zip(lags, bounds, strict=True))
        left = self.buffer.count(State.READY) + self.buffer.count(State.LEASED) + self.buffer._prompts.has_next
        assert len(batch) == self.per_step or not left
        self.trained += [entry.prompt_index for entry in batch]
        self.version += 1
        self.buffer.trained(v(self.version))
        for entry in self.buffer.cancelled():
            del self.leases[entry.lease.lease_id]

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "buffer"):
            balance(self.buffer)
            entries = list(self.buffer._entries.values())
            assert len(entries) <= (self.max_lag + 1) * self.per_step
            assert all(self.buffer.count(state) == sum(e.state is state for e in entries) for state in State)
            for holder in "ab":
                held = sum(e.holder == holder and e.state is State.LEASED for e in entries)
                assert self.buffer.held_by(holder) == held
            if self.policy == "wait":
                assert not self.buffer.outcomes["dropped_stale"], "it drops nothing for its age"

    @rule()
    def fill(self):
        """No slot is lost: if all slots are wanted, what no group holds can be leased as long as there are prompts."""
        free = (self.buffer.max_lag + 1) * self.per_step - sum(self.buffer.count(state) for state in State)
        before = len(self.leases)
        for _ in range(free + 1):
            self.lease("a")
        granted = len(self.leases) - before
        assert granted <= max(free, 0)
        one_works_alone = (
            self.buffer._prompts.next_isolated_index is not None or self.buffer._isolated._alone is not None
        )
        if self.is_eager:
            assert granted == max(free, 0) or one_works_alone or not self.buffer._prompts.has_next

    def teardown(self):
        """From wherever we are, every prompt is trained once, filtered, or counted, in the end."""
        if not hasattr(self, "buffer"):
            return
        self.lose("a")
        self.lose("b")
        for _ in range(100):
            while (lease := self.buffer.lease("a", 0.0)) is not None:
                self.bounds[lease.lease_id] = self.buffer.max_lag
                assert self.buffer.accept(spanning(lease, self.version), b"") is None
            self.step()
        assert self.buffer.exhausted
        reasons = ("failed", "always_stale", "poison", "quarantined", "too_long")
        done = sum(self.buffer.outcomes[f"dropped_{reason}"] for reason in reasons)
        done += self.buffer.outcomes["filtered_zero_signal"]
        assert len(self.trained) == len(set(self.trained)) == self.count - done


TestAnyPolicy = AnyPolicy.TestCase
TestAnyPolicy.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- admission just in time --------------------------------------------------------------------------------------------

SLOTS = 144


def begun(in_flight: int = 96, ready: int = 48) -> JustInTime:
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
    buffer = make_buffer(count=200, per_step=4, max_lag=8, is_eager=False)
    buffer.trained(v(0))
    leases = lease_all(buffer)
    assert len(leases) == 9 * 4, "nothing is measured yet"
    for version in range(40):  # whatever is leased is ready when the learner asks
        for lease in leases:
            assert buffer.accept(spanning(lease, version), b"") is None
        assert step(buffer, version) is not None
        leases = lease_all(buffer)
    assert buffer.wanted == buffer.count(State.LEASED) + buffer.count(State.READY) == 4


def test_a_learner_that_starves_gets_all_slots():
    admission = begun(0, 48)
    assert admission.wanted(SLOTS) == 48
    wanted = [see_step(admission, 10.0 * number, 48, 0, wait_s=5.0) for number in range(1, 8)]
    assert wanted[0] > 48 and sorted(wanted) == wanted and wanted[-1] == SLOTS
    assert admission.wanted(96) == 96, "the bound has become smaller"


@pytest.mark.parametrize("needed", [60, 100])
def test_the_learner_waits_for_a_twentieth_of_its_time_whatever_number_that_takes(needed):
    """Each group that is missing of `needed` makes it wait for 1/48 of a step. Any number in flight needs itself."""
    admission, waited = begun(), []
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
