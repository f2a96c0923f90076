"""The buffer and its journal through any order of events, crashes of the process and of the machine among them.

More examples: `ASYNCGRPO_EXAMPLES=5000 pytest --timeout=0 tests/buffer/test_any_crash.py`.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncgrpo.buffer.buffer import Buffer, GroupEntry, State
from asyncgrpo.buffer.recovery import Verdict, bring_back, earlier_failures, judge, reopen, surviving_path
from asyncgrpo.buffer.service import counters
from asyncgrpo.config.schema import BufferConfig
from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal.history import BatchIssued, Committed, Delivered, Dropped, Found, History, read_history
from asyncgrpo.learner.record import Ledger
from asyncgrpo.types import Lease, PolicyVersion
from tests.buffer.test_buffer import deliver
from tests.buffer.test_recovery import buffer_of, source_of
from tests.journal.journals import Clock, began
from tests.simulation.disk import SimulatedDisk
from tests.simulation.promises import Kept, Promises, Weights

EXAMPLES = int(os.environ.get("ASYNCGRPO_EXAMPLES", "60"))
PROMPTS = 14
PER_STEP = 2
TOKENS = 2  # of a group
HOLDERS = st.sampled_from(["a", "b"])


def decided(verdicts: list[Verdict]) -> list[tuple]:
    return [(verdict.record, verdict.reason, verdict.max_lag) for verdict in verdicts]


def untrained(whole: History, checkpoint: PolicyVersion | None) -> History:
    """Return a history without the groups that were dropped, or trained on the path to the checkpoint."""
    path, settled, groups = surviving_path(whole.starts, checkpoint), set[str](), dict[str, Found]()
    for found in whole.found:
        if isinstance(record := found.record, Dropped):
            settled.add(record.lease_id)
        elif isinstance(record, BatchIssued) and record.step <= path.get(record.version.lineage, -1):
            settled.update(record.lease_ids)
        elif isinstance(record, Delivered):
            groups[record.lease_id] = found
    others = [found for found in whole.found if not isinstance(found.record, Delivered)]
    left = [found for lease_id, found in groups.items() if lease_id not in settled]
    return History(whole.folder, whole.segments, others + left)


def payload(prompt_index: int) -> bytes:
    return bytes([prompt_index]) * 16


class AnyCrash(RuleBasedStateMachine):
    """One run of 14 prompts, as often as it is started again."""

    @initialize(
        seed=st.integers(0, 2**32),
        max_lag=st.integers(0, 2),
        durability=st.sampled_from(["memory", "written", "fsync_interval", "fsync_each"]),
        segment_bytes=st.sampled_from([300, 3000, 10**6]),
    )
    def begin(self, seed, max_lag, durability, segment_bytes):
        self.folder, self.clock = Path(tempfile.mkdtemp(prefix="journal-")), Clock()
        self.disk = SimulatedDisk(self.folder, random.Random(seed), self.clock)
        self.durability, self.max_lag, self.segment_bytes = durability, max_lag, segment_bytes
        self.promises, self.weights = Promises(durability=durability), Weights()
        self.disk.on_loss = self.promises.lost_what_was_synced
        self.lineage, self.checkpoint = 0, None
        self.ledger, self.totals = Ledger(), {}
        self.saved: list[tuple[int, ...]] = []  # orders of the steps that the checkpoint holds
        self.out: list[tuple[Lease, PolicyVersion]] = []  # every lease that was granted, with the version then
        self.start(max_lag)

    def start(self, max_lag: int):
        """A start of the run. A smaller bound may make groups useless, and nothing else may."""
        self.lineage += 1
        config = BufferConfig(prompts_per_step=PER_STEP, max_lag=max_lag, durability=self.durability)
        source, parent = source_of(PROMPTS, self.checkpoint), self.checkpoint and self.checkpoint[0]
        this = began(self.lineage, parent, max_lag=max_lag, prompts=source.state())
        whole = read_history(self.folder)
        on_disk = {"clock": self.clock, "disk": self.disk, "segment_bytes": self.segment_bytes}
        reopened = reopen(self.folder, this, source, config, **on_disk)
        if config.durability != "memory":
            assert reopened.failures == earlier_failures(whole, source)
            left = untrained(whole, parent)
            assert decided(reopened.verdicts) == decided(judge(left, source, this, config)), "by the rest as by all"
            assert surviving_path(reopened.history.starts, parent) == surviving_path(whole.starts, parent)
        self.buffer = buffer_of(reopened, source, config, lineage=self.lineage, max_attempts=1000, kind=Buffer)
        bring_back(self.buffer, reopened)
        self.version = PolicyVersion(self.lineage, len(self.saved))
        self.weights.started(self.version)
        too_old = [v.record.lease_id for v in reopened.verdicts if v.reason == "stale"]
        assert max_lag < self.max_lag or not too_old
        for lease_id in too_old:
            self.promises.gave_up(lease_id)
        self.num_too_old, self.max_lag = len(too_old), max_lag
        assert self.promises.broken(self.buffer, source, self.weights, whole, self.saved) is None
        trained = [prompt_index for prompt_indices in self.saved for prompt_index in prompt_indices]
        assert not any(self.buffer._attempts[prompt_index] for prompt_index in trained), (
            "what is done has nothing behind it"
        )
        self.steps = list(self.saved)
        self.batch: list[GroupEntry] | None = None
        self.unacknowledged: dict[str, tuple[int, Kept]] = {}  # by lease, with the place in the journal
        self.buffer.trained(self.version)

    # -- generators ----------------------------------------------------------------------------------------------------

    @rule(holder=HOLDERS)
    def lease(self, holder):
        if self.buffer.journal.is_blocked is None:
            lease = self.buffer.lease(holder, self.clock())
            if lease is not None:
                assert all(lease.lease_id != other.lease_id for other, _ in self.out), "a name is granted once"
                self.out.append((lease, self.version))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), newest=st.booleans())
    def deliver(self, data, newest):
        """The completion to any lease there ever was: the first time, again, or long after it had ended."""
        lease, version = data.draw(st.sampled_from(self.out))
        lineage = version.lineage
        version = self.version if newest and lineage == self.lineage else version
        refusal = self.buffer.accept(deliver(lease, version.number, lineage=lineage), payload(lease.prompt_index))
        if refusal is None:
            assert lineage == self.lineage, "a group of another start is kept"
            kept = Kept(lease.lease_id, lease.prompt_index, (version,), lineage)
            self.unacknowledged[lease.lease_id] = self.buffer.journal.position, kept

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def fail(self, data):
        self.buffer.fail(data.draw(st.sampled_from(self.out))[0].lease_id, "failed")

    @rule(holder=HOLDERS)
    def release(self, holder):
        self.buffer.release(holder)

    @rule(holder=HOLDERS, is_silent=st.booleans(), is_lost=st.booleans())
    def give_to_others(self, holder, is_silent, is_lost):
        self.buffer.free_leases_of(holder, is_silent=is_silent)
        if is_lost:
            self.buffer.release(holder)

    @rule()
    def expire(self):
        self.clock.now_s += 1e6
        self.buffer.expire(self.clock())
        assert self.buffer.count(State.LEASED) == 0

    # -- the learner ---------------------------------------------------------------------------------------------------

    @rule()
    def take(self):
        if self.batch is not None or self.buffer.journal.is_blocked is not None:
            return
        self.batch = self.buffer.take(self.version)
        for entry in self.batch or ():
            assert 0 <= self.version.number - entry.oldest.number <= self.max_lag
            assert entry.payload == payload(entry.prompt_index)
            assert all(entry.prompt_index not in prompt_indices for prompt_indices in self.steps), "trained twice"

    @rule()
    def publish(self):
        if self.batch is None or self.buffer.journal.is_blocked is not None:
            return
        self.steps.append(tuple(entry.prompt_index for entry in self.batch))
        self.version = PolicyVersion(self.lineage, self.version.number + 1)
        self.weights.stepped(self.version)
        self.buffer.trained(self.version)
        self.batch = None

    @rule(told=st.booleans())
    def commit(self, told):
        """A checkpoint is renamed into place; the buffer may never hear of it."""
        if self.batch is not None or len(self.steps) == len(self.saved) or not self.buffer.journal.sync():
            return
        state: PromptState = self.buffer.prompts.state()
        self.checkpoint, self.saved = (self.version, state), list(self.steps)
        self.totals = self.ledger.totals(counters(self.buffer))
        self.weights.saved(len(self.steps))
        if told:
            self.buffer.journal.append(Committed(step=len(self.steps), prompts=state))

    # -- the disk, and the end -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def tick(self, seconds):
        self.clock.now_s += seconds
        self.buffer.journal.tick()

    @rule(full=st.booleans(), seconds=st.sampled_from([0.5, 5.0]))
    def break_disk(self, full, seconds):
        if full:
            self.disk.full_until = self.clock() + seconds
        else:
            self.disk.fails_until = self.clock() + seconds

    @rule(with_machine=st.booleans(), max_lag=st.none() | st.integers(0, 2))
    def crash(self, with_machine, max_lag):
        self.ledger = Ledger(self.totals, self.ledger.tokens(counters(self.buffer))["generated"])
        if self.durability != "memory":
            self.buffer.journal._close_file()
        if with_machine:
            self.promises.power_was_cut(has_holes=self.disk.power_cut())
        self.start(self.max_lag if max_lag is None else max_lag)

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_durable_is_promised(self):
        for lease_id, (position, kept) in list(getattr(self, "unacknowledged", {}).items()):
            if self.buffer.journal.is_durable(position):
                del self.unacknowledged[lease_id]
                self.promises.acknowledged(kept)

    @invariant()
    def every_group_and_token_is_accounted_for(self):
        if not hasattr(self, "buffer"):
            return
        out, tokens = self.buffer.outcomes, self.buffer.tokens
        gone = out["trained"] + out["requeued"] + sum(n for k, n in out.items() if k.startswith("dropped"))
        assert out["leased"] + out["recovered"] == gone + sum(self.buffer.count(state) for state in State)
        came = tokens["generated"] + tokens["recovered"]
        assert 2 * came == tokens.total() + self.buffer.tokens_in_flight
        assert out["dropped_stale"] == self.num_too_old, "a group was dropped for its age"
        of_run = self.ledger.tokens(counters(self.buffer))
        assert 2 * of_run["generated"] == sum(of_run.values()) and min(of_run.values()) >= 0, of_run

    def teardown(self):
        """From wherever we are, with a disk that works, every prompt is trained exactly once on the path."""
        if not hasattr(self, "buffer"):
            return
        self.clock.now_s += 100.0
        for _ in range(200):
            self.tick(1.0)
            self.publish()
            for holder in ("a", "b"):
                self.buffer.release(holder)
            while (lease := self.buffer.lease("a", self.clock())) is not None:
                message = deliver(lease, self.version.number, lineage=self.lineage)
                assert self.buffer.accept(message, payload(lease.prompt_index)) is None
            self.take()
        assert sorted(prompt_index for prompt_indices in self.steps for prompt_index in prompt_indices) == list(
            range(PROMPTS)
        )
        assert self.buffer.exhausted
        self.commit(told=True)
        assert len(self.saved) == len(self.steps)
        assert self.ledger.tokens(counters(self.buffer))["trained"] == PROMPTS * TOKENS, "over all starts"
        self.buffer.journal.close()
        assert self.promises.at_the_end(self.weights, read_history(self.folder), self.steps) is None
        shutil.rmtree(self.folder)


TestAnyCrash = AnyCrash.TestCase
TestAnyCrash.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
