"""Transport to generators that cannot map the learner's memory: deltas and broadcasts.

A generator that holds an earlier publication gets a delta, where that is small enough; all others share a broadcast. Learner
ranks on several machines broadcast one after the other, each machine what it owns, in a group of its own with the generators.
A broadcast is collective, so a member that dies blocks the rest. It runs in a thread of its own. When a member is lost the
groups are dropped, and the next ones are formed without it.
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.errors import WeightsError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Layout, Slot, Stream
from asyncgrpo.weights.delta import LEAST_SAVING, Chain, Delta, Piece, Skips, State, follow
from asyncgrpo.weights.group import Backend, WeightGroup, form_group, serve_store
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.weights import DeltaPart, FormGroup, Offer, PartTaken

log = logging.getLogger(__name__)


class Broadcaster:
    """One sender's stream to the generators of a group. A thread forms the group and sends; the caller polls."""

    def __init__(self, sender: int, stream: Stream, host: str) -> None:
        """
        Args:
            host: address of this process for the generators.
        """
        self._sender, self._stream, self._host = sender, stream, host
        self._group: WeightGroup | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-broadcast")
        self._job: Future[WeightGroup] | None = None
        self.state: Literal["none", "forming", "ready", "sending"] = "none"
        self.number = 0
        """Of the last group."""
        self.seconds = math.inf
        """Duration of the last broadcast; infinite before the first."""

    def form(self, message: FormGroup, store: Callable[[], dist.Store]) -> None:
        """Start to form the group of a message, in which this process is rank 0."""
        self.number, self.state = message.group_number, "forming"
        gpu = torch.cuda.current_device() if message.backend == "nccl" else None

        def work() -> WeightGroup:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # each thread has its own
            return form_group(
                store(),
                number=message.group_number,
                sender=self._sender,
                rank=0,
                world=message.world,
                backend=message.backend,
                host=self._host,
                timeout_s=message.timeout_s,
            )

        self._job = self._pool.submit(work)

    def broadcast(self, flat: Tensor, piece_bytes: int) -> None:
        """Start to send this process's runs of `flat`, [num_bytes] uint8, in buckets of this size."""
        assert self.state == "ready" and self._group is not None
        self.state, group = "sending", self._group

        def work() -> WeightGroup:
            started = time.monotonic()
            with group.beside():
                for bucket in self._stream.buckets(piece_bytes):
                    send_bucket(group, flat, bucket)
            self.seconds = time.monotonic() - started
            return group

        self._job = self._pool.submit(work)

    def poll(self) -> str | None:
        """Collect finished work. Returns its error, after which the group is dropped; None: no error."""
        if self._job is None or not self._job.done():
            return None
        job, self._job = self._job, None
        error = job.exception()
        if error is None:
            self._group, self.state = job.result(), "ready"
            return None
        what = "formed" if self.state == "forming" else "sent to"
        self.drop()
        return f"group {self.number} cannot be {what}: {str(error).splitlines()[0][:200]}"

    def drop(self) -> None:
        """Drop the group and the work under way in it."""
        group, self._group = self._group, None
        job, self._job = self._job, None
        self.state = "none"
        if group is not None:
            group.cancel()
        if job is None:
            if group is not None:
                group.close()
            return
        # A gloo broadcast cannot be cancelled: its thread is abandoned and ends at the deadline.
        self._pool.shutdown(wait=False)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-broadcast")
        job.add_done_callback(lambda ended: _close(group or (None if ended.exception() else ended.result())))

    def close(self) -> None:
        self.drop()
        self._pool.shutdown(wait=False)


def _close(group: WeightGroup | None) -> None:
    if group is not None:
        group.close()


def send_bucket(group: WeightGroup, flat: Tensor, bucket: list[tuple[int, int]]) -> None:
    """Send the runs of one bucket of `flat`, [num_bytes] uint8 on the CPU."""
    packed, pairs = _packed(group, flat, bucket)
    for part, place in pairs:
        place.copy_(part)
    group.broadcast(packed)


def receive_bucket(group: WeightGroup, flat: Tensor, bucket: list[tuple[int, int]]) -> None:
    """Receive one bucket of a broadcast into its runs of `flat`."""
    with group.beside():
        packed, pairs = _packed(group, flat, bucket)
        group.broadcast(packed)
        for part, place in pairs:
            part.copy_(place)


def _packed(
    group: WeightGroup, flat: Tensor, bucket: list[tuple[int, int]]
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """Return a buffer for a bucket, and each run with its place there. One run in host memory is its own buffer."""
    parts = [flat[start:end] for start, end in bucket]
    if len(parts) == 1 and group.device.type == "cpu":
        return parts[0], iter(())
    sizes = [len(part) for part in parts]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
    return packed, zip(parts, packed.split(sizes), strict=True)


class GroupLane(Broadcaster):
    """The publisher's broadcasts, with those of the other senders, to one group of generators."""

    def __init__(self, backend: Backend, host: str, timeout_s: float, piece_bytes: int) -> None:
        """
        Args:
            piece_bytes: size of one broadcast.
        """
        super().__init__(0, Stream([]), host)
        self._backend, self._timeout_s, self._piece_bytes = backend, timeout_s, piece_bytes
        self._senders = 1
        self._store = serve_store(host, timeout_s)
        self.names: frozenset[str] = frozenset()
        """Members of the group, or of the one being formed."""

    def start(self, streams: Sequence[Stream]) -> None:
        """Set what the publisher and each other sender broadcast."""
        self._stream, self._senders = streams[0], len(streams)

    def form_with(self, names: list[str], send: Callable[[str | int, Message], object]) -> None:
        """Start to form a group of these generators for each sender.

        Args:
            send: sends a message to a generator by its name, or to a sender by its number.
        """
        self.names = frozenset(names)
        form = partial(
            FormGroup,
            group_number=self.number + 1,
            senders=self._senders,
            world=len(names) + 1,
            store_host=self._host,
            store_port=self._store.port,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        for rank, name in enumerate(names, start=1):
            send(name, form(rank=rank))
        for sender in range(1, self._senders):
            send(sender, form(rank=0))
        self.form(form(rank=0), lambda: self._store)

    def offer(
        self, version: PolicyVersion, digest: str, slot: Slot, send: Callable[[str | int, Message], object]
    ) -> None:
        """Start to broadcast an arena to the group."""
        offer = Offer(
            version=version,
            digest=digest,
            slot=slot.number,
            group_number=self.number,
            piece_bytes=self._piece_bytes,
        )
        for peer in (*sorted(self.names), *range(1, self._senders)):
            send(peer, offer)
        self.broadcast(slot.flat, self._piece_bytes)

    def drop(self) -> None:
        self.names = frozenset()
        super().drop()


# -- deltas ------------------------------------------------------------------------------------------------------------

MAX_DELTAS = 8
"""Deltas kept for generators that missed some."""
PARTS_AHEAD = 2
"""Parts in flight to one generator. They bound the memory that a slow generator costs the learner."""
SENT_BYTES_PER_S = 0.5e9
"""Rate of one thread that encrypts and sends. Measured with parts of 16 MiB over loopback (AMD EPYC): 0.7e9 per CPU second."""
LARGEST_PART_BYTES = DeltaPart.max_payload_bytes


class DeltaLane:
    """Deltas to generators that hold an earlier publication, each over its own socket. The publisher's thread uses it.

    A thread compares each publication with the one before, of which this class keeps the bytes: the learner may overwrite
    its arena at any moment. So skipped publications leave no gap in the chain.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = min(part_bytes, LARGEST_PART_BYTES)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-delta")
        self._job: Future[tuple[Tensor, tuple[Piece, ...] | None]] | None = None
        self._is_void = False
        """True if the delta under way is obsolete."""
        self._following: State | None = None
        self._tip: State | None = None
        """The newest publication that deltas lead to; None: there is none."""
        self._mirror: Tensor | None = None
        """Its bytes."""
        self._chain = Chain(MAX_DELTAS, 0)
        self._skips = Skips()
        self._held: dict[str, State] = {}
        """Weights that each generator is known to hold in its memory."""
        self._transfers: dict[str, Transfer] = {}
        self._number = 0

    # -- making them ---------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    def wants(self, state: State) -> bool:
        """True if this publication is to be compared now. Call it once per publication."""
        if self.is_busy or state == self._following:
            return False
        self._following = state
        return self._skips.is_due()

    def follow(self, state: State, layout: Layout, flat: Tensor, most: int) -> None:
        """Start to compare a publication with the one before it.

        Args:
            flat: [num_bytes] uint8; not written until `poll` returns True.
            most: largest size of a delta, bytes.
        """
        mirror = self._mirror

        def work() -> tuple[Tensor, tuple[Piece, ...] | None]:
            if mirror is None:
                return flat.clone(), ()
            return mirror, follow(mirror, flat, layout.spans, most)

        if mirror is None:
            self._chain = Chain(MAX_DELTAS, layout.num_bytes // LEAST_SAVING)
        self._job, self._is_void = self._pool.submit(work), False

    def poll(self) -> bool:
        """Collect the finished comparison. Returns True if there was one."""
        if self._job is None or not self._job.done():
            return False
        job, self._job = self._job, None
        if self._is_void:
            return True
        try:
            mirror, pieces = job.result()
        except Exception as error:
            log.warning("no delta was made: %r", error)
            pieces = None
        if pieces is None:
            self._skips.note(pays=False)
            self.clear()
            return True
        assert self._following is not None
        if self._tip is not None:
            delta = Delta(self._tip, self._following, len(mirror), pieces)
            self._chain.add(Delta.from_bytes(delta.to_bytes()))  # in wire format
            self._skips.note(pays=True)
        self._tip, self._mirror = self._following, mirror
        return True

    def clear(self) -> None:
        """Forget all deltas and start a new chain."""
        self._tip, self._mirror = None, None
        self._chain.clear()
        self._is_void = True

    # -- sending them --------------------------------------------------------------------------------------------------

    def path(self, name: str, most: int) -> list[Delta] | None:
        """Return the deltas, at most `most` bytes, that bring a generator up to date; None: it needs all weights."""
        held = self._held.get(name)
        if held is None or self._tip is None:
            return None
        path = [] if held == self._tip else self._chain.since(held)
        return path if path is not None and sum(delta.packed_bytes for delta in path) <= most else None

    def may_reach(self, name: str) -> bool:
        """True if deltas are in flight to a generator, or the comparison under way may produce one for it."""
        return self.is_sending(name) or (self.is_busy and name in self._held)

    def offer(self, name: str, path: list[Delta], send: Callable[[str, Message, Buffer], bool]) -> bool:
        """Start to send deltas to a generator. Returns False if it is not connected."""
        self._number += 1
        transfer = self._transfers[name] = Transfer(self._number, path, self._part_bytes)
        version, digest = path[-1].after
        sizes = tuple(delta.packed_bytes for delta in path)
        offer = Offer(version=version, digest=digest, transfer=self._number, delta_bytes=sizes)
        return send(name, offer, b"") and transfer.go_on(name, send)

    def taken(self, name: str, message: PartTaken, send: Callable[[str, Message, Buffer], bool]) -> None:
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.number == message.transfer:
            transfer.taken = message.taken
            transfer.go_on(name, send)

    def is_sending(self, name: str, transfer: int | None = None) -> bool:
        """True if deltas, or those of one transfer, are in flight to a generator."""
        now = self._transfers.get(name)
        return now is not None and transfer in (None, now.number)

    def is_stuck(self, name: str, staging_s: float) -> bool:
        """True if a part or a reply must have been lost.

        Args:
            staging_s: time allowed to apply the deltas after the last part.
        """
        transfer = self._transfers.get(name)
        if transfer is None:
            return False
        deadline_s = liveness.TAKES_PART_WITHIN_S + (staging_s if transfer.is_whole else 0.0)
        return time.monotonic() - transfer.moved_s > deadline_s

    def received(self, name: str, state: State) -> None:
        """Note the weights that a generator holds in its memory."""
        self._transfers.pop(name, None)
        self._held[name] = state

    def stop(self, name: str) -> None:
        """Stop a transfer."""
        self._transfers.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget which weights a generator holds."""
        self.stop(name)
        self._held.pop(name, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def delta_byte_budget(num_bytes: int, generators: int, broadcast_s: float) -> int:
    """Return the largest size of the deltas to one generator, in place of `num_bytes` of weights.

    Comparing and applying costs more CPU time than receiving, so deltas must be much smaller. One thread encrypts and sends
    them to all generators, which must take no longer than a broadcast: on a fast network no deltas are sent.

    Args:
        broadcast_s: duration of the last broadcast; infinite before the first.
    """
    return int(min(num_bytes / LEAST_SAVING, broadcast_s * SENT_BYTES_PER_S / max(1, generators)))


class Transfer:
    """Deltas in flight to one generator, a few parts ahead of its acknowledgements."""

    def __init__(self, number: int, deltas: list[Delta], part_bytes: int) -> None:
        self.number, self.taken = number, 0
        self.moved_s = time.monotonic()
        self._ahead, self._sent = PARTS_AHEAD * part_bytes, 0
        payloads = [delta.to_bytes().data for delta in deltas]
        self._left = deque(p[at : at + part_bytes] for p in payloads for at in range(0, len(p), part_bytes))

    @property
    def is_whole(self) -> bool:
        return not self._left and self.taken == self._sent

    def go_on(self, name: str, send: Callable[[str, Message, Buffer], bool]) -> bool:
        """Send the next parts. Returns False if the generator is not connected."""
        self.moved_s = time.monotonic()
        while self._left and self._sent - self.taken < self._ahead:
            part = self._left.popleft()
            if not send(name, DeltaPart(transfer=self.number, start=self._sent), part):
                return False
            self._sent += len(part)
        return True


class Arriving:
    """Deltas that arrive at a generator."""

    def __init__(self, offer: Offer, limit: int) -> None:
        """Raises WeightsError: the deltas are longer than `limit` bytes."""
        size = sum(offer.delta_bytes)
        if min(offer.delta_bytes, default=0) <= 0 or size > limit:
            raise WeightsError(f"deltas of {offer.delta_bytes[:8]} bytes were offered for weights of {limit}")
        self.offer, self.taken = offer, 0
        self._bytes = np.empty(size, np.uint8)

    @property
    def is_whole(self) -> bool:
        return self.taken == len(self._bytes)

    def add(self, start: int, part: Buffer) -> None:
        """Take the next part; duplicates are ignored. Raises WeightsError: a part is missing."""
        if start > self.taken or start + len(part) > len(self._bytes):
            raise WeightsError(f"bytes {start} to {start + len(part)} came after {self.taken} of {len(self._bytes)}")
        if start == self.taken:
            self._bytes[start : start + len(part)] = np.frombuffer(part, np.uint8)
            self.taken += len(part)

    def deltas(self) -> list[Delta]:
        """Return all deltas in order. Raises WireError: one is malformed."""
        ends = list(itertools.accumulate(self.offer.delta_bytes, initial=0))
        return [Delta.from_bytes(self._bytes[start:end]) for start, end in itertools.pairwise(ends)]
