"""After any crash the groups that were kept come back, or their prompts do; none is trained twice, none is skipped."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.buffer.history import read_history
from asyncgrpo.buffer.records import FORMAT, Began, Committed, Dropped
from asyncgrpo.buffer.recovery import bring_back, reopen, surviving_path
from asyncgrpo.config import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.types import Lease, Sampling, WeightVersion
from tests.buffer.test_buffer import deliver, prompts

TERMS = {"sampling": "warm"}


def start(
    folder: Path,
    lineage: int,
    *,
    checkpoint: tuple[WeightVersion, PromptState] | None = None,
    count=12,
    terms=TERMS,
    **config,
) -> tuple[Buffer, dict[str, int]]:
    """A start of a run with prompts 0 to count - 1, and what it got from the earlier ones."""
    settings_ = BufferConfig(
        **{"prompts_per_step": 2, "max_lag": 1, "max_attempts": 100, "durability": "written"} | config
    )
    source = PromptSource(prompts(count), seed=0, shuffle=True, epochs=1)
    if checkpoint is not None:
        source.restore(checkpoint[1])
    began = Began(
        format=FORMAT,
        lineage=lineage,
        parent=checkpoint[0] if checkpoint is not None else None,
        terms=terms,
        max_lag=settings_.max_lag,
        prompts=source.state(),
    )
    reopened = reopen(folder, began, source, settings_)
    buffer = Buffer(
        settings_,
        AlgorithmConfig(group_size=2),
        source,
        Sampling(),
        seed=0,
        lineage=lineage,
        journal=reopened.journal,
    )
    return buffer, bring_back(buffer, reopened)


def lease(buffer: Buffer) -> Lease:
    lease = buffer.lease("g", 0.0)
    assert lease is not None
    return lease


def payload(message) -> bytes:
    return bytes([message.order]) * 16


def accept(buffer: Buffer, lease: Lease, version: int, lineage: int = 1) -> None:
    message = deliver(lease, version, lineage=lineage)
    assert buffer.accept(message, payload(message)) is None


@pytest.fixture
def one_step_done(tmp_path: Path):
    """Start 1: groups 0 to 3 delivered at version 0, 0 and 1 trained in step 1, 4 and 5 delivered at version 1."""
    buffer, _ = start(tmp_path, 1)
    buffer.published(WeightVersion(1, 0))
    for _ in range(4):
        accept(buffer, lease(buffer), 0)
    assert [e.order for e in buffer.take(WeightVersion(1, 0))] == [0, 1]
    before = buffer.snapshot()
    buffer.published(WeightVersion(1, 1))
    for _ in range(2):
        accept(buffer, lease(buffer), 1)
    return tmp_path, before, buffer.snapshot()


def ready(buffer: Buffer) -> list[tuple[int, bytes]]:
    found = [(e.order, e.payload) for e in buffer._entries.values() if e.state is State.READY]
    return sorted(found)


def test_what_was_kept_and_not_trained_is_ready_again(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    buffer, counts = start(folder, 2, checkpoint=(WeightVersion(1, 1), prompts_at_1))
    assert counts == {"ready": 4}
    assert ready(buffer) == [(order, bytes([order]) * 16) for order in (2, 3, 4, 5)]
    assert [e.order for e in buffer.take(WeightVersion(2, 1))] == [2, 3], "oldest first, as before"
    buffer.published(WeightVersion(2, 2))
    assert lease(buffer).order == 6


def test_groups_of_weights_that_are_gone_are_dropped_and_their_prompts_issued_again(one_step_done):
    folder, _, _ = one_step_done
    buffer, counts = start(folder, 2)  # step 1 was in no checkpoint
    assert counts == {"ready": 4, "ahead": 2}
    assert [order for order, _ in ready(buffer)] == [0, 1, 2, 3], "taken and not committed is given back"
    assert [e.order for e in buffer.take(WeightVersion(2, 0))] == [0, 1]
    buffer.published(WeightVersion(2, 1))
    assert [lease(buffer).order for _ in range(2)] == [4, 5]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"after_resume": "drop"}, "resume"), ({"terms": {"sampling": "cold"}}, "terms")],
)
def test_by_another_rule_or_other_settings_none_is_kept(one_step_done, arguments, reason):
    folder, _, prompts_at_1 = one_step_done
    buffer, counts = start(folder, 2, checkpoint=(WeightVersion(1, 1), prompts_at_1), **arguments)
    assert counts == {reason: 4}
    buffer.published(WeightVersion(2, 1))
    assert [lease(buffer).order for _ in range(4)] == [2, 3, 4, 5]
    drops = [f.record for f in read_history(folder).found if isinstance(f.record, Dropped)]
    assert {(d.order, d.reason, d.is_final) for d in drops} == {(o, reason, False) for o in (2, 3, 4, 5)}


def test_with_a_smaller_lag_only_what_can_be_trained_in_time_is_kept(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    buffer, counts = start(folder, 2, checkpoint=(WeightVersion(1, 1), prompts_at_1), max_lag=0)
    assert counts == {"ready": 2, "stale": 2}
    assert [e.order for e in buffer.take(WeightVersion(2, 1))] == [4, 5]


def test_where_no_lag_is_bounded_everything_is_kept(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    _, counts = start(folder, 2, checkpoint=(WeightVersion(1, 1), prompts_at_1), max_lag=0, policy="train")
    assert counts == {"ready": 4}


def test_a_second_crash_brings_the_same_groups_back_and_a_third_start_on_another_branch_does_not(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    at_1 = WeightVersion(1, 1), prompts_at_1
    start(folder, 2, checkpoint=at_1)
    buffer, counts = start(folder, 3, checkpoint=at_1)
    assert counts == {"ready": 4}
    buffer.take(WeightVersion(3, 1))
    buffer.published(WeightVersion(3, 2))
    buffer.journal.append(Committed(step=2, prompts=buffer.snapshot()))
    _, counts = start(folder, 4, checkpoint=(WeightVersion(3, 2), buffer.snapshot()))
    assert counts == {"ready": 2}
    path = surviving_path(read_history(folder).starts, WeightVersion(3, 2))
    assert path == {3: 2, 2: 1, 1: 1, 4: 2}


def test_a_group_whose_body_was_damaged_is_generated_again(one_step_done):
    folder, _, prompts_at_1 = one_step_done
    path = folder / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[data.index(bytes([3]) * 16) + 5] ^= 1
    path.write_bytes(data)
    buffer, counts = start(folder, 2, checkpoint=(WeightVersion(1, 1), prompts_at_1))
    assert counts == {"ready": 3}
    buffer.published(WeightVersion(2, 1))
    assert lease(buffer).order == 3


class AnyCrash(RuleBasedStateMachine):
    """Leases, groups, steps, checkpoints, and crashes of the process or of the machine, in any order."""

    @initialize(
        max_lag=st.integers(0, 2),
        rule_=st.sampled_from(["keep", "drop"]),
        durability=st.sampled_from(["written", "fsync_interval", "fsync_each"]),
    )
    def begin(self, max_lag, rule_, durability):
        self.folder = Path(tempfile.mkdtemp(prefix="journal-"))
        self.config = {"max_lag": max_lag, "after_resume": rule_, "durability": durability}
        self.durability = durability
        self.lineage, self.checkpoint = 0, None
        self.committed: list[int] = []  # orders trained on the path to the checkpoint
        self.restart()

    def restart(self):
        self.lineage += 1
        self.buffer, self.recovered = start(
            self.folder, self.lineage, checkpoint=self.checkpoint, count=14, **self.config
        )
        self.version = WeightVersion(self.lineage, self.checkpoint[0].version if self.checkpoint else 0)
        self.trained = list(self.committed)
        self.leases: list[tuple[Lease, int]] = []
        self.acknowledged: set[str] = set()  # lease ids of this start
        self.buffer.published(self.version)

    @rule()
    def lease(self):
        if (lease := self.buffer.lease("g", 0.0)) is not None:
            self.leases.append((lease, self.version.version))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data, keep):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, version = self.leases[index] if keep else self.leases.pop(index)
        message = deliver(lease, version, lineage=self.lineage)
        if self.buffer.accept(message, payload(message)) is None and self.buffer.journal.is_durable(
            self.buffer.journal.position
        ):
            self.acknowledged.add(lease.lease_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data):
        self.buffer.fail(data.draw(st.sampled_from(self.leases))[0].lease_id, "failed")

    @rule()
    def lose(self):
        """The generator ends, and another takes its name."""
        self.buffer.release("g")

    @rule()
    def step(self):
        batch = self.buffer.take(self.version)
        if batch is None:
            return
        for entry in batch:
            assert 0 <= self.version.version - entry.oldest.version <= self.config["max_lag"]
            assert entry.payload == bytes([entry.order]) * 16
            assert entry.order not in self.trained
        self.trained += [entry.order for entry in batch]
        self.version = WeightVersion(self.lineage, self.version.version + 1)
        self.buffer.published(self.version)

    @rule(told=st.booleans())
    def commit(self, told):
        """A checkpoint is renamed into place; the buffer may never hear of it."""
        if self.checkpoint is not None and self.version.version == self.checkpoint[0].version:
            return
        assert self.buffer.journal.sync()
        self.checkpoint, self.committed = (self.version, self.buffer.snapshot()), list(self.trained)
        if told:
            self.buffer.journal.append(Committed(step=self.version.version, prompts=self.checkpoint[1]))

    @rule(torn=st.booleans(), share=st.floats(0, 1))
    def crash(self, torn, share):
        """The process ends; with the machine, anything that was not synced may be missing, from some byte on."""
        journal = self.buffer.journal
        safe, size = journal._safe_size, journal._size
        acknowledged, step = set(self.acknowledged), self.checkpoint[0].version if self.checkpoint else 0
        journal._let_go()
        if torn and self.durability != "written":
            with open(journal.path, "r+b") as file:
                file.truncate(int(safe + share * (size - safe)))
        before = {e.lease.lease_id: e for e in self.buffer._entries.values()}
        self.restart()
        now = {e.lease.lease_id for e in self.buffer._entries.values()}
        assert not any(self.buffer._attempts[order] and order in self.committed for order in range(14))
        if self.config["after_resume"] == "keep":
            for lease_id in acknowledged:
                entry = before.get(lease_id)
                if entry is not None and entry.oldest.version <= step and entry.state is State.READY:
                    assert lease_id in now, f"group {lease_id} was acknowledged and is lost"

    @invariant()
    def every_group_and_token_is_accounted_for(self):
        if not hasattr(self, "buffer"):
            return
        out, tokens = self.buffer.outcomes, self.buffer.tokens
        gone = out["trained"] + out["requeued"] + sum(n for k, n in out.items() if k.startswith("dropped"))
        assert out["leased"] + out["recovered"] == gone + sum(self.buffer.count(state) for state in State)
        came = tokens["generated"] + tokens["recovered"]
        fates = sum(n for fate, n in tokens.items() if fate not in ("generated", "recovered"))
        assert came == fates + self.buffer.tokens_in_flight

    def teardown(self):
        """From wherever we are, every prompt is trained exactly once on the path."""
        if not hasattr(self, "buffer"):
            return
        for lease, _ in self.leases:
            self.buffer.fail(lease.lease_id, "failed")
        for _ in range(200):
            while (lease := self.buffer.lease("g", 0.0)) is not None:
                message = deliver(lease, self.version.version, lineage=self.lineage)
                assert self.buffer.accept(message, payload(message)) is None
            self.step()
        assert sorted(self.trained) == list(range(14))
        assert self.buffer.exhausted
        self.buffer.journal.close()
        history = read_history(self.folder)
        assert history.damage == []
        shutil.rmtree(self.folder)


TestAnyCrash = AnyCrash.TestCase
TestAnyCrash.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
