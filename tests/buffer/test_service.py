"""The buffer's process as its peers see it: what a generator and the learner are sent, turn by turn."""

import math
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from asyncgrpo.journal.history import Delivered, read_history
from asyncgrpo.types import Lease
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    Batch,
    Finished,
    Grant,
    LastEvals,
    LeaseFailed,
    NoMore,
    RequestEval,
    Serving,
    Shutdown,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from asyncgrpo.wire.supervision import Drain, Steer
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.journal.journals import Clock, failing_disk, journal
from tests.wire.mutations import sealed


def of(kind: type, sent: list[tuple[str, Message]]) -> list:
    return [message for _, message in sent if isinstance(message, kind)]


class Plane(Served):
    """Four prompts, two a step, synchronous, with the filter, two prompts held out, and a generator."""

    def __init__(self) -> None:
        super().__init__(held_out=prompts(2), count=4, per_step=2, max_lag=0, filters=True, shuffle=False)

    def start(self) -> list[Lease]:
        self.hear("learner", Trained(version=v(0)))
        self.join("g", peer="g-0", window=8)
        return self.granted()

    def granted(self) -> list[Lease]:
        return [grant.lease for grant in of(Grant, self.lines.sent)]

    def deliver(self, lease: Lease, *rewards: float) -> None:
        """The completions to a lease, which the buffer acknowledges."""
        message = deliver(lease, 0, rewards, purpose=lease.purpose)
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
        return of(Waiting, self.pass_time(1.5))[0].what

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
    told = [message for message in of(Waiting, plane.pass_time(3.0)) if message.evals]
    assert len(told) > 1
    for lease in leases:
        if lease.purpose == "train":
            plane.deliver(lease, 1.0, 0.0)
    assert plane.told().evals == told[0].evals
    plane.train()
    plane.hear("learner", Take(version=v(1)))
    assert not any(message.evals for message in of(Waiting, plane.pass_time(1.5)))


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
    assert of(Batch, plane.steer())
    plane.train()
    assert len(plane.granted()) == 2
    plane.steer(is_paused=True)
    plane.hear("learner", Take(version=v(1)))
    plane.hear("learner", Drain(reason="asked to stop"))
    assert plane.told().why == "draining"


def test_a_pause_that_begins_while_the_learner_waits_is_no_part_of_its_wait():
    plane = Served(per_step=2, max_lag=0)
    plane.join("g", window=8)
    for number in range(3):
        plane.hear("learner", Trained(version=v(number)))
        plane.hear("g", Serving(generator_id="g", version=v(number)))
        plane.hear("learner", Take(version=v(number)))
        if number == 2:
            plane.service.steer(Steer(revision=1, is_paused=True))
            plane.pass_time(20.0)
            plane.service.steer(Steer(revision=2))
        plane.pass_time(1.0)
        for _ in range(2):
            plane.hear("g", deliver(plane.oldest_lease(), number), PAYLOAD)
    waits = [waited_s for waited_s, _ in plane.buffer._admission._seconds]
    assert [*waits, plane.buffer._held_back_s] == pytest.approx([1.0, 1.0, 1.0], abs=0.3)


def test_a_pause_holds_from_the_first_weights_of_a_restarted_buffer_on_though_a_new_bound_waits_for_them():
    plane = Plane()
    plane.steer(is_paused=True, max_lag=1)
    assert plane.service.steered == 0 and plane.start() == [], "it is paused already"
    plane.pass_time(1.0, "g")
    assert plane.service.steered == 1 and plane.granted() == []
    assert len([message for _, message in plane.steer(max_lag=1) if isinstance(message, Grant)]) == 4


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
    leases = [grant.lease for grant in of(Grant, plane.steer(groups_in_flight=4, max_lag=1))]
    assert {lease.prompt_index for lease in leases} == {1, 2, 3} and first.prompt_index == 0, "two slots more"


# -- with a journal: no word too early, none lost, none twice -----------------------------------------------------------


class Process(Served):
    """A buffer with its journal on a disk that can fail, and a generator that has four leases."""

    def __init__(self, folder: Path) -> None:
        clock = Clock()
        self.disk = failing_disk(folder, clock)
        log = journal(folder, durability="fsync_interval", clock=clock, disk=self.disk)
        super().__init__(clock=clock, shuffle=False, journal=log)
        self.hear("learner", Trained(version=v(0)))
        self.join("g", window=4)
        self.leases = [grant.lease for grant in of(Grant, self.lines.sent)]


def test_a_group_is_written_in_the_bytes_in_which_it_came(tmp_path: Path):
    process = Process(tmp_path / "j")
    message = deliver(process.leases[0], 0)
    fields = msgspec.to_builtins(message)
    del fields["discarded"]  # as a release without this field sends it
    head, _ = frames = sealed(msgspec.msgpack.encode(fields), PAYLOAD)
    process.service.turn(("g", frames), process.now_s)
    process.pass_time(1.0)
    history = read_history(tmp_path / "j")
    (found,) = [item for item in history.found if isinstance(item.record, Delivered)]
    assert found.record.head_bytes == len(head) < len(encode(message, PAYLOAD)[0])
    assert head + PAYLOAD in history.segments[0].path.read_bytes()
    assert history.group(found) == (message, PAYLOAD)


def test_while_the_disk_is_full_nothing_is_acknowledged_leased_or_handed_over_and_then_everything_is(tmp_path: Path):
    process = Process(tmp_path / "j")
    assert len(process.leases) == 4
    for lease in process.leases[:2]:
        assert process.hear("g", deliver(lease, 0), PAYLOAD) == []
    process.disk.full_until = math.inf
    assert process.hear("g", deliver(process.leases[2], 0), PAYLOAD) == []
    process.hear("learner", Take(version=v(0)))
    process.hear("learner", TakeSnapshot())
    sent = process.pass_time(5.0)
    waiting = of(Waiting, sent)
    assert waiting and "No space left on device" in waiting[-1].what and str(tmp_path) in waiting[-1].what
    assert len(sent) == len(waiting)
    process.disk.full_until = 0.0
    sent = process.pass_time(2.0)
    assert [len(of(kind, sent)) for kind in (Ack, Batch, Snapshot)] == [3, 1, 1]
    process.hear("learner", Trained(version=v(1)))
    process.hear("g", Serving(generator_id="g", version=v(1)))
    assert len(of(Grant, process.lines.sent)) == 2


def test_a_group_that_arrives_with_the_end_of_the_learner_is_kept_and_its_generator_is_shut_down(
    tmp_path: Path, monkeypatch
):
    process = Process(tmp_path / "j")
    unread = deque([("learner", encode(Finished())), ("g", encode(deliver(process.leases[0], 0), PAYLOAD))])
    lines = process.lines
    monkeypatch.setattr(lines, "receive", lambda timeout_s: unread.popleft() if unread else None, raising=False)
    monkeypatch.setattr(lines, "together", nullcontext, raising=False)
    process.service.run()
    assert len(of(Shutdown, lines.sent)) == 1
    assert [found for found in read_history(tmp_path / "j").found if isinstance(found.record, Delivered)]
