"""The generator's side of a publication, in two threads of its own beside the engine.

One thread talks to the publisher. On the learner's machine the engine loads weights directly out of the learner's arena. On
every other machine generators receive them while the engines sample, each from some of the learner's ranks: they take part in
broadcasts, or one applies deltas to earlier weights, and report the digests. Then each engine of the machine loads them out of
that memory. The second thread makes the engine swap between two tokens. Only this engine waits for it. It is unaffected if the
learner dies.
"""

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from asyncgrpo import liveness, scratch
from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Arenas, Layout, Mappings, SharedTensors, Stream
from asyncgrpo.weights.delta import from_bytes
from asyncgrpo.weights.group import WeightGroup, form_group, visit_store
from asyncgrpo.weights.lane import receive
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.sockets import Client, Keys
from asyncgrpo.wire.weights import (
    Alive,
    Checked,
    FormGroup,
    GroupFormed,
    Join,
    Offer,
    Staged,
    Swapped,
    SyncFailed,
    WeightsLayout,
)

log = logging.getLogger(__name__)

Apply = Callable[[SharedTensors, PolicyVersion], Checksum]
"""Swaps the engine to these weights. Called in a thread of the receiver."""

Score = Callable[[Sequence[Sequence[int]], int], Sequence[float]]
"""The engine's log-probs of given sequences (`engines.base.Engine.score`). Called in a thread of the receiver."""

POLL_S = 0.2
POLL_WHILE_SWAPPING_S = 0.005


class Receiver:
    """Receives and stages weights, and swaps the engine to them. `failure` is set when the engine must be replaced."""

    def __init__(
        self,
        endpoint: str,
        *,
        generator_id: str,
        incarnation: str,
        host: str,
        apply: Apply,
        keys: Keys | None,
        score: Score | None = None,
    ) -> None:
        """
        Args:
            score: of the engine, for the sync gap; None: the engine cannot score.
        """
        self._endpoint, self._keys = endpoint, keys
        self._generator_id, self._incarnation = generator_id, incarnation
        self._host, self.machine = host, scratch.same_machine()
        self._apply = apply
        self._score = score
        self._layout: Layout | None = None
        self._check: WeightsLayout | None = None
        self._mappings = Mappings()
        self._stagings: dict[str, Arenas] = {}
        """Files of one arena in which this generator receives for its machine, by file."""
        self._streams: list[Stream] = []
        """What each sender sends."""
        self._groups: dict[int, WeightGroup] = {}
        """By sender."""
        self._group_number = 0
        # The version that waits for the engine, and the one that it swaps to. A newer version replaces a waiting one.
        self._next: tuple[PolicyVersion, SharedTensors] | None = None
        self._swapping: SharedTensors | None = None
        self._swaps = ThreadPoolExecutor(1, thread_name_prefix="weights-swap")
        # Reports of the swap; None marks its end.
        self._done: queue.SimpleQueue[tuple[Message, bytes] | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receiver", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the threads to end after the current message."""
        self._stop.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._client = client = Client(self._endpoint, f"weights-{self._generator_id}-{self._incarnation}", self._keys)
        try:
            joined_s = sent_s = -math.inf
            while not self._stop.is_set():
                if self._layout is None and time.monotonic() - joined_s >= liveness.SUSPECT_S:
                    joined_s = time.monotonic()
                    self._join()
                if time.monotonic() - sent_s >= liveness.RECEIVER_HEARTBEAT_S:
                    sent_s = time.monotonic()
                    is_idle = self._next is None and self._swapping is None
                    client.send(Alive(generator_id=self._generator_id, is_idle=is_idle))
                self._handle_arrived(POLL_S if self._swapping is None else POLL_WHILE_SWAPPING_S)
                self._report_swaps()
                self._swap_next()
        except BaseException as error:
            self.failure = error
            log.exception("the weight receiver failed")
        finally:
            self._swaps.shutdown(wait=True, cancel_futures=True)
            self._drop_group()
            client.close()

    def _handle_arrived(self, timeout_s: float) -> None:
        """Handle all messages that have arrived, or wait for one.

        Of several groups only the newest is formed: forming takes until its deadline if a member is late, and one after the
        other this generator would never catch up.
        """
        arrived: list[tuple[Message, Buffer]] = []
        newest = 0
        while (received := self._received(0.0 if arrived else timeout_s)) is not None:
            arrived.append(received)
            if isinstance(received[0], FormGroup):
                newest = received[0].group_number
        for message, payload in arrived:
            if isinstance(message, FormGroup | Offer) and 0 < message.group_number < newest:
                continue
            try:
                self._handle(message, payload)
            except WireError as error:
                log.warning("refused a message of the learner: %s", error)

    def _received(self, timeout_s: float) -> tuple[Message, Buffer] | None:
        try:
            return self._client.receive(timeout_s)
        except WireError as error:
            log.warning("refused a message of the learner: %s", error)
            return None

    def _handle(self, message: Message, payload: Buffer = b"") -> None:
        """Handle one message. Raises WireError if it is invalid."""
        if isinstance(message, WeightsLayout):
            try:
                self._layout, self._stagings = Layout(message.tensors), {}
                self._check = message
                self._streams = _streams(message, payload, self._layout.num_bytes)
            except (WeightsError, ValueError) as error:
                raise WireError(str(error)) from error
        elif isinstance(message, FormGroup):
            if not set(message.senders) <= set(range(len(self._streams))):
                raise WireError(f"there are no senders {message.senders}")
            self._form_group(message)
        elif isinstance(message, Offer) and self._layout is not None:
            (self._stage if message.group_number else self._take)(self._layout, message)

    def _join(self) -> None:
        name, incarnation = self._generator_id, self._incarnation
        self._client.send(Join(generator_id=name, incarnation=incarnation, machine=self.machine, mark=scratch.mark()))

    def _form_group(self, message: FormGroup) -> None:
        self._drop_group()
        problem = ""
        try:
            store = visit_store(message.store_host, message.store_port, message.timeout_s)
            for number, sender in enumerate(message.senders):
                self._groups[sender] = form_group(store, message, self._host, sender, number)
            self._group_number = message.group_number
        except RuntimeError as error:
            problem = str(error)[:200]
            log.warning("weight group %d cannot be formed: %s", message.group_number, error)
        name, number = self._generator_id, message.group_number
        self._client.send(GroupFormed(generator_id=name, group_number=number, problem=problem))

    # -- one version ---------------------------------------------------------------------------------------------------

    def _take(self, layout: Layout, offer: Offer) -> None:
        """Queue a swap to weights that were received here, or that another process of this machine has in shared memory."""
        try:
            if (staging := self._of_place(offer.file).get(offer.file)) is not None:
                self._next = offer.version, staging.tensors(layout, 0, offer.writes)
                return
            self._next = offer.version, self._mappings[offer.file].tensors(layout, offer.slot, offer.writes)
        except WeightsError as error:
            self._failed(error)

    def _stage(self, layout: Layout, offer: Offer) -> None:
        """Receive this generator's part of a version for its machine, and report its digest."""
        try:
            if not self._groups or offer.group_number != self._group_number:
                raise WeightsError(f"this generator is not in group {offer.group_number}")
            if (staging := self._of_place(offer.file).get(offer.file)) is None:
                try:
                    staging = self._stagings[offer.file] = Arenas.create(layout, 1, offer.file)
                except WeightsError:
                    self._drop_group()  # else the senders wait for this member until their deadline
                    raise
            received = (self._update if offer.delta_bytes else self._broadcast)(layout, offer, staging)
        except (WeightsError, RuntimeError, ValueError, KeyError) as error:
            self._failed(error, offer.writes)
            return
        staging.version = offer.version
        self._client.send(Staged(generator_id=self._generator_id, digest=received, writes=offer.writes))

    def _of_place(self, file: str) -> dict[str, Arenas]:
        """Return the files of the place that has this one, and free those of an earlier place."""
        place, _, _ = file.rpartition("-")
        self._stagings = {name: staging for name, staging in self._stagings.items() if name.startswith(place)}
        return self._stagings

    def _failed(self, error: Exception, writes: int = 0) -> None:
        """Report weights that could not be received or mapped. The engine was not touched."""
        log.warning("weights could not be received: %s", error)
        if isinstance(error, RuntimeError):
            self._drop_group()
        self._client.send(SyncFailed(generator_id=self._generator_id, reason=str(error)[:300], writes=writes))

    def _update(self, layout: Layout, offer: Offer, staging: Arenas) -> int:
        """Receive a delta and apply it to the weights in `offer.base`: in place, if these are in `staging`."""
        if not 0 < (size := offer.delta_bytes) <= layout.num_bytes:
            raise WeightsError(f"a delta of {size} bytes was offered for weights of {layout.num_bytes}")
        payload = torch.empty(size, dtype=torch.uint8)
        for _ in receive(self._groups[0], payload, Stream([(0, size)]).buckets(offer.piece_bytes)):
            pass
        delta, base = from_bytes(payload.numpy().data), self._stagings.get(offer.base)
        if base is None or (version := base.version) not in (delta.before, delta.after):
            raise WeightsError(f"received no delta to {offer.version} from weights that are held here")
        flat = staging.arena(layout)
        staging.begin(0, offer.writes)
        if staging is not base:
            flat.copy_(base.arena(layout))
        if version == delta.before:
            delta.apply(flat)
        return int(Stream([(0, layout.num_bytes)]).digests(layout, flat).sum())

    def _broadcast(self, layout: Layout, offer: Offer, staging: Arenas) -> int:
        """Take part in the broadcasts of this generator's senders: on each of its GPUs in those of some, one after the other."""
        flat = staging.arena(layout)
        staging.begin(0, offer.writes)
        by_device: dict[torch.device, list[int]] = {}
        for sender, group in self._groups.items():
            by_device.setdefault(group.device, []).append(sender)
        if any(device.type != "cpu" for device in by_device):
            staging.pin()

        def receive_from(senders: list[int]) -> int:
            buckets = ((self._groups[sender], self._streams[sender].buckets(offer.piece_bytes)) for sender in senders)
            runs = (run for group, some in buckets for run in receive(group, flat, some))
            return int(layout.digests(flat, runs).sum())

        with ThreadPoolExecutor(len(by_device), thread_name_prefix="weights-receive") as threads:
            return sum(threads.map(receive_from, by_device.values())) % 2**64

    # -- the swap ------------------------------------------------------------------------------------------------------

    def _swap_next(self) -> None:
        if self._next is None or self._swapping is not None:
            return
        version, self._swapping = self._next
        self._next = None
        self._swaps.submit(self._swap, version, self._swapping)

    def _swap(self, version: PolicyVersion, tensors: SharedTensors) -> None:
        """Swap the engine, in the other thread."""
        try:
            checksum = self._apply(tensors, version)
        except BaseException as error:  # torn weights must never sample
            self._done.put(error)
            return
        swapped = Swapped(generator_id=self._generator_id, version=version, checksum=checksum.digest)
        self._done.put((swapped, checksum.tensors))
        if self._check is not None and self._check.check:
            scores = tuple(self._scores(self._check))
            self._done.put((Checked(generator_id=self._generator_id, version=version, scores=scores), b""))
        self._done.put(None)

    def _scores(self, check: WeightsLayout) -> Sequence[float]:
        """Score the check sequences. The next swap waits, so that all scores are of one version."""
        try:
            return self._score(check.check, check.check_start) if self._score is not None else ()
        except Exception as error:  # a broken engine fails its requests, too
            log.warning("the check sequences could not be scored: %s", error)
            return ()

    def _report_swaps(self) -> None:
        """Report to the learner, also that this engine is unusable. The service ends when it sees `failure`."""
        while not self._done.empty():
            outcome = self._done.get()
            if outcome is None:
                self._swapping = None
            elif isinstance(outcome, BaseException):
                reason = str(outcome)[:300]
                self._client.send(SyncFailed(generator_id=self._generator_id, reason=reason, poisoned=True))
                raise outcome
            else:
                self._client.send(*outcome)

    def _drop_group(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups, self._group_number = {}, 0


def _streams(message: WeightsLayout, payload: Buffer, num_bytes: int) -> list[Stream]:
    """Return the streams of a message. Raises ValueError: they are not the whole of a publication."""
    runs = [(start, end) for start, end in np.frombuffer(payload, np.int64).reshape(-1, 2).tolist()]
    ends = itertools.accumulate(message.streams, initial=0)
    streams = [Stream(runs[first:end]) for first, end in itertools.pairwise(ends)] or [Stream([(0, num_bytes)])]
    if Stream(run for stream in streams for run in stream.runs).rest(num_bytes).runs:
        raise ValueError(f"the senders' parts are not the whole of {num_bytes} bytes")
    return streams
