"""A buffer keeps nothing of what is trained: a run without an end needs no more memory at its thousandth step than before."""

import gc
import logging
import sys
from pathlib import Path

import pytest

from asyncgrpo.buffer.group_health import BIAS_WINDOW
from asyncgrpo.journal.log import Ledger
from asyncgrpo.types import Lease
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import (
    Grant,
    LeaseFailed,
    RequestEval,
    Saved,
    Serving,
    Take,
    TakeSnapshot,
    Trained,
)
from asyncgrpo.wire.supervision import GeneratorLost
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.journal.journals import Clock, journal

PER_STEP = 4
FILLED = 5 * BIAS_WINDOW // 4 // PER_STEP
"""Steps after which what is kept of the last groups is full."""
STEPS = 120


class EndlessRun(Served):
    """Training without an end over 10 prompts, with checkpoints, evaluations, failed leases and a generator that is lost."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.leases, self.step = list[Lease](), 0
        super().__init__(count=10, per_step=PER_STEP, epochs=None, journal=ledger, held_out=prompts(2), clock=clock)
        self.hear("learner", Trained(version=v(0)))
        self.join("b", window=8)

    def hear(self, peer: str, message: Message, payload: bytes = b"") -> list[tuple[str, str]]:
        sent = super().hear(peer, message, payload)
        self.leases += [message.lease for _, message in self.lines.sent if isinstance(message, Grant)]
        return sent

    def train(self) -> None:
        self.events.clear()
        self.now_s += 1.0
        self.join("a", incarnation=f"{self.step}", window=8, version=self.step)
        for name in "ab":
            self.hear(name, Serving(generator_id=name, version=v(self.step), token_s=0.1, running=1))
        self.hear("learner", Take(version=v(self.step)))
        if self.step % 10 == 0:
            self.hear("learner", RequestEval(step=self.step))
            self.hear("b", LeaseFailed(generator_id="b", lease_id=self.leases.pop(0).lease_id, reason="failed"))
            self.hear("driver", GeneratorLost(generator_id="a"))
        while self.leases and self.service._take is not None:
            lease = self.leases.pop(0)
            scores = (1.0, 1.0) if lease.purpose == "train" and lease.prompt_index % 5 == 0 else (0.0, 1.0)
            self.hear("b", deliver(lease, self.step, scores), PAYLOAD)
        assert self.service._take is None, "the learner has its batch"
        self.step += 1
        self.hear("learner", Trained(version=v(self.step)))
        if self.step % 20 == 0:
            self.hear("learner", TakeSnapshot(trained=v(self.step)))
            self.hear("learner", Saved(step=self.step))


def allocated() -> int:
    """Objects that the interpreter has allocated."""
    gc.collect()
    return sys.getallocatedblocks()


def test_a_step_leaves_no_object_in_the_buffer_and_its_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL, "asyncgrpo")  # pytest keeps every record
    clock = Clock()
    run = EndlessRun(journal(tmp_path / "j", durability="written", clock=clock, segment_bytes=2**18), clock)
    for _ in range(FILLED):
        run.train()
    before = allocated()
    for _ in range(STEPS):
        run.train()
    assert run.service._buffer.outcomes["trained"] == PER_STEP * (FILLED + STEPS)
    assert allocated() - before < STEPS / 4, "less than an object in four steps of four groups"
