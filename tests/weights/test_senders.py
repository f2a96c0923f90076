"""Publications of a learner on two machines: each broadcasts its own bytes, and the publisher's digest is of both."""

import random
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import lane
from asyncgrpo.weights.arena import Arenas, Bucket, Stream
from asyncgrpo.weights.digest import BLOCK
from asyncgrpo.weights.lane import Sender
from asyncgrpo.weights.receiver import _streams
from asyncgrpo.wire.weights import WeightsLayout
from tests.weights.changing import LAYOUT, Engine, Fleet, drawn
from tests.weights.publishing import wait_until

SIZE = LAYOUT.num_bytes
OTHER = Stream([(3, 17), (64, SIZE // 3 + 1), (SIZE // 2, SIZE - 5)])
"""What the other machine sends, at odd places."""


class Machines(Fleet):
    """The publisher, a sender as on another machine, and generators."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        super().__init__(WeightsConfig(bucket_mb=1, timeout_s=timeout_s), maps=True, others=[OTHER])
        self.arenas = Arenas(LAYOUT)
        self.sender = Sender(1, self.arenas, OTHER, endpoint=self.publisher.endpoint, host="127.0.0.1", keys=None)

    def publish(self, number: int, *, other_writes: bool = True) -> PolicyVersion:
        """Begin to publish random weights, of which each machine has its own bytes."""
        version = PolicyVersion(1, number)
        flat = self.truth[version] = drawn(number)

        def fill(layout: object, arena: Tensor) -> None:
            arena.zero_()
            for start, end in OTHER.rest(SIZE).runs:
                arena[start:end] = flat[start:end]
            slot = int(arena.storage_offset() > 0)
            writes = self.arenas.begin(slot)
            for start, end in OTHER.runs:
                self.arenas.slots[slot][start:end] = flat[start:end]
            if other_writes:
                self.sender.written(slot, writes, lambda: True)

        wait_until(lambda: self.publisher.offer(version, fill), "an arena")
        return version

    def arrives(self, version: PolicyVersion, *engines: Engine) -> None:
        for engine in engines:
            wait_until(lambda engine=engine: version in engine.held, str(version))
        self.check(*engines)

    def close(self) -> None:
        self.sender.close()
        super().close()
        self.arenas.close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.close()


def test_generators_come_and_go_and_get_the_bytes_of_both_machines(machines):
    first = machines.add("a")
    for number in range(3):
        machines.arrives(machines.publish(number), first)
    second = machines.add("b")
    machines.arrives(machines.publish(3), first, second)
    machines.receivers[0].stop()
    machines.publisher.give_up("a", "0")
    machines.arrives(machines.publish(4), second)
    wait_until(lambda: machines.publisher.is_idle, "rest")
    reports = machines.publisher.reports()
    assert all(report.attempts == 1 and len(set(report.checksums.values())) == 1 for report in reports)


def test_bytes_that_change_on_the_way_from_another_machine_are_sent_again(machines, monkeypatch):
    engine = machines.add("a")
    machines.arrives(machines.publish(0), engine)
    wait_until(lambda: machines.publisher.is_idle, "rest")
    machines.publisher.reports()
    receive, flips = lane.receive, [1]

    def altered(group: object, flat: Tensor, buckets: Iterable[Bucket]) -> Iterator[tuple[int, int]]:
        for run in receive(group, flat, buckets):
            if flips and run[0] == OTHER.runs[0][0]:
                flat[run[0]] ^= flips.pop()
            yield run

    monkeypatch.setattr("asyncgrpo.weights.receiver.receive", altered)
    machines.arrives(machines.publish(1), engine)
    wait_until(lambda: machines.publisher.is_idle, "rest")
    (report,) = machines.publisher.reports()
    assert report.attempts == 2 and not flips


def test_a_machine_that_does_not_write_its_rows_is_named(machines):
    machines.add("a")
    machines.publisher._config = WeightsConfig(bucket_mb=1, timeout_s=0.2)
    machines.publish(0, other_writes=False)
    with pytest.raises(WeightsError, match=r"learner machines \[1\] have not written the weights of 1.0 in time"):
        wait_until(machines.publisher.reports, "report")


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_buckets_have_every_byte_once_and_are_cut_between_blocks(seed):
    drawn = random.Random(seed)
    edges = sorted(drawn.sample(range(9 * BLOCK), 2 * drawn.randrange(1, 9)))
    stream = Stream(zip(edges[::2], edges[1::2], strict=True))
    size = drawn.choice([1, 2, 5]) * BLOCK
    buckets = list(stream.buckets(size))
    assert all(sum(end - start for start, end in bucket) <= size for bucket in buckets)
    assert Stream(run for bucket in buckets for run in bucket).runs == stream.runs
    ends = {end for _, end in stream.runs}
    assert all(end in ends or end % BLOCK == 0 for bucket in buckets for _, end in bucket)
    assert Stream([*stream.runs, *stream.rest(9 * BLOCK).runs]).runs == [(0, 9 * BLOCK)]


def test_streams_that_miss_a_byte_are_refused():
    message = WeightsLayout(tensors=LAYOUT.tensors, streams=(1, 1))
    payload = torch.tensor([[0, 8], [9, SIZE]]).numpy().tobytes()
    with pytest.raises(ValueError, match="are not the whole"):
        _streams(message, payload, SIZE)
