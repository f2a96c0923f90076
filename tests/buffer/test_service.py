"""The buffer's process as its peers see it: what a generator and the learner are sent, turn by turn."""

import math

import msgspec
import pytest

from asyncgrpo.types import Lease
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import (
    Batch,
    Grant,
    LastEvals,
    LeaseFailed,
    NoMore,
    RequestEval,
    Serving,
    Shutdown,
    Take,
    Trained,
    Waiting,
)
from asyncgrpo.wire.supervision import Drain, Steer
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_incarnations import Served


class Plane(Served):
    """Four prompts, two a step, synchronous, with the filter, two prompts held out, and a generator."""

    def __init__(self) -> None:
        super().__init__(held_out=prompts(2), count=4, per_step=2, max_lag=0, filters=True, shuffle=False)

    def start(self) -> list[Lease]:
        self.hear("learner", Trained(version=v(0)))
        self.join("g", peer="g-0", window=8)
        return self.granted()

    def granted(self) -> list[Lease]:
        return [message.lease for _, message in self.lines.sent if isinstance(message, Grant)]

    def deliver(self, lease: Lease, *rewards: float) -> None:
        """The completions to a lease, which the buffer acknowledges."""
        message = msgspec.structs.replace(deliver(lease, 0, rewards), purpose=lease.purpose)
        assert ("g-0", "Ack") in self.hear("g-0", message, bytes(8 * len(rewards)))

    def train(self) -> None:
        """A step ends, and the generator serves what it made."""
        self.hear("learner", Trained(version=v(1)))
        self.hear("g-0", Serving(generator_id="g", version=v(1)))

    def told(self) -> Message:
        """What the learner was just sent."""
        (message,) = [message for to, message in self.lines.sent if to == "learner"]
        return message

    def waits(self) -> str:
        """What the learner is told that it waits for."""
        return next(message.what for _, message in self.pass_time(1.5) if isinstance(message, Waiting))

    def steer(self, **asked) -> list[tuple[str, Message]]:
        """What is sent once something that a person asks for is in effect."""
        self.service.steer(Steer(revision=self.service.steered + 1, **asked))
        return self.pass_time(1.0, "g")


def test_the_tokens_of_a_lease_of_which_nothing_came_are_in_the_ledger():
    plane = Plane()
    first, second = plane.start()
    told = LeaseFailed(generator_id="g", lease_id=first.lease_id, reason="failed", tokens=7)
    plane.hear("g-0", told)
    (again,) = plane.granted()
    assert (again.prompt_index, again.attempt) == (first.prompt_index, 1)
    plane.hear("g-0", msgspec.structs.replace(told, reason="cancelled", tokens=5))
    plane.hear("learner", Take(version=v(0)))
    for lease in (again, second):
        plane.deliver(lease, 1.0, 0.0)
    counters = plane.told().counters
    assert (counters["tokens_generated"], counters["tokens_aborted"]) == (7 + 5 + 4, 7 + 5)
    assert counters["groups_leased"] == 3, "what was cancelled had ended before; it ends no other lease"


def test_a_filtered_group_is_acknowledged_replaced_and_counted_in_the_next_batch_which_is_repeated_on_demand():
    plane = Plane()
    first, second = plane.start()
    take = Take(version=v(0), shares_within={0: math.nan})  # of a step whose update was skipped
    plane.hear("learner", take)
    plane.deliver(first, 1.0, 1.0)
    (third,) = plane.granted()
    assert "1 since the last batch had equal rewards and were replaced" in plane.waits()
    plane.deliver(second, 0.0, 1.0)
    plane.deliver(third, 1.0, 0.0)
    batch = plane.told()
    assert isinstance(batch, Batch) and [g.prompt_index for g in batch.groups] == [1, 2]
    assert batch.counters["groups_filtered_zero_signal"] == batch.counters["filtered_all_equal_high"] == 1
    assert batch.counters["tokens_filtered"] == 2 and batch.counters["prompts_done"] == 1
    plane.hear("learner", take)
    assert plane.told() is batch, "the first one was lost"
    plane.train()
    (last,) = plane.granted()
    plane.hear("learner", Take(version=v(1)))
    assert "were replaced" not in plane.waits()
    plane.deliver(last, 0.0, 0.0)
    ended = plane.told()
    assert isinstance(ended, NoMore) and ended.why == "exhausted", "where nothing has a signal the run ends in order"
    assert ended.counters["groups_filtered_zero_signal"] == 2
    plane.hear("learner", Take(version=v(1)))
    assert plane.told() is ended, "the first one was lost"


def test_evaluations_are_never_filtered():
    plane = Plane()
    leases = plane.start()
    plane.hear("learner", Take(version=v(0), evaluate=0))  # its RequestEval was lost
    leases += plane.granted()
    plane.hear("learner", RequestEval(step=0))
    assert len(leases) == 4 and plane.granted() == []
    plane.hear("learner", LastEvals())
    for lease in leases:
        if lease.purpose == "eval":
            plane.deliver(lease, 1.0)
    ended = plane.told()
    (result,) = ended.evals
    assert isinstance(ended, NoMore) and (result.completions, result.reward_mean) == (2, 1.0)
    assert "groups_filtered_zero_signal" not in ended.counters


def test_an_evaluation_is_told_again_until_a_batch_has_it():
    plane = Plane()
    plane.hear("learner", RequestEval(step=0))
    leases = plane.start()
    plane.hear("learner", Take(version=v(0)))
    for lease in leases:
        if lease.purpose == "eval":
            plane.deliver(lease, 1.0)
    told = [message for _, message in plane.pass_time(3.0) if isinstance(message, Waiting) and message.evals]
    assert len(told) > 1
    for lease in leases:
        if lease.purpose == "train":
            plane.deliver(lease, 1.0, 0.0)
    assert plane.told().evals == told[0].evals
    plane.train()
    plane.hear("learner", Take(version=v(1)))
    assert not any(message.evals for _, message in plane.pass_time(1.5) if isinstance(message, Waiting))


@pytest.mark.parametrize("why", ["draining", "failing"])
def test_the_last_evaluation_holds_up_no_run_that_is_to_end(why: str):
    plane = Plane()
    plane.hear("learner", RequestEval(step=0))
    plane.start()
    plane.hear("learner", LastEvals())
    assert plane.waits() == "the last evaluation"
    plane.hear("learner", Drain(reason="asked to stop", is_failure=why == "failing"))
    assert plane.told().why == why


def test_a_pause_stops_leases_and_batches_and_keeps_what_was_in_flight_and_no_drain():
    plane = Plane()
    leases = plane.start()
    plane.steer(is_paused=True)
    for lease in leases:
        plane.deliver(lease, 1.0, 0.0)
    plane.hear("learner", Take(version=v(0)))
    sent = plane.pass_time(3.0)
    assert sent and {to for to, _ in sent} == {"learner"}
    assert all(isinstance(m, Waiting) and m.is_paused and m.what == "the end of the pause" for _, m in sent)
    assert any(isinstance(message, Batch) for _, message in plane.steer())
    plane.train()
    assert len(plane.granted()) == 2
    plane.steer(is_paused=True)
    plane.hear("learner", Take(version=v(1)))
    plane.hear("learner", Drain(reason="asked to stop"))
    assert plane.told().why == "draining"


def test_a_generator_that_leaves_gets_no_lease_and_ends_once_its_groups_are_kept():
    plane = Plane()
    first, second = plane.start()
    plane.steer(leaving=("g-0",), ending=("g-0",))
    plane.deliver(first, 1.0, 1.0)  # without signal: another prompt takes its place, but not here
    assert plane.granted() == []
    plane.deliver(second, 1.0, 0.0)
    assert [message for to, message in plane.pass_time(1.0) if to == "g-0"][:1] == [Shutdown()]


def test_the_groups_of_a_generator_and_the_bound_can_change():
    plane = Plane()
    plane.steer(groups_in_flight=1)
    (first,) = plane.start()
    sent = plane.steer(groups_in_flight=4, max_lag=1)
    leases = [message.lease for _, message in sent if isinstance(message, Grant)]
    assert {lease.prompt_index for lease in leases} == {1, 2, 3} and first.prompt_index == 0, "two slots more"
