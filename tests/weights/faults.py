"""Publications under injected faults: is any version ever torn, or under another's name?

    python -m tests.weights.faults --publications 10000

A real publisher, a sender and real receivers, over real sockets and gloo groups, in one process: one generator maps the
learner's memory, four on two other machines get broadcasts of deltas and of all weights, in two parts that two of each machine
receive side by side. Meanwhile deltas are altered and cut, broadcast bytes are altered; the sender is late; generators end
without a word, come, stand still and are slow; and the learner offers versions as fast as arenas are free. Whatever an engine is
given to load, at whatever version, is compared with what was published under that number, at the begin of the load and again at
its end.

One JSON line: the faults that were injected, how versions travelled, and what was wrong. It must be nothing.
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import arena, lane, publisher, receiver
from asyncgrpo.weights.arena import Arenas, SharedTensors, Stream
from asyncgrpo.weights.delta import Delta
from asyncgrpo.weights.lane import Sender, Written
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.publisher import Publication
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import Message
from benchmarks.measuring import show, where
from tests.weights.changing import LAYOUT, as_bytes, change, checksum
from tests.weights.publishing import HOST, Plane

SHARES = [0.0, 0.001, 0.005, 0.01, 0.05]
"""Of the elements that change from one version to the next."""
FAR = 4
FAULTS_OF_DELTAS = {"delta altered": 0.01, "delta cut": 0.005}
BROADCAST_ALTERED = 0.01
AFTER_A_PUBLICATION = {"generator ends": 0.02, "generator stands still": 0.02, "generator is slow": 0.05}
ALL_CHANGE = 0.01
LONGEST_PAUSE_S = 2.0
LAST_WITHIN_S = 60.0
"""For the last version to reach every engine."""


class Engine:
    """Loads what it is given, and compares it with what was published."""

    def __init__(self, truth: dict[PolicyVersion, str], found: Counter[str]) -> None:
        self._truth, self._found = truth, found
        self.version: PolicyVersion | None = None
        self.slow_s = 0.0

    def apply(self, tensors: SharedTensors, version: PolicyVersion) -> Checksum:
        before = checksum(as_bytes(tensors)).digest
        pause_s, self.slow_s = self.slow_s, 0.0
        time.sleep(pause_s)
        held = checksum(as_bytes(tensors))
        self._found["loads"] += 1
        try:
            tensors.require_intact()
        except WeightsError:  # on a busy machine it was given up meanwhile; engines refuse such a load, too
            self._found["loads refused"] += 1
            return Checksum(held.digest)
        self._found["torn"] += before != held.digest
        self._found["not what was published"] += not before == held.digest == self._truth[version]
        self.version = version
        return held


class Elsewhere(Receiver):
    """The receiver of a generator on another machine, that can stand still."""

    still_until_s = 0.0

    def _handle(self, message: Message, payload: Any = b"") -> None:
        while time.monotonic() < self.still_until_s:
            time.sleep(0.01)
        super()._handle(message, payload)


class Fleet(Plane):
    """The learner and its generators."""

    def __init__(self, seed: int, often: float) -> None:
        self._often = often
        self.found: Counter[str] = Counter()
        self.is_bad = True
        self.chance, self._of_broadcasts, self._of_deltas = (random.Random(seed + n) for n in range(3))
        self._random = np.random.default_rng(seed)
        super().__init__(WeightsConfig(bucket_mb=1, timeout_s=1.0), maps=True)
        _, part = Stream([(0, LAYOUT.num_bytes)]).split(2)
        self.publisher.start(list(LAYOUT.tensors), others=[part])
        self._sender = Sender(1, part, endpoint=self.publisher.endpoint, host=HOST, keys=None, layout=LAYOUT)
        self._writes: Counter[int] = Counter()
        self._flat = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
        self.truth: dict[PolicyVersion, str] = {}
        self.members: dict[str, tuple[Receiver, Engine]] = {}
        self.add("near", Receiver)
        for number in range(FAR):
            self.add(f"far-{number}", Elsewhere)

    def add(self, name: str, kind: type[Receiver]) -> None:
        engine = Engine(self.truth, self.found)
        machine = "" if kind is Receiver else f"machine {int(name[-1]) % 2}"
        made = self.join(name, kind, str(self.found["generators"]), machine, apply=engine.apply)
        self.found["generators"] += 1
        self.members[name] = made, engine

    def publish(self, version: PolicyVersion) -> None:
        """Change the weights and offer them, as soon as an arena is free."""
        self._change(1.0 if self.chance.random() < ALL_CHANGE else self.chance.choice(SHARES))
        flat = self._flat.clone()
        self.truth[version] = checksum(flat).digest

        def fill(arenas: Arenas, slot: int) -> None:
            arena, half = arenas.arena(LAYOUT, slot), LAYOUT.num_bytes // 2
            arena[:half] = flat[:half]
            time.sleep(0.0)  # whoever reads it now has half of it
            arena[half:] = flat[half:]
            due_s = time.monotonic() + self.chance.choice([0.0, 0.0, 0.05])
            self._writes[slot] += 1
            self._sender.written(Written(slot, self._writes[slot], arena, lambda: time.monotonic() >= due_s))

        self._wait(lambda: self.publisher.offer(version, fill), 60.0)
        self.found["publications"] += 1

    def settle(self, timeout_s: float) -> bool:
        """Wait until everyone in touch has what was offered last. Returns whether that was so in time."""
        is_done = self._wait(lambda: self.publisher.is_idle, timeout_s)
        for report in self.publisher.reports():
            self._count(report)
        return is_done

    def mischief(self) -> None:
        """What may happen to a generator after a publication."""
        name = f"far-{self.chance.randrange(FAR)}"
        made, engine = self.members[name]
        for fault, share in AFTER_A_PUBLICATION.items():
            if self.chance.random() >= self._often * share:
                continue
            self.found[fault] += 1
            if fault == "generator ends":
                made.stop()
                self.add(name, Elsewhere)
            elif fault == "generator stands still" and isinstance(made, Elsewhere):
                made.still_until_s = time.monotonic() + self.chance.uniform(0.1, LONGEST_PAUSE_S)
            else:
                engine.slow_s = self.chance.uniform(0.0, 0.1)

    def alter_deltas(self, to_bytes: Callable[[Delta], bytes]) -> Callable[[Delta], bytes]:
        """`to_bytes`, whose payload is wrong at times."""

        def payload(delta: Delta) -> bytes:
            self.found["deltas"] += 1
            right = bytearray(to_bytes(delta))
            for fault, share in FAULTS_OF_DELTAS.items():
                if self.is_bad and self._of_deltas.random() < self._often * share:
                    self.found[fault] += 1
                    at = self._of_deltas.randrange(len(right))
                    right[at:] = b"" if fault == "delta cut" and at else bytes([right[at] ^ 1]) + right[at + 1 :]
            return bytes(right)

        return payload

    def alter_broadcasts(self, form: Callable[..., Any]) -> Callable[..., Any]:
        """`form_group` of a generator, in whose group bytes are altered at times."""

        def formed(*arguments: Any, **named: Any) -> Any:
            group = form(*arguments, **named)
            whole = group.broadcast

            def broadcast(flat: Tensor) -> None:
                whole(flat)
                self.found["broadcasts"] += 1
                if self.is_bad and self._of_broadcasts.random() < self._often * BROADCAST_ALTERED:
                    self.found["broadcast altered"] += 1
                    flat[self._of_broadcasts.randrange(len(flat))] ^= 1

            group.broadcast = broadcast
            return group

        return formed

    def end(self) -> None:
        """One more version without faults, which everyone must hold."""
        self.is_bad = False
        time.sleep(LONGEST_PAUSE_S)
        last = PolicyVersion(2, 0)
        self.publish(last)
        self._wait(lambda: all(engine.version == last for _, engine in self.members.values()), LAST_WITHIN_S)
        self.found["behind at the end"] = sum(engine.version != last for _, engine in self.members.values())
        self.found["receivers that ended"] = sum(made.failure is not None for made, _ in self.members.values())
        self.settle(min(10.0, LAST_WITHIN_S))
        for made in self.receivers:
            made.stop()
        self._wait(lambda: not any(made.is_alive for made in self.receivers), 60.0)
        self._sender.close()
        self.close()

    def _change(self, share: float) -> None:
        change(self._flat, share, self._random, self.chance.randrange)

    def _count(self, report: Publication) -> None:
        self.found["reports"] += 1
        self.found["reports of other bytes"] += report.digest != self.truth[report.version]
        self.found["reports of other tensors"] += len(report.gaps)
        self.found["offered again"] += report.attempts - 1

    def _wait(self, condition: Callable[[], object], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True


def run(publications: int, seed: int, often: float = 1.0) -> Counter[str]:
    """Counts by name.

    Args:
        often: times as many faults.
    Raises:
        WeightsError: the publisher gave up.
    """
    others = {
        (liveness, "SUSPECT_S"): 0.7,
        (publisher, "ATTEMPTS"): 10**9,  # of bytes that are wrong by design
        (arena, "BLOCK"): 4096,  # so that these few bytes have several parts
    }
    for (module, name), value in others.items():
        mock.patch.object(module, name, value).start()
    fleet = Fleet(seed, often)
    mock.patch.object(receiver, "form_group", fleet.alter_broadcasts(receiver.form_group)).start()
    mock.patch.object(lane, "to_bytes", fleet.alter_deltas(lane.to_bytes)).start()
    poll = lane.Deltas.poll  # on loopback a comparison may take longer than a broadcast
    mock.patch.object(lane.Deltas, "poll", lambda deltas, broadcast_s: poll(deltas, math.inf)).start()
    try:
        fleet.publisher.wait_for(lambda: 1 + FAR, 30.0, lambda what, seconds: None)
        for number in range(publications):
            fleet.publish(PolicyVersion(1, number))
            if fleet.chance.random() < 0.7:  # else the next one follows at once
                fleet.found["not settled in time"] += not fleet.settle(fleet.chance.uniform(0.0, 0.3))
            fleet.mischief()
        fleet.end()
    finally:
        mock.patch.stopall()
    return fleet.found


FAULTS = (*FAULTS_OF_DELTAS, "broadcast altered", *AFTER_A_PUBLICATION)
WRONG = (
    "torn",
    "not what was published",
    "reports of other bytes",
    "reports of other tensors",
    "behind at the end",
    "receivers that ended",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    found = run(arguments.publications, arguments.seed)
    wrong = sum(found[name] for name in WRONG)
    show({"wrong": wrong, **dict(sorted(found.items())), "seconds": round(time.monotonic() - started), **where()})
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
