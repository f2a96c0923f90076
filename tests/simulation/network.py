"""The network of the simulation: the product's frames, made by its codec, on lines that drop, copy, hold and damage.

Generator lines may lose, duplicate and reorder, as connections that break and come back do together with resends. The
learner's line to the buffer is one connection: it keeps its order and copies nothing, but a seed may let it lose a message.
"""

import random
from collections.abc import Callable
from typing import Any

from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, encode
from tests.simulation.faults import Faults
from tests.simulation.virtual import Frames, VirtualLoop

LATENCY_S = 0.002, 0.02


class Network:
    def __init__(self, loop: VirtualLoop, rng: random.Random, faults: Faults, note: Callable[..., None]) -> None:
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self._note = note
        self._cut_until: dict[str, float] = {}
        self._frozen_until: dict[str, float] = {}
        self._busy_until: dict[tuple[str, str], float] = {}
        self.slowness: dict[str, float] = {}
        """Factor on the latency of a place."""

    def cut(self, place: str, seconds: float) -> None:
        """What `place` sends or is sent gets lost for so long."""
        self._cut_until[place] = self._loop.time() + seconds

    def freeze(self, place: str, seconds: float) -> None:
        """What `place` sends or is sent waits for so long: it is stopped, seen from outside."""
        self._frozen_until[place] = self._loop.time() + seconds

    def carry(
        self, source: str, target: str, message: Message, payload: Buffer, arrive: Callable[[Frames], Any]
    ) -> None:
        """Bring a message from one place to another, as the faults allow. One of the two is `buffer`."""
        frames = [bytes(frame) for frame in encode(message, payload)]
        far = source if target == "buffer" else target
        if far in ("learner", "driver"):
            self._carry_in_order(source, target, message, frames, arrive)
            return
        now, rng, shares = self._loop.time(), self._rng, self._faults.share
        if self._cut_until.get(far, 0.0) > now:
            self._note("cut", source, target, message)
            return
        copies = 1
        faulty = now < self._faults.until_s
        if faulty and rng.random() < shares.get("drop", 0.0):
            self._note("drop", source, target, message)
            return
        if faulty and rng.random() < shares.get("duplicate", 0.0):
            copies = 2
        for copy in range(copies):
            delay = rng.uniform(*LATENCY_S) * self.slowness.get(far, 1.0)
            delay += max(0.0, self._frozen_until.get(far, 0.0) - now)
            if faulty and rng.random() < shares.get("delay", 0.0):
                delay += rng.uniform(10.0, 40.0) if rng.random() < 0.2 else rng.expovariate(1 / 3.0)
            if faulty and rng.random() < shares.get("corrupt", 0.0):
                self._note("corrupt", source, target, message)
                frames = damaged(frames, rng)
            self._note("copy" if copy else "sent", source, target, message)
            self._loop.call_later(delay, arrive, frames)

    def _carry_in_order(
        self, source: str, target: str, message: Message, frames: Frames, arrive: Callable[[Frames], Any]
    ) -> None:
        now = self._loop.time()
        if now < self._faults.until_s and self._rng.random() < self._faults.share.get("learner_line", 0.0):
            self._note("drop", source, target, message)
            return
        at = max(now + self._rng.uniform(*LATENCY_S), self._busy_until.get((source, target), 0.0))
        self._busy_until[source, target] = at
        self._note("sent", source, target, message)
        self._loop.call_at(at, arrive, frames)


def damaged(frames: Frames, rng: random.Random) -> Frames:
    """The frames with one bit flipped somewhere."""
    which = rng.randrange(2) if frames[1] else 0
    broken = bytearray(frames[which])
    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return [bytes(broken) if i == which else frame for i, frame in enumerate(frames)]
