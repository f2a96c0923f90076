"""Weights reach real receiver threads over a real group, whatever happens to some of them on the way."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError, WeightsError
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, Digests, Layout
from asyncgrpo.weights.publication import Checksum, Publication
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.sockets import Client, Server
from asyncgrpo.wire.weights import Alive, Join, Offer, Staged, Swapped, WeightsLayout
from tests.weights import changing
from tests.weights.changing import Fleet, drawn
from tests.weights.publishing import wait_until

LAYOUT = Layout(
    [
        TensorInfo(name="embed", shape=(7, 5), dtype="float32"),
        TensorInfo(name="norm", shape=(5,), dtype="bfloat16"),
        TensorInfo(name="big", shape=(700, 1000), dtype="float32"),
        TensorInfo(name="head", shape=(7, 5), dtype="float32"),
    ]
)


def weights(step: int) -> torch.Tensor:
    return drawn(step, LAYOUT)


class Engine(changing.Engine):
    def __init__(self) -> None:
        super().__init__(LAYOUT)


class Plane(Fleet):
    """Offers random weights, and reads the reports."""

    def __init__(self, kind: str) -> None:
        super().__init__(WeightsConfig(bucket_mb=1, timeout_s=3.0), maps=kind == "mapped", layout=LAYOUT)
        self._are_apart = kind == "apart"

    def add(self, name: str, engine: changing.Engine | None = None, incarnation: str = "0", machine: str = "") -> Any:
        return super().add(name, engine, incarnation, machine or (name if self._are_apart else ""))

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.publisher._members) == count, f"{count} generators")

    def offer(self, step: int) -> None:
        self.put(step, weights(step))

    def publish(self, step: int) -> Publication:
        """Offer a version, and wait until everyone that is there has it, or was left out."""
        self.offer(step)
        return self.publication(step)

    def publication(self, step: int) -> Publication:
        """The next report, which must be of this version."""
        found: list[Publication] = []
        wait_until(lambda: found.extend(self.publisher.reports()) or bool(found), f"a report of version {step}")
        assert found[0].version == at(step), found
        return found[0]


@pytest.fixture(params=["mapped", "together", "apart"])
def plane(request) -> Iterator[Plane]:
    """Generators that map the learner's memory, that are together on another machine, or each on one."""
    made = Plane(request.param)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch):
    """For tests in which somebody says nothing; in all others a thread may wait for its turn."""
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.5)


def at(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def test_one_that_leaves_gets_no_more_weights_and_breaks_no_publication(plane):
    plane.add("generator-0")
    leaves = plane.add("generator-1", incarnation="7")
    plane.publish(0)
    plane.publisher.dismiss(("generator-1-7",))
    plane.wait_for(1)
    publication = plane.publish(1)
    assert (publication.generators, publication.attempts, publication.dropped) == (("generator-0",), 1, ())
    assert list(leaves.held) == [at(0)]
    plane.receivers[1].stop()
    plane.add("generator-1", leaves, "8")
    plane.publication(1)
    assert plane.publish(2).generators == ("generator-0", "generator-1")
    plane.check(leaves)


@pytest.mark.usefixtures("impatient")
def test_a_generator_that_is_gone_is_left_out_and_named(plane):
    alive, dying = (plane.add(f"generator-{index}") for index in range(2))
    plane.publish(0)
    plane.receivers[1].stop()
    wait_until(lambda: not plane.receivers[1].is_alive, "its end")
    publication = plane.publish(1)
    assert publication.generators == ("generator-0",)
    wait_until(lambda: plane.publisher.missing == ("generator-1-0",), "one that is missing")
    assert plane.publish(2).dropped == ("generator-1",)
    assert len(plane.publisher._elsewhere) <= 1, "its machine is forgotten"
    assert (alive.newest, dying.newest) == (at(2), at(0))
    plane.check(alive)


def test_whoever_does_not_swap_holds_up_nobody_and_comes_back_by_itself(plane):
    quick, frozen = plane.add("generator-0"), plane.add("generator-1", incarnation="1.4")
    plane.publish(0)
    assert plane.publisher.missing == ()
    frozen.may_go_on.clear()
    for step in (1, 2, 3):
        plane.offer(step)
        wait_until(lambda step=step: quick.newest == at(step), "a swap of the other one", 5.0)
    wait_until(lambda: plane.publisher.missing == ("generator-1-1.4",), "the one that is left out")
    frozen.may_go_on.set()
    wait_until(lambda: plane.publisher.missing == () and frozen.newest == at(3), "its return")
    wait_until(lambda: plane.publisher.is_idle, "rest")
    plane.publisher.reports()
    assert plane.publish(4).generators == ("generator-0", "generator-1")
    plane.check(frozen)


@pytest.mark.parametrize("plane", ["mapped"], indirect=True)
def test_a_swap_has_the_time_of_a_copy_beside_the_deadline(plane, monkeypatch):
    slow = plane.add("generator-0")
    plane.publish(0)
    slow.may_go_on.clear()
    plane.offer(1)
    member = plane.publisher._members["generator-0"]
    wait_until(lambda: member.offered == at(1), "offer to it")
    monkeypatch.setattr(liveness, "copy_s", lambda num_bytes: 500.0 if num_bytes == LAYOUT.num_bytes else 0.0)
    member.offered_s -= 400.0
    heard_s = member.heard_s
    wait_until(lambda: member.heard_s > heard_s + 1.0, "heartbeats")
    assert not member.is_late
    member.offered_s -= 200.0
    wait_until(lambda: member.is_late, "the end of its time")
    slow.may_go_on.set()
    wait_until(lambda: slow.newest == at(1) and not member.is_late, "its return")


def test_whoever_is_given_up_is_not_waited_for(plane, monkeypatch):
    monkeypatch.setattr(
        plane.publisher, "_config", WeightsConfig(bucket_mb=1, timeout_s=600.0)
    )  # nobody would wait for this
    plane.add("generator-0")
    frozen = plane.add("generator-1", incarnation="1.4")
    plane.publish(0)
    frozen.may_go_on.clear()
    plane.publisher.give_up("generator-1", "1.3")  # the one before it
    plane.offer(1)
    wait_until(lambda: plane.publisher._members["generator-1"].offered == at(1), "offer to it")
    plane.publisher.give_up("generator-1", "1.4")
    publication = plane.publication(1)
    assert publication.generators == ("generator-0",) and publication.dropped == ("generator-1",)
    assert plane.publisher.missing == (), "the driver knows of it"
    frozen.may_go_on.set()


@pytest.mark.parametrize("plane", ["apart"], indirect=True)
@pytest.mark.usefixtures("impatient")
def test_when_all_are_gone_the_next_that_comes_gets_the_version(plane):
    for index in range(2):
        plane.add(f"generator-{index}")
    plane.publish(0)
    for receiver in plane.receivers:
        receiver.stop()
    plane.wait_for(0)
    plane.offer(1)
    replacement = plane.add("generator-0", incarnation="1")
    assert plane.publication(1).generators == ("generator-0",)
    plane.check(replacement)


def test_versions_that_come_faster_than_they_travel_are_skipped(plane):
    """And none is torn: the engine never holds a mixture, whatever was written to the arenas meanwhile."""

    class Slow(Engine):
        def apply(self, tensors, version: PolicyVersion) -> Checksum:
            time.sleep(0.15)
            return super().apply(tensors, version)

    slow, other = plane.add("generator-0", Slow()), plane.add("generator-1")
    offered = 0
    for step in range(60):
        offered += plane.try_to_put(step, weights(step))
        time.sleep(0.01)
    plane.offer(60)
    wait_until(lambda: plane.publisher.is_idle, "the last version")
    plane.check(slow, other)
    assert list(slow.held) == sorted(slow.held) and slow.newest == at(60)
    assert len(slow.held) < 40 and offered > 3
    assert all(receiver.failure is None for receiver in plane.receivers)
    assert all(publication.attempts == 1 for publication in plane.publisher.reports())


def test_a_version_whose_bytes_come_late_is_awaited_and_no_newer_one_takes_its_place(plane):
    """As from a rank on another machine, over a slow network, while steps go on."""
    engine, publisher = plane.add("generator-0"), plane.publisher
    late: dict[int, torch.Tensor] = {}
    has_come = threading.Event()

    def offer(step: int) -> bool:
        def fill(arenas: Arenas, slot: int) -> Callable[[], bool]:
            late[step] = arenas.arena(LAYOUT, slot)
            return has_come.is_set

        return publisher.offer(at(step), fill)

    assert offer(0) and offer(1)
    wait_until(lambda: publisher._preparing is not None, "a look at the bytes")
    awaited = publisher._preparing.version.number
    assert offer(2) and awaited not in (2, None) and publisher._preparing.version.number == awaited
    assert publisher._home.newest is None and not engine.held
    heard_s = publisher._members["generator-0"].heard_s
    wait_until(
        lambda: publisher._members["generator-0"].heard_s > heard_s + 0.5, "signs of life, which are read meanwhile"
    )
    for step, flat in late.items():
        flat.copy_(weights(step))
    has_come.set()
    wait_until(lambda: publisher.is_idle, "the last version")
    assert engine.newest == at(2) and plane.receivers[0].failure is None
    assert torch.equal(engine.held[at(2)], weights(2))


def test_a_version_whose_bytes_do_not_come_ends_the_publisher_with_the_reason(plane):
    def fill(arenas: Arenas, slot: int) -> Callable[[], bool]:
        def is_written() -> bool:
            raise WeightsError("not every rank has written its weights within 9 s")

        return is_written

    assert plane.publisher.offer(PolicyVersion(1, 0), fill)
    wait_until(lambda: plane.publisher._failure, "an end")
    with pytest.raises(WeightsError, match="not every rank has written"):
        plane.publisher.reports()


def test_an_arena_that_is_being_read_is_not_written(plane):
    publisher = plane.publisher

    def offer(step: int) -> None:
        plane.offer(step)
        wait_until(lambda: publisher._home.newest and publisher._home.newest.version.number == step, "a digest")

    offer(0)
    publisher._home.newest.readers.add("generator-0")
    for step in (1, 2):
        offer(step)  # into the other one, again and again: nobody has read it
    assert [slot.version.number for slot in publisher._home.slots] in ([0, 2], [2, 0])
    publisher._home.newest.readers.add("generator-1")
    assert not publisher.offer(PolicyVersion(1, 3), lambda arenas, slot: pytest.fail("it is being read"))
    publisher._release("generator-0")
    plane.offer(3)
    assert sorted(slot.version.number for slot in publisher._home.slots) == [2, 3]


@pytest.mark.parametrize("plane", ["mapped"], indirect=True)
def test_an_engine_on_the_learners_machine_loads_from_where_the_learner_has_written(plane):
    """Which it does not do again until the engine has loaded."""
    places, is_loading, go_on = [], threading.Event(), threading.Event()

    class Looks(Engine):
        def apply(self, tensors, version: PolicyVersion) -> Checksum:
            places.append((tensors.arenas.file, tensors.slot))
            is_loading.set()
            assert go_on.wait(30.0)
            tensors.require_intact()
            return super().apply(tensors, version)

    plane.add("generator-0", Looks())
    plane.offer(0)
    assert is_loading.wait(30.0)
    for step in (1, 2, 3):
        plane.offer(step)
    assert plane.publisher._home.slots[places[0][1]].version == PolicyVersion(1, 0)
    go_on.set()
    wait_until(lambda: plane.publisher.is_idle, "the last version")
    assert {file for file, _ in places} == {plane.publisher._arenas.file}
    assert plane.receivers[0]._stagings == {} and plane.receivers[0].failure is None


def test_an_engine_that_wakes_when_the_arena_was_written_again_fails():
    engine, arenas = FakeEngine(max_context=8), Arenas.create(LAYOUT)
    writes = 1
    arenas.begin(1, writes)
    mapped = Arenas(arenas.file)

    async def load() -> None:
        await engine.start(PolicyVersion(0, 0))
        await engine.load_weights(mapped.tensors(LAYOUT, 1, writes), PolicyVersion(0, 1))
        late = mapped.tensors(LAYOUT, 1, writes)
        arenas.begin(0, 1)
        await engine.load_weights(late, PolicyVersion(0, 2))
        arenas.begin(1, writes + 1)
        with pytest.raises(EngineError, match="weights were overwritten"):
            await engine.load_weights(late, PolicyVersion(0, 3))

    asyncio.run(load())
    with pytest.raises(WeightsError, match="were overwritten"):
        mapped.tensors(LAYOUT, 1, writes)
    for slot in (2, -1, 2**40):
        with pytest.raises(WeightsError, match="end at byte"):
            mapped.tensors(LAYOUT, slot, 0)
    arenas.close()


def failure_of(plane: Plane) -> str:
    with pytest.raises(WeightsError) as caught:
        wait_until(lambda: plane.publisher.reports() and False, "failure")
    return str(caught.value)


def test_engines_that_end_up_different_are_an_error(plane):
    class Corrupt(Engine):
        def apply(self, tensors, version: PolicyVersion) -> Checksum:
            return Checksum(super().apply(tensors, version).digest[::-1])

    plane.add("generator-0")
    plane.publish(0)
    corrupt = plane.add("generator-1", Corrupt())
    wait_until(lambda: corrupt.held, "first swap")  # else it may be alone with the next version
    plane.offer(1)
    assert "different weights" in failure_of(plane)


def test_an_engine_that_keeps_its_old_weights_is_found_out(plane):
    engine = plane.add("generator-0")
    plane.publish(0)
    checksum = Checksum(changing.checksum(engine.held[at(0)], LAYOUT).digest)
    engine.apply = lambda tensors, version: (
        checksum
    )  # says yes, does nothing, and is of tensors that cannot be compared
    plane.offer(1)
    assert "still holds the weights before" in failure_of(plane)


@pytest.mark.parametrize("plane", ["apart"], indirect=True)
def test_bytes_that_came_other_than_they_were_sent_are_never_swapped_to(plane, monkeypatch):
    digests, swaps_before = Layout.digests, list[int]()
    engine = Engine()

    def received(layout: Layout, *given: Any) -> Digests:
        found = digests(layout, *given)
        if threading.current_thread().name.startswith("weights-receive"):
            if swaps_before:
                time.sleep(0.5)  # time for a swap that must not be
            swaps_before.append(len(engine.held))
            found[0] += len(swaps_before) == 1
        return found

    monkeypatch.setattr(Layout, "digests", received)
    plane.add("generator-0", engine)
    publication = plane.publish(0)
    assert publication.attempts == 2 and swaps_before == [0, 0]
    plane.check(engine)


def test_without_generators_the_wait_ends_with_a_sentence(plane):
    with pytest.raises(WeightsError, match="no generator asked"):
        plane.publisher.wait_for(lambda: 1, 0.1, lambda what, seconds: None)


def test_a_publisher_that_fails_says_so_and_the_learner_goes_on(plane, monkeypatch):
    monkeypatch.setattr(plane.publisher, "_prepare_newest", lambda: 1 / 0)
    assert "ZeroDivisionError" in failure_of(plane)
    assert plane.publisher.offer(PolicyVersion(1, 0), lambda arenas, slot: None)


@pytest.mark.parametrize(
    ("plane", "lost"),
    [
        *itertools.product(["apart"], [Join, WeightsLayout, Offer, Staged, Swapped]),
        *itertools.product(["together"], [Offer, Staged]),
        *itertools.product(["mapped"], [Offer, Swapped]),  # which are all that depends on where an engine is
    ],
    indirect=["plane"],
)
def test_a_message_that_a_broken_connection_loses_is_made_up_for(plane, lost, monkeypatch):
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    losses: list[object] = []

    def loses(send: Callable[..., object]) -> Callable[..., object]:
        def maybe(socket: object, *message: object) -> object:
            if is_on and not losses and any(isinstance(part, lost) for part in message):
                losses.append(message)
                return True
            return send(socket, *message)

        return maybe

    for line in (Server, Client):
        monkeypatch.setattr(line, "send", loses(line.send))
    is_on = lost in (Join, WeightsLayout)
    engines = [plane.add(f"generator-{index}") for index in range(2)]
    plane.publish(0)
    is_on = True
    plane.offer(1)
    wait_until(lambda: losses, "a loss")
    wait_until(lambda: plane.publisher.is_idle and plane.publisher.missing == (), "rest", 15.0)
    assert [engine.newest for engine in engines] == [at(1)] * 2
    plane.check(*engines)


@pytest.mark.parametrize(("name", "waits_on"), [("generator-0", True), ("", False)])
def test_heartbeats_do_not_end_the_wait_for_news(name: str, waits_on: bool):
    """With 1,024 generators each of them made the thread look at all, in three quarters of the learner's Python time."""
    publisher = Publisher(WeightsConfig(), maps=True, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None)
    publisher.close()
    heartbeats, waits = [("g", encode(Alive(generator_id=name)))] * 2, []
    publisher._server = SimpleNamespace(
        receive=lambda timeout_s: waits.append(timeout_s) or (heartbeats.pop() if heartbeats else None)
    )
    publisher._receive()
    assert [wait > 0.0 for wait in waits] == [True, waits_on, waits_on]
