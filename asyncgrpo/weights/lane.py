"""Transport to generators that cannot map the learner's memory: broadcasts of all weights, or of a delta.

Several learner ranks send side by side, each its part of the weights, in a group of its own with one generator of each
machine. A broadcast is collective, so a member that dies blocks the rest. It runs in a thread of its own. When a member is lost
the groups are dropped, and the next ones are formed without it.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Bucket, Digests, IsWritten, Layout, Place, Slot, Stream
from asyncgrpo.weights.delta import LEAST_SAVING, Delta, Packed, Piece, follow, to_bytes
from asyncgrpo.weights.group import Backend, WeightGroup, form_group, serve_store, visit_store
from asyncgrpo.wire import Message
from asyncgrpo.wire.sockets import Client, Keys
from asyncgrpo.wire.weights import FormGroup, GroupFormed, Offer, PartWritten

log = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[[str | int, Message], object]
"""Sends a message to a generator by its name, or to a sender by its number."""


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
        """Duration of the last broadcast of all weights; infinite before the first."""

    def form(self, message: FormGroup) -> None:
        """Start to form the group of a message, in which this process is rank 0.

        It has its own connection to the store, because a connection serves one call at a time: the next group would wait
        until the deadline of an abandoned one.
        """
        self.number, self.state = message.group_number, "forming"

        def work() -> WeightGroup:
            store = visit_store(message.store_host, message.store_port, message.timeout_s)
            return form_group(store, message, self._host, self._sender)

        self._job = self._pool.submit(work)

    def broadcast(self, flat: Tensor, piece_bytes: int, stream: Stream | None = None) -> None:
        """Start to send runs of `flat`, [num_bytes] uint8, in buckets of this size; without a stream, this process's runs."""
        assert self.state == "ready" and self._group is not None
        self.state, group, buckets = "sending", self._group, (stream or self._stream).buckets(piece_bytes)

        def work() -> WeightGroup:
            started = time.monotonic()
            send(group, flat, buckets)
            if stream is None:
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


def send(group: WeightGroup, flat: Tensor, buckets: Iterable[Bucket]) -> None:
    """Broadcast buckets of `flat`, [num_bytes] uint8 on the CPU. The next one is copied to the device meanwhile."""

    def copied() -> Iterator[tuple[AbstractContextManager[object], Tensor]]:
        for bucket in buckets:
            with (context := group.beside()):
                packed, pairs = _packed(group, flat, bucket)
                for part, place in pairs:
                    place.copy_(part, non_blocking=True)
            yield context, packed

    for context, packed in _one_ahead(copied()):
        with context:
            group.broadcast(packed)


def receive(group: WeightGroup, flat: Tensor, buckets: Iterable[Bucket]) -> Iterator[tuple[int, int]]:
    """Receive buckets of a broadcast into `flat`, and yield each run once it is there. The next one arrives meanwhile."""

    def arrived() -> Iterator[tuple[Bucket, Callable[[], object]]]:
        for bucket in buckets:
            with group.beside():
                packed, pairs = _packed(group, flat, bucket)
                group.broadcast(packed)
                for part, place in pairs:
                    part.copy_(place, non_blocking=True)
                wait = group.copied()
            yield bucket, wait

    for bucket, wait in _one_ahead(arrived()):
        wait()
        yield from bucket


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, each after the next one was drawn."""
    return (item for item, _ in itertools.pairwise(itertools.chain(items, [cast(T, None)])))


def _packed(group: WeightGroup, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
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

    def form_with(self, places: Sequence[Place], send: Send) -> None:
        """Start to form a group for each sender, of one receiver of each place; these take turns."""
        self.names = frozenset(name for place in places for name in place.receivers)
        form = partial(
            FormGroup,
            group_number=self.number + 1,
            world=len(places) + 1,
            store_host=self._host,
            store_port=self._store.port,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        for rank, place in enumerate(places, start=1):
            for first, name in enumerate(place.receivers):
                send(name, form(rank=rank, senders=tuple(range(first, self._senders, len(place.receivers)))))
        for sender in range(1, self._senders):
            send(sender, form(rank=0))
        self.form(form(rank=0))

    def offer(self, version: PolicyVersion, slot: Slot, flat: Tensor, places: Sequence[Place], send: Send) -> None:
        """Start to broadcast an arena of the learner, [num_bytes] uint8, to what these places await."""
        offer = self._offer(version, places, send)
        for sender in range(1, self._senders):
            send(sender, offer(slot=slot.number, writes=slot.writes))
        self.broadcast(flat, self._piece_bytes)

    def offer_delta(self, delta: Packed, places: Sequence[Place], send: Send) -> None:
        """Start to broadcast a delta. The publisher alone sends it."""
        payload = torch.frombuffer(bytearray(delta.payload), dtype=torch.uint8)
        self._offer(delta.after, places, send, len(payload))
        self.broadcast(payload, self._piece_bytes, Stream([(0, len(payload))]))

    def _offer(
        self, version: PolicyVersion, places: Sequence[Place], send: Send, delta_bytes: int = 0
    ) -> Callable[..., Offer]:
        """Send an offer to each receiver that is awaited. Returns the function that makes them."""
        offer = partial(
            Offer,
            version=version,
            group_number=self.number,
            piece_bytes=self._piece_bytes,
            delta_bytes=delta_bytes,
        )
        for place in places:
            for name in place.awaited:
                into = cast(Slot, place.receiving)
                send(name, offer(file=into.file, writes=into.writes, base=place.base))
        return offer

    def drop(self) -> None:
        self.names = frozenset()
        super().drop()


# -- other ranks of the learner ----------------------------------------------------------------------------------------

SENDER_POLL_S = 0.005


@dataclass(frozen=True)
class Written:
    """A write of an arena."""

    slot: int
    writes: int
    """Of this arena so far."""
    flat: Tensor
    """[num_bytes] uint8, the arena."""
    is_complete: IsWritten


class Sender:
    """Broadcasts a part of the weights from a learner rank other than the publisher's.

    It reports the digests of its part of each write. On an offer it broadcasts that part beside the training step. The
    publisher adds up the digests and decides which version is sent. The learner's loop calls `written`, a thread does the rest.
    """

    def __init__(
        self,
        number: int,
        stream: Stream,
        *,
        endpoint: str,
        host: str,
        keys: Keys | None,
        layout: Layout,
    ) -> None:
        """
        Args:
            number: of this sender, from 1.
            stream: its part.
            endpoint: of the publisher.
            host: address of this process for the generators.
            layout: of a publication.
        """
        self._number, self._stream, self._layout = number, stream, layout
        self._endpoint, self._keys = endpoint, keys
        self._broadcaster = Broadcaster(number, stream, host)
        self._writes: SimpleQueue[Written] = SimpleQueue()
        self._written: dict[int, Written] = {}
        """The last write of each arena."""
        self._pending: dict[int, Written] = {}
        """Those that are not digested yet."""
        self._reports: dict[int, tuple[PartWritten, bytes]] = {}
        """Of the last digested write of each arena."""
        self._reported_s = -math.inf
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weights-digest")
        self._digested: tuple[PartWritten, Future[Digests]] | None = None
        """The digests that are being computed, beside the broadcast."""
        self._offer: Offer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-sender", daemon=True)
        self._thread.start()

    def written(self, write: Written) -> None:
        """Note a write, which may be incomplete yet."""
        self._writes.put(write)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        self._client = Client(self._endpoint, f"weights-sender-{self._number}", self._keys)
        try:
            while not self._stop.is_set():
                received = self._client.receive(SENDER_POLL_S)
                if received is not None:
                    self._handle(received[0])
                self._report_writes()
                self._broadcast()
        except Exception:  # the publisher waits for this sender and times out
            log.exception("the weights of this rank cannot be sent")
        finally:
            self._broadcaster.close()
            self._hashing.shutdown(wait=False)
            self._client.close()

    def _handle(self, message: object) -> None:
        if isinstance(message, FormGroup):
            self._broadcaster.drop()
            self._broadcaster.form(message)
            self._offer = None
        elif isinstance(message, Offer) and message.group_number == self._broadcaster.number:
            self._offer = message

    def _report_writes(self) -> None:
        """Report the digests of each write, and all again after a while, because a broken connection may have lost a report."""
        if self._digested is not None and self._digested[1].done():
            (report, digests), self._digested = self._digested, None
            self._reports[report.slot] = report, digests.result().tobytes()
            self._reported_s = -math.inf
        while not self._writes.empty():
            write = self._writes.get()
            self._pending.pop(write.slot, None)  # it was overwritten: its version is not published
            self._pending[write.slot] = self._written[write.slot] = write
        if self._digested is None and self._pending and (write := next(iter(self._pending.values()))).is_complete():
            del self._pending[write.slot]
            report = PartWritten(sender=self._number, slot=write.slot, writes=write.writes)
            self._digested = report, self._hashing.submit(self._stream.digests, self._layout, write.flat)
        if time.monotonic() - self._reported_s > liveness.SUSPECT_S:
            self._reported_s = time.monotonic()
            for report, tensors in self._reports.values():
                self._client.send(report, tensors)

    def _broadcast(self) -> None:
        """Start an offered broadcast. The publisher may offer before this sender's group is formed, or its part written."""
        trouble = self._broadcaster.poll()
        if trouble is not None:
            log.warning("%s", trouble)
            name, number = f"sender-{self._number}", self._broadcaster.number
            self._client.send(GroupFormed(generator_id=name, group_number=number, problem=trouble))
        offer = self._offer
        if offer is None or self._broadcaster.state != "ready":
            return
        write = self._written.get(offer.slot)
        if write is not None and write.writes == offer.writes and write.is_complete():
            self._offer = None
            self._broadcaster.broadcast(write.flat, offer.piece_bytes)


# -- deltas ------------------------------------------------------------------------------------------------------------

SKIPPED = 32
"""Versions that are not compared after a comparison that did not pay."""


class Deltas:
    """The delta to a publication from the one that generators hold. The publisher's thread uses it.

    A thread makes it. This class keeps the bytes of the earlier publication: the learner may overwrite its arena at any
    moment.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-delta")
        self._job: Future[tuple[Tensor, tuple[Piece, ...] | None, float]] | None = None
        self._is_void = False
        """True if the delta under way is obsolete."""
        self._following: PolicyVersion | None = None
        self.newest: Packed | None = None
        """The last one; None: there is none."""
        self.tip: PolicyVersion | None = None
        """The publication to which it leads."""
        self._mirror: Tensor | None = None
        """The bytes of that publication."""
        self._skips_left = 0

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    def wants(self, version: PolicyVersion) -> bool:
        """True if this publication is to be compared now. Call it once per publication."""
        if self.is_busy or version == self._following:
            return False
        self._following = version
        self._skips_left = max(self._skips_left - 1, 0)
        return not self._skips_left

    def follow(self, layout: Layout, flat: Tensor) -> None:
        """Start to compare the publication that `wants` accepted with the one before it.

        Args:
            flat: [num_bytes] uint8; not written until `poll` returns True.
        """
        mirror, most = self._mirror, layout.num_bytes // LEAST_SAVING

        def work() -> tuple[Tensor, tuple[Piece, ...] | None, float]:
            if mirror is None:
                return flat.clone(), (), 0.0
            started = time.monotonic()
            pieces = follow(mirror, flat, layout.spans, most)
            return mirror, pieces, time.monotonic() - started

        self._job, self._is_void = self._pool.submit(work), False

    def poll(self, broadcast_s: float) -> bool:
        """Collect the finished comparison. Returns True if there was one.

        Args:
            broadcast_s: time that a broadcast of all weights takes; on a network so fast that comparing takes longer,
                deltas are not used.
        """
        if self._job is None or not self._job.done():
            return False
        job, self._job = self._job, None
        if self._is_void:
            return True
        try:
            mirror, pieces, seconds = job.result()
        except Exception as error:
            log.warning("no delta was made: %r", error)
            pieces = None
        if pieces is None or seconds > broadcast_s:
            self._skips_left = SKIPPED
            self.clear()
            return True
        assert self._following is not None
        if self.tip is not None:
            delta = Delta(self.tip, self._following, pieces)
            self.newest = Packed(delta.before, delta.after, to_bytes(delta))
        self.tip, self._mirror = self._following, mirror
        return True

    def leads_from(self, version: PolicyVersion | None) -> bool:
        """True if these weights are those before the newest delta."""
        return self.newest is not None and version == self.newest.before

    def follows(self, version: PolicyVersion | None) -> bool:
        """True if these weights need no broadcast of all: the newest delta, or the next one, leads from them."""
        return self.leads_from(version) or (version is not None and version == self.tip)

    def clear(self) -> None:
        """Forget the delta and the bytes."""
        self.newest, self.tip, self._mirror = None, None, None
        self._is_void = True

    def close(self) -> None:
        self._pool.shutdown(wait=False)
