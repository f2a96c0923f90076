"""The buffer's process as its peers see it: over real sockets, with a generator and a learner that completion by hand."""

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.types import Completion, Group, Lease, PolicyVersion, Prompt, Rollout, Sampling, Score, VersionSpan
from asyncgrpo.wire import PROTOCOL
from asyncgrpo.wire.codec import pack_group
from asyncgrpo.wire.rollouts import (
    Ack,
    Batch,
    Finished,
    Grant,
    LastEvals,
    LeaseFailed,
    NoMore,
    Register,
    RequestEval,
    Serving,
    Shutdown,
    Take,
    Trained,
    Waiting,
    Welcome,
)
from asyncgrpo.wire.sockets import Client, Server
from asyncgrpo.wire.supervision import Drain, Steer
from tests.buffer.test_buffer import make_buffer
from tests.runs import wait_until

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


class Plane:
    """One generator and the learner of a buffer that runs in a thread."""

    service: BufferService

    def __init__(self, endpoint: str) -> None:
        self.generator, self.learner = Client(endpoint, "generator-0-a"), Client(endpoint, "learner")

    def start(self) -> None:
        self.generator.send(Register(protocol=PROTOCOL, generator_id="generator-0", incarnation="a", window=8))
        assert isinstance(self.hear(self.generator), Welcome)
        self.learner.send(Trained(version=V0))
        self.generator.send(Serving(generator_id="generator-0", version=V0))

    def leases(self, count: int) -> list[Lease]:
        grants = [self.hear(self.generator) for _ in range(count)]
        assert all(isinstance(grant, Grant) for grant in grants), grants
        return [grant.lease for grant in grants]

    def deliver(self, lease: Lease, *rewards: float) -> None:
        """The completions to a lease, and the buffer's acknowledgement."""
        self.generator.send(*pack_group(delivery_of(lease, rewards)))
        said = self.hear(self.generator)
        assert isinstance(said, Ack) and said.lease_id == lease.lease_id

    def steer(self, asked: Steer) -> None:
        """What a person asks for, in effect."""
        self.service.steer(asked)
        wait_until(lambda: self.service.steered >= asked.revision, "effect", 10.0)

    def hear(self, client: Client):
        """The next message that is not small talk."""
        while True:
            received = client.receive(10.0)
            assert received is not None, "the buffer says nothing"
            if not isinstance(received[0], Waiting):
                return received[0]


def delivery_of(lease: Lease, rewards: tuple[float, ...]) -> Group:
    spans = (VersionSpan(V0, 0, 2),)
    rollouts = tuple(
        Rollout(Completion(i, np.array([3, 4], np.int32), np.zeros(2, np.float32), spans, "stop"), Score(value=reward))
        for i, reward in enumerate(rewards)
    )
    same = ("group_id", "lease_id", "attempt", "prompt_index", "purpose", "prompt")
    return Group(**{name: getattr(lease, name) for name in same}, rollouts=rollouts, generator_id="generator-0")


@pytest.fixture
def plane() -> Iterator[Plane]:
    """Four prompts, two a step, synchronous, with the filter, and two prompts held out."""
    held_out = tuple(Prompt(prompt_id=f"eval/{i}", token_ids=(i + 1,)) for i in range(2))
    buffer = make_buffer(4, per_step=2, max_lag=0, filters=True, shuffle=False)
    server = Server("127.0.0.1")
    service = BufferService(server, buffer, Evaluations(held_out, Sampling(), 0, 100.0))
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    plane = Plane(server.endpoint)
    plane.service = service
    yield plane
    plane.learner.send(Finished())
    thread.join(10.0)
    assert not thread.is_alive()
    for socket in (plane.generator, plane.learner, server):
        socket.close()


def test_the_tokens_of_a_lease_of_which_nothing_came_are_in_the_ledger(plane):
    plane.start()
    first, second = plane.leases(2)
    told = LeaseFailed(generator_id="generator-0", lease_id=first.lease_id, reason="failed", tokens=7)
    plane.generator.send(told)
    (again,) = plane.leases(1)
    assert (again.prompt_index, again.attempt) == (first.prompt_index, 1)
    plane.generator.send(msgspec.structs.replace(told, lease_id=first.lease_id, reason="cancelled", tokens=5))
    plane.learner.send(Take(step=0, version=V0))
    plane.deliver(again, 1.0, 0.0)
    plane.deliver(second, 1.0, 0.0)
    batch = plane.hear(plane.learner)
    assert isinstance(batch, Batch)
    counters = batch.counters
    assert (counters["tokens_generated"], counters["tokens_aborted"]) == (7 + 5 + 8, 7 + 5)
    assert counters["groups_leased"] == 3, "what was cancelled had ended before; it ends no other lease"


def test_a_filtered_group_is_acknowledged_replaced_and_counted_in_the_next_batch(plane):
    plane.start()
    plane.learner.send(Take(step=0, version=V0))
    first, second = plane.leases(2)
    plane.deliver(first, 1.0, 1.0)
    (third,) = plane.leases(1)
    plane.deliver(second, 0.0, 1.0)
    plane.deliver(third, 1.0, 0.0)
    batch = plane.hear(plane.learner)
    assert isinstance(batch, Batch) and [g.prompt_index for g in batch.groups] == [1, 2]
    assert batch.counters["groups_filtered_zero_signal"] == batch.counters["filtered_all_equal_high"] == 1
    assert batch.counters["tokens_filtered"] == 4 and batch.counters["prompts_done"] == 1
    plane.learner.send(Trained(version=V1))
    plane.generator.send(Serving(generator_id="generator-0", version=V1))
    plane.learner.send(Take(step=1, version=V1))
    (last,) = plane.leases(1)
    plane.deliver(last, 0.0, 0.0)
    ended = plane.hear(plane.learner)
    assert isinstance(ended, NoMore) and ended.why == "exhausted", "where nothing has a signal the run ends in order"
    assert ended.counters["groups_filtered_zero_signal"] == 2


def test_evaluations_are_never_filtered(plane):
    plane.learner.send(RequestEval(step=0))
    plane.start()
    leases = plane.leases(4)
    for lease in leases:
        if lease.purpose == "eval":
            plane.deliver(lease, 1.0)
    plane.learner.send(LastEvals())
    ended = plane.hear(plane.learner)
    (result,) = ended.evals
    assert isinstance(ended, NoMore) and (result.completions, result.reward_mean) == (2, 1.0)
    assert "groups_filtered_zero_signal" not in ended.counters


def test_a_pause_stops_leases_and_batches_and_keeps_what_was_in_flight_and_no_drain(plane):
    plane.start()
    first, second = plane.leases(2)
    plane.steer(Steer(revision=1, is_paused=True))
    plane.deliver(first, 1.0, 0.0)
    plane.deliver(second, 1.0, 0.0)
    plane.learner.send(Take(step=0, version=V0))
    waiting, _ = plane.learner.receive(10.0)
    assert waiting.is_paused and waiting.what == "the end of the pause"
    assert plane.generator.receive(0.5) is None
    plane.steer(Steer(revision=2))
    assert isinstance(plane.hear(plane.learner), Batch)
    plane.learner.send(Trained(version=V1))
    plane.generator.send(Serving(generator_id="generator-0", version=V1))
    assert len(plane.leases(2)) == 2
    plane.steer(Steer(revision=3, is_paused=True))
    plane.learner.send(Take(step=1, version=V1))
    plane.learner.send(Drain(reason="asked to stop"))
    assert plane.hear(plane.learner).why == "draining"


def test_a_generator_that_leaves_gets_no_lease_and_ends_once_its_groups_are_kept(plane):
    plane.start()
    first, second = plane.leases(2)
    plane.steer(Steer(revision=1, leaving=("generator-0-a",), ending=("generator-0-a",)))
    plane.deliver(first, 1.0, 1.0)  # without signal: another prompt takes its place, but not here
    plane.deliver(second, 1.0, 0.0)
    assert isinstance(plane.hear(plane.generator), Shutdown)


def test_the_groups_of_a_generator_and_the_bound_can_change(plane):
    plane.steer(Steer(revision=1, groups_in_flight=1))
    plane.start()
    (first,) = plane.leases(1)
    assert plane.generator.receive(0.5) is None
    plane.steer(Steer(revision=2, groups_in_flight=4, max_lag=1))
    assert {lease.prompt_index for lease in plane.leases(3)} == {1, 2, 3} and first.prompt_index == 0, "two slots more"
