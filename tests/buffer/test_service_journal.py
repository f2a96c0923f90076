"""The buffer's process says what the journal lets it say: no word too early, none lost, none twice."""

import math
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import msgspec

from asyncgrpo.journal.history import Delivered, read_history
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    Batch,
    Finished,
    Grant,
    Serving,
    Shutdown,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from tests.buffer.test_buffer import deliver, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.journal.journals import Clock, failing_disk, journal
from tests.wire.mutations import sealed


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


def of(kind: type, sent: list[tuple[str, Message]]) -> list:
    return [message for _, message in sent if isinstance(message, kind)]


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
