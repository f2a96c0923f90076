"""Malformed frames into everything that reads frames: nobody falls over, nothing grows, nothing is run, nothing false is kept.

    python -m tests.wire.fuzz --frames 1000000 --seed 0

Most go through `BufferService.turn`, from generators, strangers, learner and driver; the others through the publisher, a
generator and its receiver of weights. Between them a good generator and the learner go on with the run.
"""

import argparse
import asyncio
import gc
import json
import logging
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig, WeightsConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import RefusedError, WireError
from asyncgrpo.types import (
    Completion,
    Group,
    Lease,
    PolicyVersion,
    Prompt,
    RewardHealth,
    Rollout,
    Sampling,
    Score,
    TensorInfo,
    VersionSpan,
)
from asyncgrpo.weights.arena import Layout
from asyncgrpo.weights.publication import Checksum, SyncCheck
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import Message, rollouts, weights
from asyncgrpo.wire.codec import decode, encode, pack_group, unpack_batch
from asyncgrpo.wire.supervision import Drain, GeneratorLost
from tests.wire.mutations import Frames, Mutator

VOCABULARY, GROUP_SIZE, PER_STEP, MAX_LAG = 151_936, 2, 2, 2
STRANGERS = 4
SECONDS_A_FRAME = 0.02
EVERY = 50
"""Frames between two good groups."""


class Net:
    """The buffer's socket: what is sent is packed as the product packs it, and kept by peer for a while."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[tuple[Message, memoryview]]] = {}

    def send(self, peer: str, message: Message, payload: Any = b"") -> bool:
        arrived = decode([bytes(frame) for frame in encode(message, payload)])
        self.sent.setdefault(peer, deque(maxlen=200)).append(arrived)
        return True


class Plane:
    """A buffer with a good generator, a bad one and a learner."""

    def __init__(self, seed: int, canary: str) -> None:
        self.mutator = Mutator(seed, canary)
        self.line = Mutator(seed + 1, canary)
        self.rng = self.mutator.rng
        self.net = Net()
        prompts = tuple(Prompt(prompt_id=f"train/{i}", token_ids=(i + 1, 7), answer=[1]) for i in range(50))
        self.buffer = Buffer(
            # Malformed completions count against their prompts, which would all be in quarantine after some 100,000 frames.
            BufferConfig(prompts_per_step=PER_STEP, max_lag=MAX_LAG, lease_timeout_s=4.0),
            AlgorithmConfig(group_size=GROUP_SIZE),
            PromptSource(prompts, seed=seed, shuffle=True, epochs=None),
            Sampling(),
            seed=seed,
            lineage=1,
            max_attempts=10**6,
        )
        evaluations = Evaluations(prompts[:2], Sampling(), seed, 30.0)
        self.service = BufferService(self.net, self.buffer, evaluations, VOCABULARY)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.step = 0
        self.trained = 0
        self.hear("learner", rollouts.Trained(version=PolicyVersion(1, 0)))

    def hear(self, peer: str, message: Message, payload: bytes = b"") -> None:
        self.turn(peer, [bytes(frame) for frame in encode(message, payload)])

    def turn(self, peer: str, frames: Frames) -> None:
        self.now_s += SECONDS_A_FRAME
        self.service.turn((peer, frames), self.now_s)

    # -- the good ones -------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        version = PolicyVersion(1, self.step)
        if self.rng.random() < 0.1:  # one that claims a large window gets whatever is free
            self.end_the_others()
        self._register("bad")
        self._register("good")
        leases = self.leases("good-0")
        self.net.sent["good-0"].clear()  # before it delivers, for that brings it new leases
        for lease in leases:
            self.hear("good-0", *delivery_of(lease, version))
        if self.buffer.count(State.READY) >= PER_STEP:
            self.hear("learner", rollouts.Take(version=version))
        for message, payload in self.net.sent.pop("learner", ()):
            if isinstance(message, rollouts.Batch):
                self._train(message, payload, version)
        self.check()

    def _register(self, name: str) -> None:
        if name not in self.service._sessions:
            self.hear(f"{name}-0", rollouts.Register(generator_id=name, incarnation="0", window=3))
        self.hear(f"{name}-0", rollouts.Serving(generator_id=name, version=PolicyVersion(1, self.step)))

    def end_the_others(self) -> None:
        for name in set(self.service._sessions) - {"good"}:
            self.hear("driver", GeneratorLost(generator_id=name))

    def leases(self, peer: str) -> list[Lease]:
        granted = [m.lease for m, _ in self.net.sent.get(peer, ()) if isinstance(m, rollouts.Grant)]
        return [lease for lease in granted if self.buffer.lease_of(lease.lease_id) == lease]

    def _train(self, batch: rollouts.Batch, payload: memoryview, version: PolicyVersion) -> None:
        """What the learner gets can be believed, in words other than those of the checks."""
        for group in unpack_batch(batch, payload):
            assert len(group.rollouts) == GROUP_SIZE
            for rollout in group.rollouts:
                done = rollout.completion
                assert len(done.token_ids) == len(done.logprobs) == done.spans[-1].end
                assert all(0 <= token < VOCABULARY for token in done.token_ids.tolist())
                assert np.isfinite(done.logprobs).all() and (done.logprobs <= 1e-5).all()
                assert rollout.score.value is None or np.isfinite(rollout.score.value)
                ages = [version.number - span.version.number for span in done.spans]
                # One claimed to be of the weights under way is indistinguishable from one that is.
                assert all(-1 <= age <= MAX_LAG for age in ages), ages
                assert {span.version.lineage for span in done.spans} == {1}
            self.trained += 1
        self.step += 1
        self.hear("learner", rollouts.Trained(version=PolicyVersion(1, self.step)))

    def check(self) -> None:
        out, tokens, held = self.buffer.outcomes, self.buffer.tokens, sum(map(self.buffer.count, State))
        dropped = sum(count for name, count in out.items() if name.startswith("dropped_"))
        assert out["leased"] == held + out["trained"] + dropped + out["requeued"], out
        fates = ("trained", "filtered", "stale", "failed", "aborted", "duplicate", "unusable")
        assert tokens["generated"] == sum(tokens[f] for f in fates) + self.buffer.tokens_in_flight, tokens

    # -- the bad ones --------------------------------------------------------------------------------------------------

    def attack(self) -> None:
        kind = self.rng.random()
        if kind < 0.05:
            self._register("bad")
        elif kind < 0.45:  # the bad generator knows how to make a digest
            message, payload = self._of_generator()
            if isinstance(message, rollouts.Deliver) and self.rng.random() < 0.6:
                frames = [bytes(f) for f in encode(*self.mutator.lie(message, payload))]
            else:
                frames = self.mutator.sealed(message, payload)
            self.turn("bad-0", frames)
        elif kind < 0.5:  # and says what is not for it to say
            self.hear("bad-0", self.rng.choice(self._of_others()))
        elif kind < 0.7:
            peer = self.rng.choice(("bad-0", "good-0"))
            self.turn(peer, self.mutator.of_bytes(*self._of_generator()))
        elif kind < 0.85:
            self.turn(f"stranger-{self.rng.randrange(STRANGERS)}", self.mutator.sealed(*self._of_generator()))
        else:  # on the way from the learner and the driver
            self.turn(
                self.rng.choice(("learner", "driver")), self.line.of_bytes(self.rng.choice(self._of_others()), b"")
            )

    def _of_generator(self) -> tuple[Message, bytes]:
        leases = self.leases("bad-0") or self.leases("good-0")
        if leases and self.rng.random() < 0.6:
            return delivery_of(self.rng.choice(leases), PolicyVersion(1, self.step))
        lease_id = leases[0].lease_id if leases else "1.0.0"
        health = RewardHealth(failed=5, failing_s=1.0, probe_in_s=self.rng.choice((None, 3.0)), last="no")
        return self.rng.choice((
            rollouts.Register(generator_id="bad", incarnation="0", window=3),
            rollouts.Serving(generator_id="bad", version=PolicyVersion(1, self.step), rewards=health),
            rollouts.AwaitsScores(generator_id="bad", lease_id=lease_id),
            rollouts.LeaseFailed(generator_id="bad", lease_id=lease_id, reason="failed", detail="why"),
            rollouts.RewardFailed(generator_id="bad", failure="timeout", detail="why", count=10),
        )), b""  # fmt: skip

    def _of_others(self) -> list[Message]:
        version = PolicyVersion(1, self.step)
        return [
            rollouts.Take(version=version), rollouts.Trained(version=version), rollouts.RequestEval(step=3),
            rollouts.TakeSnapshot(trained=version), rollouts.Saved(step=3), rollouts.LastEvals(), rollouts.Finished(),
            Drain(reason="r"), GeneratorLost(generator_id="good"),
        ]  # fmt: skip


def delivery_of(lease: Lease, version: PolicyVersion) -> tuple[rollouts.Deliver, bytes]:
    rng = np.random.default_rng(lease.seed)
    made = []
    for index in range(lease.num_completions):
        length = int(rng.integers(2, 12))
        tokens, logprobs = rng.integers(0, VOCABULARY, length), -rng.random(length, np.float32)
        completion = Completion(index, tokens.astype(np.int32), logprobs, (VersionSpan(version, 0, length),), "stop")
        made.append(Rollout(completion, Score(value=float(index))))
    fields = {
        name: getattr(lease, name) for name in ("group_id", "lease_id", "attempt", "prompt_index", "purpose", "prompt")
    }
    return pack_group(Group(**fields, rollouts=tuple(made), generator_id="bad"))


class Readers:
    """The publisher, a generator and its receiver, without engine and network."""

    def __init__(self, seed: int, canary: str) -> None:
        self._mutators = [Mutator(seed + which, canary) for which in range(4)]  # for each conversation its own
        self._rng = self._mutators[0].rng
        self._loop = asyncio.new_event_loop()
        self._frames: Frames | None = None
        self.publisher = Publisher(
            WeightsConfig(), maps=True, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None
        )
        self.publisher._server.close()
        self.publisher._server = self  # type: ignore[assignment]
        self.receiver = Receiver(
            "", generator_id="g", incarnation="a", host="", apply=lambda tensors, version: Checksum(""), keys=None
        )  # fmt: skip
        self.receiver._client = self  # type: ignore[assignment]  # what it sends comes to us
        self.refused: Counter[str] = Counter()
        from tests.generators.test_service import Generator

        self.generator = Generator()
        self.generator._client = self.generator._connect()
        self.generator._loop = self._loop  # type: ignore[assignment]
        self.publisher._layout, self.publisher._check = Layout(_LAYOUT), SyncCheck.none()
        self.publisher._layout_message = weights.WeightsLayout(tensors=_LAYOUT)
        version, name = PolicyVersion(1, 3), {"generator_id": "g"}
        self._to_publisher: list[Message] = [
            weights.Join(generator_id="g", incarnation="a", machine="m", mark="k"), weights.Alive(generator_id="g"),
            weights.GroupFormed(**name, group_number=1, problem="p"),
            weights.Staged(**name, digest=2**64 - 1, writes=1),
            weights.Swapped(**name, version=version, checksum="c"),
            weights.Checked(**name, version=version, scores=(-1.0, -2.5)),
            weights.SyncFailed(**name, reason="r", poisoned=True), weights.SyncFailed(**name, reason="r", writes=1),
            weights.PartWritten(sender=1, slot=0, writes=1),
        ]  # fmt: skip
        self._to_generator: list[Message] = [
            rollouts.Ack(lease_id="1.0.0"), rollouts.Nack(lease_id="1.0.0", reason="r"),
            rollouts.Cancel(lease_ids=("1.0.0", "1.1.0"), reason="r"),
        ]  # fmt: skip
        self._to_receiver: list[Message] = [
            weights.WeightsLayout(tensors=_LAYOUT, check=((1, 2, 3),), check_start=1),
            weights.Offer(version=version, file="f", slot=1, writes=2),
            weights.Offer(version=version, group_number=1, piece_bytes=64),
            weights.Offer(version=version, group_number=1, base="f", delta_bytes=10),
        ]  # fmt: skip
        self._sealed_only_by_us: list[Message] = [
            rollouts.Grant(lease=msgspec.convert(_LEASE, Lease)),
            weights.FormGroup(
                group_number=1, rank=1, world=2, store_host="h", store_port=1, backend="gloo", timeout_s=1.0
            ),
        ]

    def attack(self) -> None:
        which = self._rng.randrange(3)
        if which == 0:
            self._frames = self._malformed(which, self._to_publisher)
            self.publisher._receive()
            return
        if which == 1:
            message = self._read(self._malformed(which, self._to_generator))
            if message is not None:
                self._loop.run_until_complete(self.generator._handle(message))
                self.generator.sent.clear()
        else:
            message = self._read(self._malformed(which, self._to_receiver))
            if message is not None:
                try:
                    self.receiver._handle(message, bytes(self._rng.randrange(20)))
                except WireError:
                    self.refused["layout"] += 1
        self._read(self._mutators[3].of_bytes(self._rng.choice(self._sealed_only_by_us), b""))

    def _malformed(self, which: int, messages: list[Message]) -> Frames:
        mutator, message = self._mutators[which], self._rng.choice(messages)
        payload = bytes(self._rng.randrange(40) if message.max_payload_bytes else 0)
        corrupt = mutator.sealed if self._rng.random() < 0.6 else mutator.of_bytes
        return corrupt(message, payload)

    def _read(self, frames: Frames) -> Message | None:
        try:
            return decode(frames)[0]
        except RefusedError as error:
            self.refused[error.reason] += 1
            return None

    def receive(self, timeout_s: float) -> tuple[str, Frames] | None:
        frames, self._frames = self._frames, None
        return None if frames is None else ("weights-g-a", frames)

    def send(self, *message: Any) -> bool:
        return True

    def close(self) -> None:
        self._loop.close()


_LAYOUT = (TensorInfo(name="w", shape=(3, 4), dtype="float32"),)
_LEASE = {
    "lease_id": "1.0.0", "group_id": "1.0", "attempt": 0, "prompt_index": 0, "purpose": "train", "num_completions": 2, "seed": 0,
    "prompt": {"prompt_id": "train/0", "token_ids": [1]}, "sampling": {},
}  # fmt: skip


def resident_mb() -> float:
    gc.collect()
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmRSS")) * 1024 / 2**20


def refusals() -> Counter[str]:
    """By reason, of this process so far."""
    samples = next(iter(metrics.rejected_frames_total.collect())).samples
    return Counter({s.labels["reason"]: int(s.value) for s in samples if s.name.endswith("_total")})


def fuzz(frames: int, seed: int) -> dict[str, Any]:
    """Spoil and send so many frames. Raises whatever a reader raises, and AssertionError where a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        plane = Plane(seed, str(canary))
        readers = Readers(seed + 2, str(canary))
        before, started = refusals(), time.process_time()
        resident = largest = 0.0
        for number in range(frames):
            if number % EVERY == 0:
                plane.go_on()
            if number == min(frames // 4, 20_000):
                resident = resident_mb()
            elif number % 20_000 == 0:
                largest = max(largest, resident_mb())
            if number % 10 == 9:
                readers.attack()
            else:
                plane.attack()
        growth, seconds = max(largest, resident_mb()) - resident, time.process_time() - started
        trained = plane.trained
        plane.end_the_others()
        for _ in range(4):
            plane.go_on()
        assert plane.trained > trained, "after all that, good groups are trained as before"
        assert not canary.exists(), "something was run"
        readers.close()
        return {
            "what": "malformed frames",
            "frames": frames,
            "seed": seed,
            "frames_per_cpu_s": round(frames / seconds),
            "growth_mb": round(growth, 1),
            "trained": plane.trained,
            "refused_by_buffer": dict(refusals() - before),
            "refused_by_others": dict(readers.refused),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    found = fuzz(arguments.frames, arguments.seed)
    print(json.dumps(found))
    assert found["growth_mb"] <= 64, "it grows"


if __name__ == "__main__":
    main()
