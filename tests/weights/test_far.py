"""Generators on other machines follow by deltas, bit-identical, and by all weights where that cannot be."""

import errno
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncgrpo import scratch
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.scratch import SHARED_MEMORY
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import lane as lanes
from asyncgrpo.weights import publisher
from asyncgrpo.weights.arena import Arenas
from asyncgrpo.weights.lane import Deltas
from asyncgrpo.weights.receiver import Receiver
from tests.weights.changing import LAYOUT, Engine, Fleet, change
from tests.weights.publishing import wait_until


class Far(Fleet):
    """Receivers that are not on the learner's machine, and weights that change."""

    def __init__(self, config: WeightsConfig) -> None:
        super().__init__(config, maps=False)
        self.flat = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
        self.random = np.random.default_rng(0)

    def add(self, name: str, engine: Engine | None = None, incarnation: str = "0", machine: str = "") -> Engine:
        return super().add(name, engine, incarnation, machine or name)

    def change(self, share: float) -> None:
        """Give so many of the elements other bits, some of them those of NaN, infinities and -0.0."""
        self.flat = self.flat.clone()
        change(self.flat, share, self.random, lambda below: int(self.random.integers(0, below)))

    def offer(self, number: int, share: float) -> None:
        self.change(share)
        self.put(number, self.flat)

    def publish(self, number: int, share: float) -> int:
        """Offer a version, and wait until everyone in touch has it. Returns the bytes that were sent."""
        self.offer(number, share)
        reports = []
        wait_until(lambda: reports.extend(self.publisher.reports()) or self.publisher.is_idle, f"rest at {number}")
        wait_until(lambda: reports.extend(self.publisher.reports()) or reports, f"a report of {number}")
        return sum(report.sent_bytes for report in reports if report.version.number == number)


@pytest.fixture
def fleet(request, monkeypatch) -> Iterator[Far]:
    """Comparing counts as faster than a broadcast: on loopback it may not be."""
    poll = Deltas.poll
    monkeypatch.setattr(Deltas, "poll", lambda deltas, broadcast_s: poll(deltas, math.inf))
    made = Far(WeightsConfig(bucket_mb=1, timeout_s=10.0, **getattr(request, "param", {})))
    yield made
    made.close()


WHOLE = LAYOUT.num_bytes


def staged(receiver: Receiver) -> Arenas:
    """The buffer in which it received first."""
    return next(iter(receiver._stagings.values()))


def test_a_slow_one_holds_up_nobody_and_follows_by_deltas(fleet):
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


def test_a_newcomer_gets_all_weights_alone_and_deltas_with_the_others(fleet):
    first = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    second = fleet.add("generator-1")
    wait_until(lambda: second.newest == PolicyVersion(1, 1), "version of the newcomer")
    assert fleet.publisher._lane.names == {"generator-1"}
    wait_until(lambda: fleet.publisher.is_idle, "rest")
    assert fleet.publish(2, 0.01) < 2 * WHOLE / 10
    assert fleet.publisher._lane.names == {"generator-0", "generator-1"} and len(first.held) == 3
    fleet.check(first, second)


def test_what_is_published_while_a_newcomer_receives_all_weights_reaches_the_others_by_deltas(fleet, monkeypatch):
    first = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    began, goes_on, send = threading.Event(), threading.Event(), lanes.send

    def slow(group, flat, buckets):
        if len(flat) == WHOLE:
            began.set()
            goes_on.wait(10.0)
        send(group, flat, buckets)

    monkeypatch.setattr(lanes, "send", slow)
    second = fleet.add("generator-1")
    assert began.wait(10.0)
    deltas = fleet.publisher._deltas
    fleet.offer(1, 0.01)
    wait_until(lambda: deltas.newest is not None, "the comparison")
    for number in (2, 3):
        fleet.offer(number, 0.01)
        wait_until(lambda: not deltas.is_busy and fleet.publisher._preparing is None, "the next version")
    goes_on.set()
    wait_until(lambda: fleet.publisher.is_idle and second.newest == PolicyVersion(1, 3), "the last version")
    sent = {report.version.number: report.sent_bytes for report in fleet.publisher.reports()}
    assert sum(sent.values()) < 2.5 * WHOLE and PolicyVersion(1, 1) in first.held, sent
    fleet.check(first, second)


def test_the_digests_of_a_delta_are_known_until_all_have_it(fleet, monkeypatch):
    """Two engines keep both files of a machine busy while many newer versions are published."""
    monkeypatch.setattr(publisher, "VERSIONS_KEPT", 3)
    engines = [fleet.add(name, machine="m") for name in "ab"]
    fleet.publish(0, 1.0)
    for number, (engine, receiver) in enumerate(zip(engines, fleet.receivers, strict=True), 1):
        engine.may_go_on.clear()
        fleet.offer(number, 0.01)
        wait_until(lambda receiver=receiver: receiver._swapping, "the load")
    for number in range(3, 10):
        fleet.offer(number, 0.01)
        wait_until(lambda number=number: PolicyVersion(1, number) in fleet.publisher._sent, "the digests")
    for engine in engines:
        engine.may_go_on.set()
    wait_until(lambda: fleet.publisher.is_idle, "rest")
    assert [engine.newest.number for engine in engines] == [9, 9]
    fleet.check(*engines)


def flip(payload: bytes, at: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]


@pytest.mark.parametrize(
    "fault",
    [
        lambda payload: flip(payload, 0),
        lambda payload: payload.replace(b"\x92\x01\x00", b"\x92\x02\x00", 1),
        lambda payload: flip(payload, len(payload) - 20),
        lambda payload: payload[:-8],
    ],
    ids=["no delta", "another base", "another weight", "cut"],
)
def test_deltas_that_went_wrong_are_never_swapped_to_and_all_weights_come_instead(fleet, fault, monkeypatch):
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    to_bytes, faults = lanes.to_bytes, [fault]

    def wrong(delta):
        payload = to_bytes(delta)
        if not faults:
            return payload
        altered = faults.pop()(payload)
        assert altered != payload
        return altered

    monkeypatch.setattr(lanes, "to_bytes", wrong)
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


@pytest.mark.parametrize("fleet", [{"deltas": False}], indirect=True)
def test_whoever_wants_no_deltas_gets_none(fleet):
    engine = fleet.add("generator-0")
    assert [fleet.publish(number, 0.01) for number in range(3)] == [WHOLE] * 3
    assert fleet.publisher._deltas._mirror is None
    fleet.check(engine)


def test_comparisons_that_take_longer_than_a_broadcast_or_find_too_much_make_no_delta():
    flat = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)

    def compare(deltas: Deltas, number: int, share: float, broadcast_s: float) -> PolicyVersion:
        change(flat, share, np.random.default_rng(number), lambda below: 0)
        version = PolicyVersion(1, number)
        assert deltas.wants(version)
        deltas.follow(LAYOUT, flat.clone())
        wait_until(lambda: deltas.poll(broadcast_s), "end of the comparison")
        return version

    for share, broadcast_s, pays in ((0.01, math.inf, True), (0.01, 0.0, False), (1.0, math.inf, False)):
        deltas = Deltas()
        first = compare(deltas, 0, 1.0, math.inf)
        newest = compare(deltas, 1, share, broadcast_s)
        assert deltas.leads_from(first) == deltas.follows(first) == deltas.follows(newest) == pays
        assert not deltas.wants(newest) and deltas.wants(PolicyVersion(1, 2)) == pays
        deltas.close()


def test_deltas_are_applied_in_place_but_never_to_what_the_engine_is_loading(fleet):
    engine = fleet.add("generator-0")
    fleet.publish(0, 1.0)
    fleet.publish(1, 0.01)
    receiver = fleet.receivers[0]
    assert len(receiver._stagings) == 1, "in place"
    engine.may_go_on.clear()
    fleet.offer(2, 0.01)
    wait_until(lambda: receiver._swapping is not None, "the swap")
    fleet.offer(3, 0.01)
    place = fleet.publisher._members["generator-0"].place
    wait_until(lambda: place.version == PolicyVersion(1, 3), "the delta")
    assert torch.equal(staged(receiver).arena(LAYOUT), fleet.truth[PolicyVersion(1, 2)])
    engine.may_go_on.set()
    wait_until(lambda: fleet.publisher.is_idle, "rest")
    assert engine.newest == PolicyVersion(1, 3)
    fleet.check(engine)


# -- several generators of a machine -----------------------------------------------------------------------------------


def test_one_generator_of_a_machine_receives_for_all_and_no_other_is_in_the_group(fleet):
    engines = [fleet.add(name, machine=machine) for name, machine in (("a", "m"), ("b", "m"), ("c", "n"))]
    assert fleet.publish(0, 1.0) == 2 * WHOLE
    fleet.publish(1, 0.01)
    group = fleet.publisher._lane.number
    assert fleet.publisher._lane.names == {"a", "c"}
    fleet.receivers[1].stop()
    fleet.publisher.give_up("b", "0")
    wait_until(lambda: "b" not in fleet.publisher._members, "the loss")
    engines.append(fleet.add("d", machine="m"))
    wait_until(lambda: engines[-1].newest == PolicyVersion(1, 1), "weights that are there already")
    assert 0 < fleet.publish(2, 0.01) < WHOLE / 10
    assert fleet.publisher._lane.number == group and fleet.receivers[3]._stagings == {}
    fleet.check(*engines)


def test_when_the_receiver_of_a_machine_ends_another_one_receives_everything(fleet):
    first, second = fleet.add("a", machine="m"), fleet.add("b", machine="m")
    fleet.publish(0, 1.0)
    fleet.receivers[0].stop()
    fleet.publisher.give_up("a", "0")
    wait_until(lambda: "a" not in fleet.publisher._members, "the loss")
    fleet.publish(1, 0.01)
    assert fleet.publisher._lane.names == {"b"} and second.newest == PolicyVersion(1, 1)
    again = fleet.add("a", incarnation="1", machine="m")
    assert 0 < fleet.publish(2, 0.01) < WHOLE / 10
    assert again.newest == PolicyVersion(1, 2)
    fleet.check(first, second, again)


def test_what_a_generator_cannot_map_is_received_again_into_another_file(fleet):
    """The file is gone, as after the end of a receiver of which the publisher does not know yet."""
    first = fleet.add("a", machine="m")
    fleet.publish(0, 1.0)
    (lost,) = fleet.receivers[0]._stagings
    (SHARED_MEMORY / lost).unlink()
    second = fleet.add("b", machine="m")
    wait_until(lambda: second.newest == PolicyVersion(1, 0), "its weights")
    assert lost not in fleet.receivers[0]._stagings
    assert 0 < fleet.publish(1, 0.01) < WHOLE / 10
    fleet.check(first, second)


def test_a_machine_without_room_in_shared_memory_ends_the_run_by_its_name(fleet, monkeypatch):
    def files() -> set[Path]:
        return set(SHARED_MEMORY.glob(f"{scratch.mark()}-received-*"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fleet.add("a", machine="m")
    before = files()
    with pytest.raises(WeightsError, match=r"to a 3 times: .* do not fit into /dev/shm .*--shm-size="):
        fleet.publish(0, 1.0)
    wait_until(lambda: files() <= before, "end of the file of an attempt, after the third of which another may begin")
