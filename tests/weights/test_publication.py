"""Weights reach real receiver threads over a real group, whatever happens to some of them on the way."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import GeneratorsGone, WeightsError
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights import receiver as receiving
from asyncgrpo.weights.broadcast import add_digests, digest, digest_of, plan_buckets
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire.weights import Swap

LAYOUT = [
    TensorInfo(name="embed", shape=(7, 5), dtype="float32"),
    TensorInfo(name="norm", shape=(5,), dtype="bfloat16"),
    TensorInfo(name="big", shape=(700, 1000), dtype="float32"),
    TensorInfo(name="head", shape=(7, 5), dtype="float32"),
]


def weights(seed: int) -> list[tuple[TensorInfo, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(i, torch.randn(i.shape, generator=generator).to(getattr(torch, i.dtype))) for i in LAYOUT]


class Engine:
    """Holds what it was given, as a real engine would."""

    def __init__(self, corrupt: bool = False) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.version: PolicyVersion | None = None
        self.corrupt = corrupt
        self.num_swaps = 0

    def apply(self, tensors, version: PolicyVersion) -> str:
        self.num_swaps += 1
        self.held = {name: tensor.clone() for name, tensor in tensors}
        if self.corrupt:
            self.held["norm"][0] += 1
        self.version = version
        return str(sum(float(t.double().sum()) for t in self.held.values()))


@pytest.fixture(params=["gloo", "shared_memory"])
def plane(request):
    """A publisher, and a way to add receivers to it."""
    publisher = Publisher(
        WeightsConfig(bucket_mb=1, timeout_s=3.0), backend=request.param, bind="127.0.0.1", host="127.0.0.1", keys=None
    )
    publisher.describe(LAYOUT)
    receivers: list[Receiver] = []

    def add(name: str, engine: Engine, incarnation: str = "0") -> Receiver:
        receiver = Receiver(
            publisher.endpoint,
            generator_id=name,
            incarnation=incarnation,
            host="127.0.0.1",
            apply=lambda tensors, version: engine.apply(tensors, version),
            keys=None,
        )
        receiver.start()
        receivers.append(receiver)
        return receiver

    yield publisher, add
    for receiver in receivers:
        receiver.stop()
    publisher.close()


def assert_holds(engine: Engine, expected: list[tuple[TensorInfo, torch.Tensor]]) -> None:
    assert set(engine.held) == {info.name for info, _ in expected}
    for info, tensor in expected:
        assert torch.equal(engine.held[info.name], tensor), info.name


def test_every_generator_holds_exactly_what_was_published(plane):
    publisher, add = plane
    engines = [Engine(), Engine()]
    for index, engine in enumerate(engines):
        add(f"generator-{index}", engine)
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    for step in range(3):
        publication = publisher.publish(PolicyVersion(1, step), lambda step=step: weights(step))
        assert publication.generators == ("generator-0", "generator-1")
        assert len(set(publication.checksums.values())) == 1
        assert publication.digest == digest_of(LAYOUT, weights(step), 2**20) == digest_of(LAYOUT, weights(step), 64)
        for engine in engines:
            assert engine.version == PolicyVersion(1, step)
            assert_holds(engine, weights(step))


def test_a_newcomer_gets_the_current_version_and_the_rest_goes_on(plane):
    publisher, add = plane
    first, second = Engine(), Engine()
    add("generator-0", first)
    publisher.wait_for(1, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    add("generator-1", second)
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    assert publisher.newcomers()
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    assert not publisher.newcomers()
    assert_holds(second, weights(0))


def test_a_generator_that_is_gone_is_left_out_and_named(plane):
    publisher, add = plane
    alive, dying = Engine(), Engine()
    add("generator-0", alive)
    gone = add("generator-1", dying)
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    gone.stop()
    publication = publisher.publish(PolicyVersion(1, 1), lambda: weights(1))
    assert publication.generators == ("generator-0",)
    assert "generator-1" in publication.dropped
    assert_holds(alive, weights(1))
    assert dying.version == PolicyVersion(1, 0)


class Frozen(Engine):
    """Swaps once, and then stands still in the middle of a swap until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def apply(self, tensors, version: PolicyVersion) -> str:
        if self.version is not None:
            self.let_go.wait(60.0)
        return super().apply(tensors, version)


def test_whoever_does_not_reply_is_named_at_once_and_comes_back_by_itself(plane):
    publisher, add = plane
    told, frozen = [], Frozen()
    publisher.on_left_out = lambda *details: told.append((*details, publisher.missing))
    add("generator-0", Engine())
    add("generator-1", frozen, "1.4")
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    assert not told and publisher.missing == ()
    publication = publisher.publish(PolicyVersion(1, 1), lambda: weights(1))
    assert publication.generators == ("generator-0",) and publication.dropped == ("generator-1",)
    assert told == [("generator-1", "1.4", "it did not swap to 1.1 within 3 s", ("generator-1-1.4",))]
    assert publisher.publish(PolicyVersion(1, 2), lambda: weights(2)).dropped == ("generator-1",), "not back yet"
    frozen.let_go.set()
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    assert publisher.missing == ()
    publication = publisher.publish(PolicyVersion(1, 3), lambda: weights(3))
    assert publication.generators == ("generator-0", "generator-1") and publication.dropped == ()
    assert_holds(frozen, weights(3))


def test_whoever_is_given_up_is_not_waited_for(plane, monkeypatch):
    publisher, add = plane
    monkeypatch.setattr(publisher, "_config", WeightsConfig(bucket_mb=1, timeout_s=600.0))  # nobody would wait for this
    told, frozen = [], Frozen()
    publisher.on_left_out = lambda *details: told.append(details)
    add("generator-0", Engine())
    add("generator-1", frozen, "1.4")
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    publisher.give_up("generator-1", "1.3")  # the one before it
    threading.Timer(0.5, publisher.give_up, ("generator-1", "1.4")).start()
    publication = publisher.publish(PolicyVersion(1, 1), lambda: weights(1))
    assert publication.generators == ("generator-0",) and publication.dropped == ("generator-1",)
    assert publication.attempts == 2 and publisher.missing == () and not told, "who gave it up has told everyone"
    frozen.let_go.set()


def test_when_all_are_gone_the_next_that_comes_gets_the_version(plane):
    publisher, add = plane
    gone = [add("generator-0", Engine()), add("generator-1", Engine())]
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    for receiver in gone:
        receiver.stop()
    with pytest.raises(GeneratorsGone, match=r"1\.1 reached no generator"):
        publisher.publish(PolicyVersion(1, 1), lambda: weights(1))
    assert not publisher.generators
    replacement = Engine()
    add("generator-0", replacement, "1")
    publisher.wait_for(1, 10.0, lambda what, seconds: None)
    assert publisher.publish(PolicyVersion(1, 1), lambda: weights(1)).generators == ("generator-0",)
    assert_holds(replacement, weights(1))


def test_engines_that_end_up_different_are_an_error(plane):
    publisher, add = plane
    add("generator-0", Engine())
    add("generator-1", Engine(corrupt=True))
    publisher.wait_for(2, 10.0, lambda what, seconds: None)
    with pytest.raises(WeightsError, match="different weights"):
        publisher.publish(PolicyVersion(1, 0), lambda: weights(0))


def test_an_engine_that_keeps_its_old_weights_is_found_out(plane):
    publisher, add = plane
    engine = Engine()
    add("generator-0", engine)
    publisher.wait_for(1, 10.0, lambda what, seconds: None)
    publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    checksum = engine.apply([(i.name, t) for i, t in weights(0)], PolicyVersion(1, 0))
    engine.apply = lambda tensors, version: checksum  # says yes, does nothing
    with pytest.raises(WeightsError, match="still holds the weights before"):
        publisher.publish(PolicyVersion(1, 1), lambda: weights(1))


def test_bytes_that_came_other_than_they_were_sent_are_never_swapped_to(plane, monkeypatch):
    publisher, add = plane
    came = iter(["0" * 16])
    monkeypatch.setattr(receiving, "add_digests", lambda parts: next(came, None) or add_digests(parts))
    add("generator-0", engine := Engine())
    publisher.wait_for(1, 10.0, lambda what, seconds: None)
    publication = publisher.publish(PolicyVersion(1, 0), lambda: weights(0))
    assert publication.attempts == 2 and next(came, None) is None
    assert engine.num_swaps == 1
    assert_holds(engine, weights(0))


def test_a_swap_to_weights_that_were_not_staged_is_not_made(plane):
    _, add = plane
    receiver = add("generator-0", engine := Engine())
    receiver._handle(Swap(group_number=0, version=PolicyVersion(1, 7)))
    assert engine.num_swaps == 0


def test_without_generators_the_wait_ends_with_a_sentence(plane):
    publisher, _ = plane
    with pytest.raises(WeightsError, match="no generator asked"):
        publisher.wait_for(1, 0.1, lambda what, seconds: None)


def test_the_digest_adds_up_over_buckets_and_sees_one_flipped_bit():
    flat = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    whole = add_digests([digest(flat)])
    assert whole == add_digests([digest(flat[:1024]), digest(flat[1024:], 256)])
    assert whole != add_digests([digest(flat[:1024]), digest(flat[1024:], 0)])
    for position in (0, 1023, 4095):
        changed = flat.clone()
        changed[position] ^= 1
        assert add_digests([digest(changed)]) != whole
    swapped = torch.cat([flat[4:8], flat[:4], flat[8:]])
    assert add_digests([digest(swapped)]) != whole


def test_buckets_hold_every_tensor_once_and_align_each():
    buckets = plan_buckets(LAYOUT, 2**20)
    items = [item for bucket in buckets for item in bucket.items]
    assert [info.name for info, _ in items] == [info.name for info in LAYOUT]
    assert all(offset % 16 == 0 for _, offset in items)
    assert len(buckets) == 3  # the large tensor is alone


RECEIVER = """
import sys, time
from asyncgrpo.weights.receiver import Receiver
receiver = Receiver(
    sys.argv[1], generator_id="generator-1", incarnation="1.0", host="127.0.0.1", keys=None,
    apply=lambda tensors, version: str(sum(float(tensor.double().sum()) for _, tensor in tensors)),
)
receiver.start()
while receiver.is_alive:
    time.sleep(0.1)
"""


def test_a_process_that_is_stopped_is_left_out_and_comes_back_when_it_goes_on(plane):
    publisher, add = plane
    add("generator-0", Engine())
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, publisher.endpoint],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        publisher.wait_for(2, 60.0, lambda what, seconds: None)
        assert publisher.publish(PolicyVersion(1, 0), lambda: weights(0)).dropped == ()
        process.send_signal(signal.SIGSTOP)
        publication = publisher.publish(PolicyVersion(1, 1), lambda: weights(1))
        assert publication.generators == ("generator-0",) and publication.dropped == ("generator-1",)
        assert publisher.missing == ("generator-1-1.0",)
        process.send_signal(signal.SIGCONT)
        publisher.wait_for(2, 60.0, lambda what, seconds: None)
        publication = publisher.publish(PolicyVersion(1, 2), lambda: weights(2))
        assert publication.generators == ("generator-0", "generator-1") and publisher.missing == ()
    finally:
        process.kill()
        process.wait()
