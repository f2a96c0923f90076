"""The buffer's process says what the journal lets it say: no word too early, none lost, none twice."""

from pathlib import Path

import msgspec
import xxhash

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import Committed, Delivered, read_history
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    Batch,
    Finished,
    Grant,
    Nack,
    Register,
    Saved,
    Serving,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from tests.buffer.test_buffer import deliver, make_buffer, prompts, v
from tests.journal.journals import Clock, FailingDisk, groups_in, journal


class Line:
    """In the place of the socket: remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, peer: str, message: Message, payload: bytes = b"") -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list:
        found, self.sent = [m for m in self.sent if isinstance(m, kind)], [m for m in self.sent if type(m) is not kind]
        return found


class Process:
    """A buffer with its journal on a disk that can fail, a generator, a learner, and time by hand."""

    def __init__(self, folder: Path, durability: str = "fsync_interval") -> None:
        self.folder, self.clock, self.disk, self.line = folder, Clock(), FailingDisk(), Line()
        log = journal(folder, durability=durability, clock=self.clock, disk=self.disk)
        buffer = make_buffer(shuffle=False, journal=log)
        self.service = BufferService(self.line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
        self.hear(Trained(version=v(0)), peer="learner")
        self.hear(Register(protocol=PROTOCOL, generator_id="g", incarnation="i", window=4))
        self.hear(Serving(generator_id="g", version=v(0)))
        self.turn()

    def hear(self, message: Message, payload: bytes = b"", peer: str = "g") -> None:
        self.service._receive(peer, encode(message, payload), self.clock.now_s)
        self.service._may_take = True

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.now_s += seconds
        self.service._tick(self.clock.now_s)
        self.service._reply_to_take(self.clock.now_s)
        self.service._grant(self.clock.now_s)


def payload() -> bytes:
    return bytes(16)


def test_an_acknowledgement_waits_for_the_disk_and_a_second_delivery_changes_nothing(tmp_path: Path):
    process = Process(tmp_path / "j")
    grant = process.line.of(Grant)[0]
    for _ in range(2):  # the second time it was sent again, for want of a reply
        process.hear(deliver(grant.lease, 0), payload())
        process.turn()
        assert process.line.of(Ack) == [] and process.line.of(Nack) == []
    process.turn(1.0)
    assert [ack.lease_id for ack in process.line.of(Ack)] == [grant.lease.lease_id]
    assert set(groups_in(read_history(tmp_path / "j"))) == {0}
    process.hear(deliver(grant.lease, 0), payload())
    assert [nack.reason for nack in process.line.of(Nack)] == ["duplicate"]


def test_a_group_is_written_in_the_bytes_in_which_it_came(tmp_path: Path):
    process = Process(tmp_path / "j")
    message = deliver(process.line.of(Grant)[0].lease, 0)
    fields = msgspec.to_builtins(message)
    del fields["discarded"]  # as a release without this field sends it
    header = msgspec.msgpack.encode(fields)
    head = xxhash.xxh3_64_digest(header + payload()) + header
    process.service._receive("g", [head, payload()], process.clock.now_s)
    process.turn(1.0)
    history = read_history(tmp_path / "j")
    (found,) = [item for item in history.found if isinstance(item.record, Delivered)]
    assert found.record.head_bytes == len(head) < len(encode(message, payload())[0])
    assert head + payload() in history.segments[0].path.read_bytes()
    assert history.group(found) == (message, payload())


def test_while_the_disk_is_full_nothing_is_acknowledged_leased_or_handed_over_and_then_everything_is(tmp_path: Path):
    process = Process(tmp_path / "j")
    grants = process.line.of(Grant)
    assert len(grants) == 4
    for grant in grants[:2]:
        process.hear(deliver(grant.lease, 0), payload())
    process.disk.room = 0
    process.hear(deliver(grants[2].lease, 0), payload())
    process.hear(Take(step=0, version=v(0)), peer="learner")
    process.hear(TakeSnapshot(), peer="learner")
    for _ in range(5):
        process.turn(1.0)
    waiting = process.line.of(Waiting)
    assert waiting and "No space left on device" in waiting[-1].what and str(tmp_path) in waiting[-1].what
    for kind in (Ack, Nack, Grant, Batch, Snapshot):
        assert process.line.of(kind) == [], kind
    process.disk.room = None
    process.turn(1.0)
    process.turn(1.0)
    assert len(process.line.of(Ack)) == 3 and len(process.line.of(Batch)) == 1 and len(process.line.of(Snapshot)) == 1
    process.hear(Trained(version=v(1)), peer="learner")
    process.hear(Serving(generator_id="g", version=v(1)))
    process.turn()
    assert len(process.line.of(Grant)) == 2


class EpochProcess(Process):
    """Five prompts in epochs, with a curriculum in the run's folder. Two of them are always right."""

    def __init__(self, run: Path) -> None:
        self.clock, self.line, self.tellings = Clock(), Line(), []
        curriculum = Curriculum(run / "curriculum", is_on=True)
        source = PromptSource(prompts(5), seed=0, shuffle=True, epochs=4, curriculum=curriculum)
        log = journal(run / "journal", durability="fsync_each", clock=self.clock)
        config = BufferConfig(prompts_per_step=1, max_lag=0)
        algorithm = AlgorithmConfig(group_size=2, filter_zero_signal=True)
        self.buffer = Buffer(config, algorithm, source, Sampling(), seed=0, lineage=1, journal=log)
        self.service = BufferService(
            self.line,  # type: ignore[arg-type]
            self.buffer,
            Evaluations((), Sampling(), 0, 60.0),
            emit=lambda event, **fields: self.tellings.append((event, fields)),
        )
        self.version = v(0)
        self.hear(Trained(version=self.version), peer="learner")
        self.hear(Register(protocol=PROTOCOL, generator_id="g", incarnation="i", window=1))
        self.hear(Serving(generator_id="g", version=self.version))

    def train(self, count: int) -> list[tuple[int, str]]:
        """Generate groups and train those with signal, until so many prompts are done. Returns index and prompt of each."""
        done = []
        for _ in range(count):
            self.service._grant(self.clock.now_s)
            (grant,) = self.line.of(Grant)
            lease = grant.lease
            done.append((lease.prompt_index, lease.prompt.prompt_id))
            is_solved = lease.prompt.prompt_id in ("train/0", "train/1")
            group = deliver(lease, self.version.number, (1.0, 1.0) if is_solved else (0.0, 1.0), self.version.lineage)
            self.hear(group, payload())
            if not is_solved:
                self.hear(Take(step=self.version.number, version=self.version), peer="learner")
                self.service._reply_to_take(self.clock.now_s)
                self.version = PolicyVersion(self.version.lineage, self.version.number + 1)
                self.hear(Trained(version=self.version), peer="learner")
                self.hear(Serving(generator_id="g", version=self.version))
            self.line.sent.clear()
        return done

    def checkpoint(self) -> dict:
        self.hear(TakeSnapshot(), peer="learner")
        return self.line.of(Snapshot)[0].state


def test_trained_and_filtered_groups_decide_who_comes_in_the_next_epoch(tmp_path: Path):
    process = EpochProcess(tmp_path)
    assert sorted(prompt for _, prompt in process.train(5)) == [f"train/{i}" for i in range(5)]
    second = [prompt for _, prompt in process.train(5)]
    assert second.count("train/0") + second.count("train/1") == 0 and len(set(second)) == 3
    process.service.turn(None, 1.0)
    said = [fields for event, fields in process.tellings if event == "curriculum"]
    assert [fields["round"] for fields in said] == [1, 2]
    assert said[1]["prompts"] == {"unknown": 0, "hopeless": 0, "mixed": 3, "solved": 2}
    assert said[1]["places"] == {"unknown": 0, "hopeless": 0, "mixed": 5, "solved": 0}
    state = process.checkpoint()
    process.hear(Saved(step=3), peer="learner")
    assert state["shares"] and process.service._snapshot.shares
    process.hear(Finished(), peer="learner")
    committed = [f.record for f in read_history(tmp_path / "journal").found if isinstance(f.record, Committed)]
    assert [record.prompts.shares for record in committed] == [b""], (
        "the checkpoint has them, and nothing else needs them"
    )
