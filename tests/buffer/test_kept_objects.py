"""A buffer keeps nothing of what is trained: a run without an end needs no more memory at its thousandth step than before."""

import gc
import logging
import sys
from pathlib import Path

import pytest

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.group_health import BIAS_WINDOW
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.log import Ledger
from asyncgrpo.types import Lease, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Grant,
    LeaseFailed,
    Register,
    RequestEval,
    Saved,
    Serving,
    Take,
    TakeSnapshot,
    Trained,
)
from asyncgrpo.wire.supervision import GeneratorLost
from tests.buffer.test_buffer import deliver, prompts, v
from tests.journal.journals import Clock, journal

PER_STEP = 4
FILLED = 5 * BIAS_WINDOW // 4 // PER_STEP
"""Steps after which what is kept of the last groups is full."""
STEPS = 300


class EndlessRun:
    """Training without an end over 10 prompts, with checkpoints, evaluations, failed leases and a generator that is lost."""

    def __init__(self, ledger: Ledger | None, clock: Clock) -> None:
        self.clock, self.leases, self.step = clock, list[Lease](), 0
        source = PromptSource(prompts(10), seed=0, shuffle=True, epochs=None)
        config = BufferConfig(prompts_per_step=PER_STEP, max_lag=1)
        buffer = Buffer(config, AlgorithmConfig(group_size=2), source, Sampling(), seed=0, lineage=1, journal=ledger)
        self.service = BufferService(self, buffer, Evaluations(prompts(2), Sampling(), 0, 60.0))  # type: ignore[arg-type]
        self.hear("learner", Trained(version=v(0)))
        self.hear("b", Register(protocol=PROTOCOL, generator_id="b", incarnation="i", window=8))

    def send(self, peer: str, message: Message, payload: bytes = b"") -> bool:
        if isinstance(message, Grant):
            self.leases.append(message.lease)
        return True

    def hear(self, peer: str, message: Message, payload: bytes = b"") -> None:
        self.service.turn((peer, encode(message, payload)), self.clock.now_s)

    def train(self) -> None:
        self.clock.now_s += 1.0
        self.hear("a", Register(protocol=PROTOCOL, generator_id="a", incarnation=f"{self.step}", window=8))
        for name in "ab":
            self.hear(name, Serving(generator_id=name, version=v(self.step), token_s=0.1, running=1))
        self.hear("learner", Take(step=self.step, version=v(self.step)))
        if self.step % 10 == 0:
            self.hear("learner", RequestEval(step=self.step))
            self.hear("b", LeaseFailed(generator_id="b", lease_id=self.leases.pop(0).lease_id, reason="failed"))
            self.hear("driver", GeneratorLost(generator_id="a", reason="test"))
        while self.leases and self.service._take is not None:
            lease = self.leases.pop(0)
            scores = (1.0, 1.0) if lease.purpose == "train" and lease.prompt_index % 5 == 0 else (0.0, 1.0)
            self.hear("b", deliver(lease, self.step, scores), bytes(16))
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


@pytest.mark.parametrize("is_written", [False, True])
def test_a_step_leaves_no_object_in_the_buffer(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_written: bool):
    caplog.set_level(logging.CRITICAL, "asyncgrpo")  # pytest keeps every record
    clock = Clock()
    ledger = journal(tmp_path / "j", durability="written", clock=clock, segment_bytes=2**18) if is_written else None
    run = EndlessRun(ledger, clock)
    for _ in range(FILLED):
        run.train()
    before = allocated()
    for _ in range(STEPS):
        run.train()
    assert run.service._buffer.outcomes["trained"] == PER_STEP * (FILLED + STEPS)
    assert allocated() - before < STEPS / 4, "less than an object in four steps of four groups"
