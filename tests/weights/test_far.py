"""Generators on other machines follow by deltas over their own sockets, bit-identical, and by broadcast where that cannot be."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights import lane as lanes
from asyncgrpo.weights.arena import Layout, Staging
from asyncgrpo.weights.delta import Delta, State, encode
from asyncgrpo.weights.digest import add_digests, digest
from asyncgrpo.weights.lane import Arriving, DeltaLane, Transfer
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import Message
from asyncgrpo.wire.weights import DeltaPart, Offer, SyncFailed
from tests.weights.changing import LAYOUT, as_bytes, change


class Engine:
    """Holds a copy of what it was given at each version, byte for byte."""

    def __init__(self) -> None:
        self.held: dict[PolicyVersion, Tensor] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def newest(self) -> PolicyVersion | None:
        return max(self.held, default=None)

    def apply(self, tensors, version: PolicyVersion) -> str:
        self.may_go_on.wait(30.0)
        flat = self.held[version] = as_bytes(tensors)
        return add_digests([digest(flat)])


class Fleet:
    """A publisher, receivers that are not on its machine, and the bytes of every version that was published."""

    def __init__(self, config: WeightsConfig) -> None:
        self.publisher = Publisher(config, maps=False, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None)
        self.publisher.start(list(LAYOUT.tensors))
        self.receivers: list[Receiver] = []
        self.truth: dict[PolicyVersion, Tensor] = {}
        self.flat = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
        self.random = np.random.default_rng(0)

    def add(self, name: str, engine: Engine | None = None, incarnation: str = "0") -> Engine:
        engine = engine or Engine()
        receiver = Receiver(
            self.publisher.endpoint,
            generator_id=name,
            incarnation=incarnation,
            host="127.0.0.1",
            apply=engine.apply,
            keys=None,
        )
        receiver.start()
        self.receivers.append(receiver)
        wait_until(lambda: name in self.publisher.generators, f"{name} in touch")
        return engine

    def change(self, share: float) -> None:
        """Give so many of the elements other bits, some of them those of NaN, infinities and -0.0."""
        self.flat = self.flat.clone()
        change(self.flat, share, self.random, lambda below: int(self.random.integers(0, below)))

    def offer(self, number: int, share: float) -> None:
        self.change(share)
        version, flat = PolicyVersion(1, number), self.flat
        self.truth[version] = flat

        def fill(layout: Layout, arena: Tensor) -> None:
            arena.copy_(flat)

        wait_until(lambda: self.publisher.offer(version, fill), "an arena")

    def publish(self, number: int, share: float) -> int:
        """Offer a version, and wait until everyone in touch has it. Returns the bytes that were sent."""
        self.offer(number, share)
        reports = []
        wait_until(lambda: reports.extend(self.publisher.reports()) or self.publisher.is_idle, f"rest at {number}")
        wait_until(lambda: reports.extend(self.publisher.reports()) or reports, f"a report of {number}")
        return sum(report.sent_bytes for report in reports if report.version.number == number)

    def check(self, *engines: Engine) -> None:
        """Every version that an engine was ever given is the one that was published under this number."""
        for engine in engines:
            assert engine.held
            for version, flat in engine.held.items():
                assert torch.equal(flat, self.truth[version]), version

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.stop()
        self.publisher.close()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s"
        time.sleep(0.002)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet(WeightsConfig(bucket_mb=1, timeout_s=10.0))
    yield made
    made.close()


WHOLE = LAYOUT.num_bytes


def test_a_small_change_goes_to_each_by_itself_and_forms_no_group(fleet):
    engines = [fleet.add("generator-0"), fleet.add("generator-1")]
    assert fleet.publish(0, 1.0) == 2 * WHOLE
    for number in range(1, 6):
        assert 0 < fleet.publish(number, 0.01) < 2 * WHOLE / 10
    assert 0 < fleet.publish(6, 0.0) < 500, "nothing changed"
    assert fleet.publisher._lane.number == 1, "of the first broadcast"
    fleet.check(*engines)
    assert all(len(engine.held) == 7 for engine in engines)


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_updates_reaches_everyone_bit_identical(fleet, seed):
    """Versions are skipped, generators come, leave without a word and come again, and some changes are large."""
    chance, number = random.Random(seed), 0
    engines = [fleet.add("generator-0"), fleet.add("generator-1")]
    fleet.publish(0, 1.0)
    for event in chance.sample(["burst", "newcomer", "rejoin", "stall", "large", "small"] * 2, 12):
        if event == "burst":
            for _ in range(5):
                number += 1
                fleet.offer(number, 0.01)
        elif event == "newcomer":
            engines.append(fleet.add(f"generator-{len(engines)}"))
        elif event == "rejoin":
            fleet.receivers[0].stop()
            engines.append(fleet.add("generator-0", incarnation=str(number)))
        elif event == "stall":
            engines[-1].may_go_on.clear()
            threading.Timer(0.1, engines[-1].may_go_on.set).start()
        number += 1
        fleet.publish(number, 1.0 if event == "large" else 0.005)
        assert PolicyVersion(1, number) == engines[-1].newest
    fleet.check(*engines)


def test_a_slow_one_holds_up_nobody_and_follows_by_the_chain(fleet):
    quick, slow = fleet.add("generator-0"), fleet.add("generator-1")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    slow.may_go_on.clear()
    for number in range(2, 6):
        fleet.offer(number, 0.005)
        wait_until(lambda number=number: quick.newest == PolicyVersion(1, number), "version of the quick one", 5.0)
    assert slow.newest == PolicyVersion(1, 1)
    slow.may_go_on.set()
    wait_until(lambda: slow.newest == PolicyVersion(1, 5) and fleet.publisher.is_idle, "version of the slow one")
    assert fleet.publisher._lane.number == 1, "it needed no broadcast"
    fleet.check(quick, slow)


def test_a_newcomer_gets_all_weights_and_the_others_are_not_asked_to_join_in(fleet):
    first = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    second = fleet.add("generator-1")
    wait_until(lambda: second.newest == PolicyVersion(1, 1), "version of the newcomer")
    assert fleet.publisher._lane.names == {"generator-1"}
    wait_until(lambda: fleet.publisher.is_idle, "rest")
    assert fleet.publish(2, 0.01) < 2 * WHOLE / 10
    assert len(first.held) == 3
    fleet.check(first, second)


def test_one_that_leaves_costs_the_others_no_delta(fleet):
    """Though they were in one group when all weights were broadcast."""
    engine, leaves = fleet.add("generator-0"), fleet.add("generator-1", incarnation="7")
    fleet.publish(0, 1.0)
    is_there, goes_on = threading.Event(), threading.Event()
    update = fleet.receivers[0]._updated

    def slow(*arguments):
        is_there.set()
        goes_on.wait(10.0)
        return update(*arguments)

    fleet.receivers[0]._updated = slow
    fleet.offer(1, 0.01)
    assert is_there.wait(10.0)
    fleet.publisher.dismiss(("generator-1-7",))
    wait_until(lambda: fleet.publisher.generators == ["generator-0"], "end of the other")
    goes_on.set()
    wait_until(lambda: fleet.publisher.is_idle, "rest")
    assert fleet.publisher._lane.number == 1 and fleet.publisher._members["generator-0"].failures == 0
    fleet.check(engine, leaves)


class Line:
    """The publisher's socket; `fault` may change the payload of a part, or return None: it is lost."""

    def __init__(self, server, fault: Callable[[DeltaPart, bytes], bytes | None]) -> None:
        self._server, self._fault = server, fault

    def __getattr__(self, name: str):
        return getattr(self._server, name)

    def send(self, peer: str, message: Message, payload=b"") -> bool:
        if isinstance(message, DeltaPart):
            payload = self._fault(message, bytes(payload))
            if payload is None:
                return True
        return self._server.send(peer, message, payload)


def once(change: Callable[[bytes], bytes | None]) -> Callable[[DeltaPart, bytes], bytes | None]:
    left = [change]
    return lambda part, payload: left.pop()(payload) if left else payload


def flip(payload: bytes, at: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]


@pytest.mark.parametrize(
    "fault",
    [
        lambda payload: None,
        lambda payload: flip(payload, 3),  # the format
        lambda payload: flip(payload, 16),  # the base
        lambda payload: flip(payload, len(payload) - 20),  # a weight
        lambda payload: payload[:-8],
    ],
    ids=["lost", "no delta", "another base", "another weight", "cut"],
)
def test_deltas_that_went_wrong_are_never_swapped_to_and_all_weights_come_instead(fleet, fault, monkeypatch):
    monkeypatch.setattr(liveness, "TAKES_PART_WITHIN_S", 1.0)
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publisher._server = Line(fleet.publisher._server, once(fault))
    sent = fleet.publish(1, 0.01)
    assert WHOLE < sent < 1.2 * WHOLE, "a delta in vain, and a broadcast"
    assert list(engine.held) == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
    assert fleet.publish(2, 0.01) < WHOLE / 10
    fleet.check(engine)


def test_the_copy_that_versions_are_compared_with_is_right_again_after_each(fleet):
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    fleet.change(0.01)
    fleet.publisher._deltas._mirror.copy_(fleet.flat)  # so that what changed is not seen
    assert fleet.publish(2, 0.0) > WHOLE
    assert fleet.publish(3, 0.01) < WHOLE / 10
    fleet.check(engine)


def test_one_that_starts_again_under_its_name_is_sent_all_weights_at_once(fleet):
    fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    fleet.receivers[0].stop()
    again = fleet.add("generator-0", incarnation="1")
    wait_until(lambda: again.newest == PolicyVersion(1, 1), "its weights")
    reports = []
    wait_until(lambda: reports.extend(fleet.publisher.reports()) or reports, "report")
    assert [(report.attempts, report.sent_bytes) for report in reports] == [(1, WHOLE)]
    fleet.check(again)


def test_whoever_was_offered_weights_and_has_not_replied_may_hold_anything(fleet):
    fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    publisher = fleet.publisher
    assert publisher._deltas.path("generator-0", WHOLE) == []
    publisher._offered("generator-0", publisher._members["generator-0"], PolicyVersion(1, 2), "", WHOLE)
    assert publisher._deltas.path("generator-0", WHOLE) is None


def test_a_receiver_without_the_base_says_so(fleet):
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.receivers[0]._stagings[0].holds = None  # as after memory that was lost
    assert fleet.publish(1, 0.01) > WHOLE
    fleet.check(engine)


def test_publications_that_change_everything_are_broadcast_and_soon_not_compared(fleet, monkeypatch):
    compared = []
    update = lanes.follow
    monkeypatch.setattr(lanes, "follow", lambda *arguments: compared.append(1) or update(*arguments))
    engine = fleet.add("generator-0")
    for number in range(20):
        assert fleet.publish(number, 1.0) == WHOLE
    assert 1 <= len(compared) <= 3
    assert fleet.publisher._lane.number == 1, "one group serves all broadcasts"
    fleet.check(engine)


def test_the_learner_may_write_both_arenas_while_a_version_is_compared(fleet, monkeypatch):
    """What is compared is not written, and what it is compared with is in no arena."""
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    began, goes_on = threading.Event(), threading.Event()
    update = lanes.follow

    def slow(*arguments):
        began.set()
        goes_on.wait(10.0)
        return update(*arguments)

    monkeypatch.setattr(lanes, "follow", slow)
    fleet.offer(1, 0.01)
    assert began.wait(10.0)
    fleet.offer(2, 0.01)
    fleet.offer(3, 0.01)
    goes_on.set()
    wait_until(lambda: engine.newest == PolicyVersion(1, 3) and fleet.publisher.is_idle, "the last version")
    assert PolicyVersion(1, 1) in engine.held, "by the delta that was being made"
    assert fleet.publisher._lane.number == 1
    fleet.check(engine)


def test_whoever_wants_no_deltas_gets_none():
    fleet = Fleet(WeightsConfig(bucket_mb=1, timeout_s=10.0, deltas=False))
    try:
        engine = fleet.add("generator-0")
        assert [fleet.publish(number, 0.01) for number in range(3)] == [WHOLE] * 3
        assert fleet.publisher._deltas._mirror is None
        fleet.check(engine)
    finally:
        fleet.close()


def test_on_the_learners_machine_nothing_is_compared():
    publisher = Publisher(WeightsConfig(), maps=True, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None)
    publisher.start(list(LAYOUT.tensors))
    engine = Engine()
    receiver = Receiver(
        publisher.endpoint, generator_id="g", incarnation="0", host="127.0.0.1", apply=engine.apply, keys=None
    )
    receiver.start()
    try:
        assert publisher.offer(PolicyVersion(1, 0), lambda layout, arena: None)
        wait_until(lambda: engine.held and publisher.is_idle, "a version")
        assert publisher._deltas._mirror is None and not publisher._deltas.is_busy
    finally:
        receiver.stop()
        publisher.close()


# -- a generator's memory ----------------------------------------------------------------------------------------------


def with_the_base_of(delta: Delta) -> tuple[Receiver, Layout]:
    """A receiver, not started, that holds it."""
    receiver = Receiver("", generator_id="g", incarnation="0", host="", apply=lambda tensors, version: "", keys=None)
    layout = Layout([TensorInfo(name="w", shape=(delta.num_bytes,), dtype="uint8")])
    receiver._stagings = [Staging(layout)]
    receiver._stagings[0].holds = delta.before
    return receiver, layout


def test_deltas_are_applied_in_place_but_never_to_what_the_engine_is_loading():
    delta = a_delta()
    receiver, layout = with_the_base_of(delta)
    (first,) = receiver._stagings
    receiver._swapping = first.tensors()
    second, found = receiver._updated(layout, [delta])
    assert second is not first and found == delta.after.digest
    assert not first.flat.any() and first.holds == delta.before
    receiver._swapping = None
    assert receiver._updated(layout, [delta]) == (first, delta.after.digest)


def test_deltas_start_from_the_memory_that_they_name():
    delta = a_delta(share=0.01)
    receiver, layout = with_the_base_of(delta)
    receiver._stagings.insert(0, Staging(layout))
    receiver._stagings[0].flat.fill_(5)
    receiver._swapping = receiver._stagings[1].tensors()
    staging, found = receiver._updated(layout, [delta])
    assert staging is receiver._stagings[0] and found == delta.after.digest


def test_memory_into_which_weights_came_in_part_is_no_base():
    delta = a_delta()
    receiver, layout = with_the_base_of(delta)
    with pytest.raises(WeightsError, match="not in group 1"):
        receiver._broadcast(layout, Offer(version=PolicyVersion(1, 1), digest="", group_number=1))
    with pytest.raises(WeightsError, match="does not hold"):
        receiver._updated(layout, [delta])


# -- the parts ---------------------------------------------------------------------------------------------------------


def a_delta(size: int = 2**16, share: float = 0.1) -> Delta:
    base = torch.zeros(size, dtype=torch.uint8)
    new = base.clone()
    new[torch.from_numpy(np.random.default_rng(0).random(size) < share)] = 1
    states = [State(PolicyVersion(1, n), add_digests([digest(f)])) for n, f in enumerate((base, new))]
    return Delta(states[0], states[1], size, encode(new, base, Layout(
        [TensorInfo(name="w", shape=(size,), dtype="uint8")]).spans))  # fmt: skip


def test_no_more_is_sent_ahead_than_a_slow_generator_may_cost_memory():
    sent: list[tuple[DeltaPart, bytes]] = []
    transfer = Transfer(7, [a_delta(), a_delta()], 1000)

    def send(name: str, message: Message, payload) -> bool:
        assert isinstance(message, DeltaPart)
        sent.append((message, bytes(payload)))
        return True

    transfer.go_on("g", send)
    assert len(sent) == lanes.PARTS_AHEAD
    arriving = Arriving(Offer(version=PolicyVersion(1, 1), digest="", transfer=7, delta_bytes=(
        a_delta().packed_bytes,) * 2), 2**20)  # fmt: skip
    for message, payload in sent:  # grows meanwhile
        arriving.add(message.start, payload)
        arriving.add(message.start, payload)  # twice is once
        transfer.taken = arriving.taken
        transfer.go_on("g", send)
        assert message.start + len(payload) <= arriving.taken
    assert arriving.is_whole and transfer.is_whole
    assert [bytes(delta.to_bytes()) for delta in arriving.deltas()] == [bytes(a_delta().to_bytes())] * 2


def test_parts_that_fit_no_place_are_refused():
    offer = Offer(version=PolicyVersion(1, 1), digest="", transfer=7, delta_bytes=(100,))
    arriving = Arriving(offer, 1000)
    arriving.add(0, bytes(50))
    for start, size in ((51, 10), (50, 51), (1000, 1)):
        with pytest.raises(WeightsError, match="came after 50 of 100"):
            arriving.add(start, bytes(size))
    assert arriving.taken == 50
    for sizes in ((2000,), (), (-5, 10)):
        with pytest.raises(WeightsError, match="were offered for weights of 1000"):
            Arriving(Offer(version=PolicyVersion(1, 1), digest="", transfer=7, delta_bytes=sizes), 1000)


def test_word_of_a_transfer_that_is_over_counts_for_nothing(fleet):
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    member = fleet.publisher._members["generator-0"]
    fleet.publisher._sync_failed(
        "generator-0", member, SyncFailed(generator_id="generator-0", reason="late", poisoned=False, transfer=1)
    )
    assert member.failures == 0 and member.holds == PolicyVersion(1, 1)
    assert fleet.publish(2, 0.01) < WHOLE / 10
    fleet.check(engine)


@pytest.mark.parametrize(
    ("generators", "broadcast_s", "most"),
    [
        (1, math.inf, WHOLE // 4),
        (1, 1.0, WHOLE // 4),  # a slow network
        (64, 2e-3, 15_625),  # a fast one: whoever encrypts a quarter of the weights 64 times is slower
        (8, 2e-4, 12_500),
    ],
)
def test_deltas_are_sent_where_that_is_less_and_quicker_than_a_broadcast(generators, broadcast_s, most):
    assert lanes.delta_byte_budget(WHOLE, generators, broadcast_s) == most


def test_a_delta_that_is_larger_than_it_may_be_is_not_sent():
    lane = DeltaLane(2**20)
    flat = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)

    def follow(number: int) -> None:
        state = State(PolicyVersion(1, number), add_digests([digest(flat)]))
        assert lane.wants(state)
        lane.follow(state, LAYOUT, flat.clone(), WHOLE)
        wait_until(lane.poll, "end of the comparison")

    follow(0)
    lane.received("g", lane._tip)
    flat[:10_000:2] = 1
    follow(1)
    (delta,) = lane.path("g", WHOLE)
    assert lane.path("g", delta.packed_bytes) is not None
    assert lane.path("g", delta.packed_bytes - 1) is None
    lane.close()
