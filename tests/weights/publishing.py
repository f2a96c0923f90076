"""Publishers with their receivers, and publications from the offer to the proof, for tests and benchmarks."""

import atexit
import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.learner.publishing import fill_parts
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights import publication
from asyncgrpo.weights.arena import Arenas, IsWritten, Layout, Stream
from asyncgrpo.weights.publication import Publication
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire.weights import FormGroup

WITHIN_S = 120.0
LOOK_EVERY_S = 0.02
"""While no report comes, which is waited for: looking takes CPU seconds that a benchmark would count."""
HOST = "127.0.0.1"


def of_nccl(rank: int, world: int, timeout_s: float) -> FormGroup:
    """Return the message for a member of group 1, which meets in a store that the caller knows."""
    place = {"store_host": "", "store_port": 0}
    return FormGroup(group_number=1, rank=rank, world=world, backend="nccl", timeout_s=timeout_s, **place)


class Plane:
    """A publisher, and the receivers of generators that a test adds to it."""

    def __init__(self, config: WeightsConfig, *, maps: bool) -> None:
        self.publisher = Publisher(config, maps=maps, backend="gloo", bind=HOST, host=HOST, keys=None)
        self.receivers: list[Receiver] = []

    def join(
        self, name: str, kind: type[Receiver] = Receiver, incarnation: str = "0", machine: str = "", **calls: Any
    ) -> Receiver:
        """Start the receiver of a generator, whose engine `calls` are; as on another machine, if one is named."""
        receiver = kind(
            self.publisher.endpoint, generator_id=name, incarnation=incarnation, host=HOST, keys=None, **calls
        )
        receiver.machine = machine or receiver.machine
        receiver.start()
        atexit.register(receiver._thread.join, 1.0)  # a thread that outlives ZeroMQ crashes the process
        self.receivers.append(receiver)
        return receiver

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.stop()
        self.publisher.close()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float | None = None) -> None:
    timeout_s = timeout_s or float(os.environ.get("ASYNCGRPO_TEST_WAIT_S", "30"))
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s"
        time.sleep(0.005)


def publish(publisher: Publisher, version: PolicyVersion, weights: Iterable[tuple[TensorInfo, Tensor]]) -> Publication:
    """Offer a version, and wait until every generator in touch has it or was left out. Returns the last report."""
    layout = publisher._layout
    return land(publisher, version, lambda arenas, slot: fill_arena(weights, layout, arenas.arena(layout, slot)))


def fill_arena(weights: Iterable[tuple[TensorInfo, Tensor]], layout: Layout, flat: Tensor) -> IsWritten | None:
    """Copy whole tensors, in the order of the layout, into an arena, as one rank writes its parts."""
    infos = zip(layout.tensors, weights, strict=True)
    return fill_parts(((info.name, 0, tensor) for info, (_, tensor) in infos), layout, flat)


def digest_of(layout: Layout, tensors: Iterable[tuple[TensorInfo, Tensor]]) -> str:
    """Return the digest that a publication of these tensors has; on the CPU."""
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fill_arena(tensors, layout, flat)
    return publication.digest_of(Stream([(0, len(flat))]).digests(layout, flat))


def land(publisher: Publisher, version: PolicyVersion, fill: Callable[[Arenas, int], IsWritten | None]) -> Publication:
    """The same of weights that `fill` writes, as `Publisher.offer` says."""
    assert publisher.offer(version, fill)
    deadline = time.monotonic() + WITHIN_S
    ended: list[Publication] = []
    while not (ended and publisher.is_idle):
        assert time.monotonic() < deadline, f"{version} has not landed"
        with contextlib.suppress(queue.Empty):
            ended.append(publisher._reports.get(timeout=LOOK_EVERY_S))
        ended += publisher.reports()
    return ended[-1]
