"""The buffer's process says what the journal lets it say: no word too early, none lost, none twice."""

from pathlib import Path

import msgspec

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.format import Committed, Delivered
from asyncgrpo.journal.history import read_history
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    Batch,
    Finished,
    Grant,
    Nack,
    Saved,
    Serving,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.journal.journals import Clock, FailingDisk, groups_in, journal
from tests.wire.mutations import sealed


class Process(Served):
    """A buffer with its journal on a disk that can fail, and a generator that has four leases."""

    def __init__(self, folder: Path) -> None:
        self.disk, clock = FailingDisk(), Clock()
        log = journal(folder, durability="fsync_interval", clock=clock, disk=self.disk)
        super().__init__(clock=clock, shuffle=False, journal=log)
        self.hear("learner", Trained(version=v(0)))
        self.join("g", window=4)
        self.leases = [grant.lease for grant in of(Grant, self.lines.sent)]


def of(kind: type, sent: list[tuple[str, Message]]) -> list:
    return [message for _, message in sent if isinstance(message, kind)]


def test_an_acknowledgement_waits_for_the_disk_and_a_second_delivery_changes_nothing(tmp_path: Path):
    process = Process(tmp_path / "j")
    lease = process.leases[0]
    for _ in range(2):  # the second time it was sent again, for want of a reply
        assert process.hear("g", deliver(lease, 0), PAYLOAD) == []
    assert [ack.lease_id for ack in of(Ack, process.pass_time(1.0))] == [lease.lease_id]
    assert set(groups_in(read_history(tmp_path / "j"))) == {0}
    process.hear("g", deliver(lease, 0), PAYLOAD)
    assert [nack.reason for nack in of(Nack, process.lines.sent)] == ["duplicate"]


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
    process.disk.room = 0
    assert process.hear("g", deliver(process.leases[2], 0), PAYLOAD) == []
    process.hear("learner", Take(step=0, version=v(0)))
    process.hear("learner", TakeSnapshot())
    sent = process.pass_time(5.0)
    waiting = of(Waiting, sent)
    assert waiting and "No space left on device" in waiting[-1].what and str(tmp_path) in waiting[-1].what
    assert len(sent) == len(waiting)
    process.disk.room = None
    sent = process.pass_time(2.0)
    assert [len(of(kind, sent)) for kind in (Ack, Batch, Snapshot)] == [3, 1, 1]
    process.hear("learner", Trained(version=v(1)))
    process.hear("g", Serving(generator_id="g", version=v(1)))
    assert len(of(Grant, process.lines.sent)) == 2


class EpochProcess(Served):
    """Five prompts in epochs, with a curriculum in the run's folder. Two of them are always right."""

    def __init__(self, run: Path) -> None:
        clock = Clock()
        curriculum = Curriculum(run / "curriculum", is_on=True)
        source = PromptSource(prompts(5), seed=0, shuffle=True, epochs=4, curriculum=curriculum)
        log = journal(run / "journal", durability="fsync_each", clock=clock)
        config = BufferConfig(prompts_per_step=1, max_lag=0)
        algorithm = AlgorithmConfig(group_size=2, filter_zero_signal=True)
        buffer = Buffer(config, algorithm, source, Sampling(), seed=0, lineage=1, journal=log)
        super().__init__(clock=clock, buffer=buffer)
        self.version = v(0)
        self.hear("learner", Trained(version=self.version))
        self.join("g", window=1)

    def train(self, count: int) -> list[str]:
        """Generate groups and train those with signal, until so many prompts are done. Returns the prompt of each."""
        done = []
        for _ in range(count):
            lease = self.oldest_lease()
            done.append(lease.prompt.prompt_id)
            is_solved = lease.prompt.prompt_id in ("train/0", "train/1")
            self.hear("g", deliver(lease, self.version.number, (1.0, 1.0) if is_solved else (0.0, 1.0)), PAYLOAD)
            if not is_solved:
                self.hear("learner", Take(step=self.version.number, version=self.version))
                self.version = PolicyVersion(1, self.version.number + 1)
                self.hear("learner", Trained(version=self.version))
                self.hear("g", Serving(generator_id="g", version=self.version))
        return done


def test_trained_and_filtered_groups_decide_who_comes_in_the_next_epoch(tmp_path: Path):
    process = EpochProcess(tmp_path)
    assert sorted(process.train(5)) == [f"train/{i}" for i in range(5)]
    second = process.train(5)
    assert second.count("train/0") + second.count("train/1") == 0 and len(set(second)) == 3
    process.pass_time(1.5)
    said = [fields for event, fields in process.events if event == "curriculum"]
    assert [fields["round"] for fields in said][:2] == [1, 2]
    assert said[1]["prompts"] == {"unknown": 0, "hopeless": 0, "mixed": 3, "solved": 2}
    assert said[1]["places"] == {"unknown": 0, "hopeless": 0, "mixed": 5, "solved": 0}
    process.hear("learner", TakeSnapshot())
    (snapshot,) = of(Snapshot, process.lines.sent)
    process.hear("learner", Saved(step=3))
    assert snapshot.state["shares"]
    process.hear("learner", Finished())
    committed = [f.record for f in read_history(tmp_path / "journal").found if isinstance(f.record, Committed)]
    assert [record.prompts.shares for record in committed] == [b""], "the checkpoint has them, and nothing else does"
