"""The learner's side of a publication: copy the weights, offer them, and prove that each generator samples with them.

The learner copies its weights into an arena (`offer`) and trains on. A thread does the rest: it offers the version to each
idle generator, computes the digests and collects the proofs. Each generator adopts a version at its own pace. If the learner
makes versions faster than they travel, the latest wins.

    Join -> WeightsLayout -> [ Offer -> Swapped ]*          each generator
    FormGroup -> GroupFormed -> [ Offer -> Staged ]*        some of each machine that cannot map the learner's memory

Several learner ranks send a part each (`weights/lane.py`), to as many generators of each machine where there are so many. If
learner ranks are on several machines, no generator maps their memory.

A generator holds a version after its engine has swapped to it and reported the same checksum as the other engines. Weights that
crossed a network must have the learner's digest first. A generator that misses its liveness deadline, here or at the driver,
is dropped until its next heartbeat.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import cast

import numpy as np

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.scratch import same_machine
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import SLOTS, Arenas, Digests, IsWritten, Layout, Place, Slot, Stream
from asyncgrpo.weights.delta import Packed
from asyncgrpo.weights.group import Backend
from asyncgrpo.weights.lane import Deltas, GroupLane
from asyncgrpo.weights.publication import (
    VERSIONS_KEPT,
    Member,
    Publication,
    Round,
    SyncCheck,
    SyncGap,
    digest_of,
    listed,
)
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, decode, kinds_of
from asyncgrpo.wire.sockets import Client, Keys, Server
from asyncgrpo.wire.weights import (
    Alive,
    Checked,
    GroupFormed,
    Join,
    Offer,
    PartWritten,
    Staged,
    Swapped,
    SyncFailed,
    ToPublisher,
    WeightsLayout,
)

log = logging.getLogger(__name__)

READ = kinds_of(ToPublisher)

ATTEMPTS = 3
"""Offers of one version to a generator that reports a wrong digest or checksum, before the run fails."""
POLL_S = 0.2
POLL_WHILE_SENDING_S = 0.02
POLL_WHILE_WRITING_S = 0.005
COMPARING, HASHING = "(deltas)", "(digests)"
"""Readers of an arena beside the generators: the threads that make a delta, and the digests."""


class Publisher:
    """Publishes versions to generators from a thread of its own. The learner's loop calls the public methods."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        maps: bool,
        backend: Backend,
        bind: str,
        host: str,
        keys: Keys | None,
    ) -> None:
        """Bind the control socket.

        Args:
            maps: True if generators on this machine map this process's shared memory.
            backend: of the broadcasts to the other generators.
            host: address of this process for the generators.
        """
        self._config = config
        self._keys = keys
        self._maps = maps
        self._server = Server(bind, keys, advertise=host)
        self._lane = GroupLane(backend, host, config.timeout_s, config.bucket_mb * 2**20)
        self._runs = b""
        """Runs of the streams, for generators."""
        self._streams: tuple[Stream, ...] = ()
        """What this process broadcasts, and what each other sender does."""
        self._deltas = Deltas()
        self._machine = same_machine()
        self._home = Place()
        """The learner's arenas. Its slots are shared with the learner's loop, under `_lock`."""
        self._elsewhere: dict[str, Place] = {}
        """Those of other machines."""
        self._early: list[tuple[str, Member, Swapped, Digests, float]] = []
        """Messages about the version whose digests are not known yet, with their times."""
        self._members: dict[str, Member] = {}
        self._missing: dict[str, Member] = {}
        self._leaving: tuple[str, ...] = ()
        self._rounds: dict[PolicyVersion, Round] = {}
        self._lock = threading.Lock()
        self._preparing: Slot | None = None
        self._preparing_s = 0.0
        self._late_s = 0.0
        """Time at which the digests of another sender were missing last."""
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weights-digest")
        self._own: Future[Digests]
        """Digests of this process's part of what is being prepared."""
        self._sent: dict[PolicyVersion, Digests] = {}
        """Digests of the last versions, and of others that an engine may load."""
        self._senders: dict[int, str] = {}
        """Peer of each other sender, by its number."""
        self._parts: dict[tuple[int, int], dict[int, Digests]] = {}
        """Digests of what other senders send, by arena and its number of writes."""
        self._lost: SimpleQueue[tuple[str, str]] = SimpleQueue()  # generators that the driver lost
        self._reports: SimpleQueue[Publication] = SimpleQueue()
        self._failure: WeightsError | None = None
        self._wake: Client | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-publisher", daemon=True)
        self.endpoint = self._server.endpoint

    # -- what the learner's loop calls ---------------------------------------------------------------------------------

    def start(
        self,
        layout: list[TensorInfo],
        check: SyncCheck | None = None,
        others: Sequence[Stream] = (),
        *,
        is_whole: bool = True,
    ) -> None:
        """Fix the layout of all publications and start the thread.

        Args:
            layout: names, shapes and dtypes.
            check: versions under which engines score the check sequences; `expect` gives the learner's scores.
            others: what other learner ranks send.
            is_whole: True if all ranks write into this process's arenas.
        Raises:
            WeightsError: shared memory is too small for the arenas.
        """
        self._layout, self._check = Layout(layout), check or SyncCheck.none()
        self._arenas = Arenas.create(self._layout)
        self._arenas.pin()
        own = Stream(run for stream in others for run in stream.runs).rest(self._layout.num_bytes)
        self._streams = (own, *others)
        self._maps, self._can_delta = self._maps and is_whole, self._config.deltas and is_whole
        self._layout_message = WeightsLayout(
            tensors=self._layout.tensors,
            check=self._check.sequences.tokens,
            check_start=self._check.sequences.start,
            streams=tuple(len(stream.runs) for stream in self._streams),
        )
        self._runs = np.array([run for stream in self._streams for run in stream.runs], np.int64).tobytes()
        self._lane.start(self._streams)
        self._home.slots = [Slot(number, self._arenas.file) for number in range(SLOTS)]
        self._wake = Client(self.endpoint, "learner", self._keys)
        self._thread.start()

    @property
    def missing(self) -> tuple[str, ...]:
        """Dropped generators as `name-incarnation`. Any thread may read it."""
        late = ((name, member) for name, member in tuple(self._members.items()) if member.is_late)
        return tuple(f"{name}-{m.incarnation}" for name, m in (*tuple(self._missing.items()), *late))

    def wait_for(self, count: Callable[[], int], timeout_s: float, report: Callable[[str, float], None]) -> None:
        """Wait until enough generators have joined, at most `timeout_s`; then continue with those that have.

        Args:
            count: returns how many are enough.
            report: called about once a second with the awaited condition and the seconds so far. An exception ends the wait.
        Raises:
            WeightsError: no generator joined.
        """
        started, report_s = time.monotonic(), 0.0
        while len(self._members) < (enough := count()) and (waited := time.monotonic() - started) < timeout_s:
            if waited >= report_s:
                report(f"generators to start ({len(self._members)} of {enough} have)", waited)
                report_s = waited + 1.0
            time.sleep(0.02)
        if not self._members:
            raise WeightsError(f"no generator asked for weights within {timeout_s:.0f} s; see their logs")

    def offer(self, version: PolicyVersion, fill: Callable[[Arenas, int], IsWritten | None]) -> bool:
        """Publish `version` in the background.

        Args:
            fill: writes the weights into this arena of the file. It may return a function that is true once all bytes have
                been written.
        Returns:
            False if generators still read both arenas. Offer it again, or a later version.
        """
        with self._lock:
            slot = self._free_slot()
            if slot is None:
                return False
            slot.is_ours, slot.is_ready, slot.version = True, False, None
            slot.writes += 1
            self._arenas.begin(slot.number, slot.writes)
            if slot is self._home.newest:
                self._home.newest = None
        is_filled = False
        try:
            slot.is_written = fill(self._arenas, slot.number)
            is_filled = True
        finally:
            with self._lock:
                slot.is_ours = False
                if is_filled:
                    slot.version = version
        self._wake_thread()
        return True

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """Set the learner's scores of the check sequences under `version`, which is being published."""
        self._check.expect(version, scores)
        self._wake_thread()

    def reports(self) -> list[Publication]:
        """Return the publications that have ended since the last call.

        Raises:
            WeightsError: no generator can load what is published.
        """
        ended = [self._reports.get() for _ in range(self._reports.qsize())]
        if self._failure is not None:
            raise self._failure
        return ended

    @property
    def is_idle(self) -> bool:
        """True if every connected generator holds the newest version."""
        if self._failure is not None:
            return True
        if self._rounds or self._preparing is not None or self._filled() is not None:
            return False
        newest = self._home.newest
        return newest is None or all(m.holds == newest.version for m in tuple(self._members.values()))

    def give_up(self, generator_id: str, incarnation: str) -> None:
        """Stop waiting for a generator that is gone. Any thread may call it."""
        self._lost.put((generator_id, incarnation))

    def dismiss(self, leaving: tuple[str, ...]) -> None:
        """Stop publishing to generators that leave, given as `name-incarnation`."""
        self._leaving = leaving
        self._wake_thread()

    def close(self) -> None:
        self._stop.set()
        self._wake_thread()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._wake is not None:
            self._wake.close()
            self._arenas.close()
        self._server.close()

    def _wake_thread(self) -> None:
        if self._wake is not None:
            self._wake.send(Alive(generator_id=""))

    def _free_slot(self) -> Slot | None:
        """Return an arena without readers: the unpublished one, else the newest if it was offered to no generator yet."""
        free = [slot for slot in self._home.slots if not slot.readers and not slot.is_ours]
        return min(free, key=lambda slot: slot is self._home.newest, default=None)

    def _filled(self) -> Slot | None:
        """Return the arena with the newest version if it is filled and not prepared yet."""
        filled = [slot for slot in self._home.slots if slot.version is not None and not slot.is_ours]
        newest = max(filled, key=lambda slot: cast(PolicyVersion, slot.version), default=None)
        return None if newest is None or newest.is_ready else newest

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._receive()
                self._check_members()
                self._prepare_newest()
                self._offer_newest()
                self._broadcast_newest()
                self._compare_newest()
                self._conclude()
        except BaseException as error:
            log.exception("the publisher failed")
            self._failure = WeightsError(f"the publisher failed: {error!r}")
        finally:
            self._lane.close()
            self._deltas.close()
            self._hashing.shutdown(wait=False)

    def _receive(self) -> None:
        """Handle all messages that have arrived, or wait for one. Heartbeats alone do not end the wait."""
        is_sending = self._lane.state in ("forming", "sending") or self._deltas.is_busy
        timeout_s = POLL_WHILE_SENDING_S if is_sending else POLL_S
        timeout_s = POLL_WHILE_WRITING_S if self._preparing is not None else timeout_s
        waits_until_s = time.monotonic() + timeout_s
        received = self._server.receive(timeout_s)
        while received is not None:
            peer, frames = received
            try:
                decoded, payload = decode(frames, READ)
                message = cast(ToPublisher, decoded)
                self._handle(peer, message, payload)
                if not isinstance(message, Alive) or not message.generator_id:
                    waits_until_s = 0.0
            except WireError as error:
                log.warning("refused a message of %s: %s", peer, error)
            received = self._server.receive(max(0.0, waits_until_s - time.monotonic()))

    def _handle(self, peer: str, message: ToPublisher, payload: Buffer) -> None:
        if isinstance(message, PartWritten):
            if not 0 < message.sender < len(self._streams):
                raise WireError(f"there is no sender {message.sender}")
            self._senders[message.sender] = peer
            self._parts.setdefault((message.slot, message.writes), {})[message.sender] = self._digests(payload, 1)[:, 0]
            return
        name = message.generator_id
        if isinstance(message, Join):
            self._join(peer, message)
            return
        if isinstance(message, GroupFormed) and message.problem and message.group_number == self._lane.number:
            self._drop_group(f"{name} is not in group {message.group_number}: {message.problem}")
        if (missing := self._missing.get(name)) is not None and missing.peer == peer:  # it is back
            del self._missing[name]
            self._members[name] = missing
            missing.place = self._place(missing.machine)
        member = self._members.get(name)
        if member is None or member.peer != peer:
            return
        member.heard_s = time.monotonic()
        if isinstance(message, Alive):
            self._find_losses(name, member, message)
        elif isinstance(message, Staged):
            self._staged(name, member.place, message)
        elif isinstance(message, Swapped):
            self._swapped(name, member, message, self._digests(payload, 2), member.heard_s)
        elif isinstance(message, Checked) and message.version in self._rounds:
            self._check.scored(message.version, name, message.scores)
        elif isinstance(message, SyncFailed):
            self._sync_failed(name, member, message)

    def _join(self, peer: str, message: Join) -> None:
        name = message.generator_id
        if any(m.peer == peer and other != name for other, m in self._members.items()):
            log.warning("refused a Join of %s from %s, which has joined under another name", name, peer)
            return
        if f"{name}-{message.incarnation}" in self._leaving:
            return
        now_s, member = time.monotonic(), self._members.get(name)
        if member is not None and member.peer == peer and now_s - member.joined_s < liveness.SUSPECT_S:
            return  # it repeats itself until the reply arrives
        self._forget(name)
        self._missing.pop(name, None)
        if self._server.send(peer, self._layout_message, self._runs):
            place = self._place(message.machine)
            self._members[name] = Member(
                peer, message.incarnation, message.machine, message.mark, place=place, joined_s=now_s, heard_s=now_s
            )

    def _place(self, machine: str) -> Place:
        """Return where a generator of this machine loads weights from."""
        if self._maps and machine == self._machine:
            return self._home
        return self._elsewhere.setdefault(machine, Place())

    # -- one version ---------------------------------------------------------------------------------------------------

    def _prepare_newest(self) -> None:
        """Release the newest version to readers once it is written, and compute its digests, which only the proof needs."""
        if self._preparing is None:
            with self._lock:
                self._preparing = slot = self._filled()
                if slot is not None:
                    slot.is_ours = True
                    self._preparing_s = time.monotonic()
        slot = self._preparing
        if slot is None or not (slot.is_written is None or slot.is_written()):
            return
        if not slot.is_ready:
            with self._lock:
                slot.is_ours, slot.is_ready, self._home.newest = False, True, slot
                slot.readers.add(HASHING)
            flat = self._arenas.arena(self._layout, slot.number)
            self._own = self._hashing.submit(self._streams[0].digests, self._layout, flat)
        version, parts = cast(PolicyVersion, slot.version), self._parts.get((slot.number, slot.writes), {})
        late = set(range(1, len(self._streams))) - parts.keys()
        if late and time.monotonic() - self._preparing_s > (within_s := self._config.timeout_s + self._read_s):
            problem = f"have not reported the digests of weights {version} within {within_s:.0f} s"
            raise WeightsError(f"learner senders {sorted(late)} {problem}")
        if late:
            self._late_s = time.monotonic()
        if late or not self._own.done():
            return
        self._sent[version] = sum(parts.values(), self._own.result())
        slots = (slot for place in (self._home, *self._elsewhere.values()) for slot in place.slots)
        kept = {*list(self._sent)[-VERSIONS_KEPT:], *self._rounds, *(slot.version for slot in slots), self._deltas.tip}
        self._sent = {other: digests for other, digests in self._sent.items() if other in kept}
        self._parts = {
            write: other for write, other in self._parts.items() if write[0] != slot.number or write[1] > slot.writes
        }
        self._preparing = None
        self._release(HASHING)
        early, self._early = self._early, []
        for name, member, message, tensors, swapped_s in early:
            self._swapped(name, member, message, tensors, swapped_s)
        for place in self._elsewhere.values():
            self._compare_received(place)

    def _offer_newest(self) -> None:
        """Offer the newest weights of its place to each generator whose engine is idle."""
        for name, member in list(self._members.items()):
            if member.offered is not None:
                continue
            with self._lock:
                slot = member.place.newest
                if slot is None or (version := slot.version) is None or version == member.holds:
                    continue
                slot.readers.add(name)
            round_ = self._round(version, [name])
            round_.sent_bytes += self._layout.num_bytes if member.place is self._home else 0
            member.offered, member.offered_s = version, time.monotonic()
            offer = Offer(version=version, file=slot.file, slot=slot.number, writes=slot.writes)
            if not self._server.send(member.peer, offer):
                self._drop(name, "it is no longer connected")

    def _broadcast_newest(self) -> None:
        """Broadcast to other machines: the delta to those that it leads from, all weights to those that no delta does."""
        trouble = self._lane.poll()
        if trouble is not None:
            self._drop_group(trouble)
        if self._deltas.poll(self._lane.seconds):
            self._release(COMPARING)
        far = self._far()
        if self._lane.state != "none" and not self._lane.names <= {name for place in far for name in place.receivers}:
            self._drop_group("a member is gone")
        if not far or self._lane.state in ("forming", "sending"):
            return
        following = [place for place in far if self._deltas.follows(place.version)]
        if any(self._deltas.leads_from(place.version) for place in following):
            self._broadcast(following, self._deltas.newest)
        if len(following) < len(far) and self._lane.state not in ("forming", "sending"):
            self._broadcast([place for place in far if place not in following], None)

    def _broadcast(self, places: list[Place], delta: Packed | None) -> None:
        """Send a delta or, without one, all weights to these places; form a group first if their set has changed."""
        if any(place.receiving is not None for place in places):
            return
        if len(self._senders) < len(self._streams) - 1:  # a sender can be told once it has reported
            return
        into = [slot for place in places if (slot := place.writable()) is not None]
        names = {name for place in places for name in place.receivers}
        with self._lock:
            newest = self._home.newest
            if newest is None or (version := delta.after if delta else newest.version) is None:
                return
            if len(into) < len(places) or all(place.version == version for place in places):
                return
            is_ready = self._lane.state == "ready" and self._lane.names == names and all(p.receivers for p in places)
            if is_ready and delta is None:
                newest.readers |= names
        if not is_ready:
            self._form_group(places)
            return
        round_ = self._round(version, {n for n, m in self._members.items() if m.holds != version and m.place in places})
        round_.sent_bytes += len(places) * (len(delta.payload) if delta else self._layout.num_bytes)
        for place, slot in zip(places, into, strict=True):
            place.receive(slot, version, place.receivers[:1] if delta else place.receivers)
        if delta is not None:
            self._lane.offer_delta(delta, places, self._send)
        else:
            flat = self._arenas.arena(self._layout, newest.number)
            self._lane.offer(version, newest, flat, places, self._send)

    def _form_group(self, places: list[Place]) -> None:
        """Form a group. At a place without receivers as many generators receive as ranks send."""
        far = self._far()
        for place in places:
            if not place.receivers:
                names = far[place][: len(self._streams)]
                place.choose(names, self._members[names[0]].mark)
        self._lane.drop()
        self._lane.form_with(places, self._send)

    def _compare_newest(self) -> None:
        """Start the comparison of the newest version with the one that is compared last, once all have the delta to that."""
        far = self._far()
        if not far or not self._can_delta:
            self._deltas.clear()
            return
        with self._lock:
            slot = self._home.newest
            if slot is None or slot.version is None:
                return
            if any(self._deltas.leads_from(place.version) for place in far) or not self._deltas.wants(slot.version):
                return
            slot.readers.add(COMPARING)
        self._deltas.follow(self._layout, self._arenas.arena(self._layout, slot.number))

    def _far(self) -> dict[Place, list[str]]:
        """Return the places that weights are sent to, each with its generators in the order in which they joined."""
        far: dict[Place, list[str]] = {}
        for name, member in self._members.items():
            if member.place is not self._home:
                far.setdefault(member.place, []).append(name)
        return far

    def _round(self, version: PolicyVersion, names: Iterable[str]) -> Round:
        """Return the round of a publication, which waits for these generators, too."""
        round_ = self._rounds.setdefault(version, Round(time.monotonic()))
        round_.waits_for.update(names)
        return round_

    def _staged(self, name: str, place: Place, message: Staged) -> None:
        if not place.awaits(name, message.writes):
            return
        self._release(name)
        place.awaited.discard(name)
        place.received += message.digest
        self._compare_received(place)

    def _compare_received(self, place: Place) -> None:
        """Release what a place has received to its engines, if it has the digest of what was sent."""
        slot = place.receiving
        if slot is None or place.awaited or (digests := self._sent.get(cast(PolicyVersion, slot.version))) is None:
            return
        sent, received = int(digests.sum()), place.received % 2**64
        if sent != received:
            why = f"digest mismatch: sent {sent:016x}, received {received:016x}"
            self._not_received(place.receivers[0], place, why)
            return
        place.newest, place.receiving, place.failures = slot, None, 0

    def _not_received(self, name: str, place: Place, why: str) -> None:
        """Send the weights again; after `ATTEMPTS` failures the run fails."""
        log.warning("publication to %s: %s", name, why)
        assert place.receiving is not None
        version = place.receiving.version
        self._abandon(place)
        place.failures += 1
        self._count_failure(name, version, place.failures, why)

    def _abandon(self, place: Place) -> None:
        """Forget what is being received."""
        for name in place.awaited:
            self._release(name)
        place.abandon()

    def _begin_anew(self, place: Place) -> None:
        """Forget what was received, too."""
        self._abandon(place)
        place.clear()

    def _swapped(self, name: str, member: Member, message: Swapped, tensors: Digests, swapped_s: float) -> None:
        round_, sent = self._rounds.get(message.version), self._sent.get(message.version)
        if round_ is not None and sent is None:
            self._early.append((name, member, message, tensors, swapped_s))
            return
        if message.version == member.offered:
            self._release(name, member.place)
            member.loaded = "" if sent is None else digest_of(sent)
        if round_ is None or name not in round_.waits_for:
            if message.version == member.offered:  # after its deadline
                member.offered, member.is_late = None, False
            return
        loaded, checksum = member.before
        others = {other: c for other, c in round_.swapped.items() if other not in {name, *round_.differing}}
        if wrong := self._wrong(message.version, tensors):
            round_.differing.add(name)
            what = f"{len(wrong)} tensors are not those of weights {message.version}: {listed(wrong)}"
            log.error("%s: %s", name, what)
        elif message.checksum not in (others or {name: message.checksum}).values():
            held = others | {name: message.checksum}
            self._reoffer(name, member, f"engines hold different weights after {message.version} was published: {held}")
            return
        elif member.loaded != loaded and message.checksum == checksum:
            self._reoffer(name, member, f"{name} swapped to {message.version} and still holds the weights before it")
            return
        member.before, member.failures, member.is_late = (member.loaded, message.checksum), 0, False
        member.holds = message.version
        if member.offered == message.version:
            member.offered = None
        round_.swapped[name] = message.checksum
        round_.ended_s = max(round_.ended_s, swapped_s)
        for version, other in self._rounds.items():
            if version <= message.version:
                other.waits_for.discard(name)  # an older version will not be loaded any more

    def _wrong(self, version: PolicyVersion, held: Digests) -> list[str]:
        """Return the tensors that are not those of `version`.

        Args:
            held: [n, 2], index and digest of each tensor that an engine holds.
        """
        sent = self._sent[version][held[:, 0]]
        return [self._layout.tensors[index].name for index in held[sent != held[:, 1], 0]]

    def _digests(self, payload: Buffer, columns: int) -> Digests:
        """Return the digests of a payload, [n, columns] uint64. Raises WireError: they are not of this layout."""
        count = len(self._layout.tensors)
        if len(payload) % (8 * columns):
            raise WireError(f"{len(payload)} bytes are not digests of tensors")
        digests = np.frombuffer(payload, np.uint64).reshape(-1, columns)
        if (len(digests) != count) if columns == 1 else (digests[:, 0] >= count).any():
            raise WireError(f"these digests are not of {count} tensors")
        return digests

    def _find_losses(self, name: str, member: Member, heartbeat: Alive) -> None:
        """Offer weights again if a broken connection lost the offer or the reply."""
        place, before_s = member.place, member.heard_s - liveness.SUSPECT_S
        has_swapped = any(each is member for _, each, *_ in self._early)
        if heartbeat.is_idle and member.offered is not None and member.offered_s < before_s and not has_swapped:
            log.warning("weights %s are offered to %s again: a message was lost", member.offered, name)
            self._release(name, place)
            member.offered, member.is_late = None, False
        if name in place.awaited and place.receiving_s + self._read_s < before_s:
            log.warning("weights are sent to %s again: a message was lost", name)
            self._abandon(place)

    def _sync_failed(self, name: str, member: Member, message: SyncFailed) -> None:
        log.warning("%s could not take weights %s: %s", name, member.offered, message.reason)
        place = member.place
        if message.poisoned:
            self._forget(name)
        elif not message.writes:
            self._reoffer(name, member, message.reason)
            if place is not self._home:  # the owner of the file has died, and the file with it
                self._begin_anew(place)
        elif place.awaits(name, message.writes):
            self._not_received(name, place, message.reason)

    def _reoffer(self, name: str, member: Member, problem: str) -> None:
        """Offer the newest version once more; after `ATTEMPTS` failures the run fails."""
        log.warning("publication to %s: %s", name, problem)
        self._release(name, member.place)
        version, member.offered, member.holds = member.offered, None, None
        member.failures += 1
        self._count_failure(name, version, member.failures, problem)

    def _count_failure(self, name: str, version: PolicyVersion | None, failures: int, problem: str) -> None:
        if version in self._rounds:
            self._rounds[version].attempts = max(self._rounds[version].attempts, failures + 1)
        if failures >= ATTEMPTS:
            self._failure = WeightsError(f"weights were offered to {name} {ATTEMPTS} times: {problem}")

    def _conclude(self) -> None:
        """Report each publication that no generator is awaited for any more."""
        newest = self._home.newest.version if self._home.newest is not None else None
        for version, round_ in sorted(self._rounds.items()):
            is_wanted = any(m.holds != version and m.offered is None for m in self._members.values())
            if round_.waits_for or (version == newest and is_wanted):
                continue
            if self._check.awaits(version, round_.swapped.keys() & self._members.keys(), round_.ended_s):
                continue
            del self._rounds[version]
            if not round_.swapped:
                log.warning("weights %s reached no generator", version)
                continue
            holders = {n for n, m in self._members.items() if m.holds is not None and m.holds >= version}
            holders |= round_.swapped.keys()
            report = Publication(
                version=version,
                generators=tuple(sorted(holders)),
                seconds=round_.ended_s - round_.started_s,
                num_bytes=self._layout.num_bytes,
                digest=digest_of(self._sent[version]),
                checksums=round_.swapped,
                attempts=round_.attempts,
                sent_bytes=round_.sent_bytes,
                dropped=tuple(sorted((round_.left_out | self._missing.keys()) - holders)),
                gaps=self._check.conclude(version) | dict.fromkeys(round_.differing, SyncGap(math.inf, math.inf)),
                gap_limit=self._check.limit.nats,
            )
            if report.differing:
                log.error("%s", report.describe_gap())
            self._reports.put(report)

    # -- members -------------------------------------------------------------------------------------------------------

    def _check_members(self) -> None:
        """Drop members that are lost, silent or too slow."""
        while not self._lost.empty():
            name, incarnation = self._lost.get()
            for known in (self._members, self._missing):
                if name in known and known[name].incarnation == incarnation:
                    log.warning("%s is gone", name)
                    self._forget(name)
                    self._missing.pop(name, None)
        now_s, timeout_s = time.monotonic(), self._config.timeout_s
        swap_s = timeout_s + self._read_s
        for name, member in list(self._members.items()):
            is_receiving = name in member.place.awaited
            patience_s = liveness.SUSPECT_S + (self._read_s if is_receiving else 0.0)
            heard_s = max(member.heard_s, self._late_s if is_receiving else 0.0)  # it may wait for a sender
            in_group = name in self._lane.names and self._lane.state in ("forming", "sending")
            if f"{name}-{member.incarnation}" in self._leaving:
                self._forget(name)
            elif now_s - heard_s > max(patience_s, timeout_s if in_group else 0.0):
                self._drop(name, f"no heartbeat for {patience_s:.0f} s")
            elif member.offered is not None and not member.is_late and now_s > member.offered_s + swap_s:
                member.is_late = True
                why = f"it did not swap to {member.offered} within {swap_s:.0f} s"
                log.warning("%s is dropped from publications: %s", name, why)
                self._stop_waiting(name)
                self._release(name, member.place)

    def _drop(self, name: str, why: str) -> None:
        """Drop a member until its next message."""
        log.warning("%s is dropped from publications: %s", name, why)
        member = self._members[name]
        self._forget(name)
        member.offered, member.holds, member.is_late = None, None, False
        self._missing[name] = member

    def _forget(self, name: str) -> None:
        if (member := self._members.pop(name, None)) is not None:
            self._stop_waiting(name)
            self._release(name, member.place)
            self._early = [early for early in self._early if early[1] is not member]
            if name in member.place.receivers:
                self._begin_anew(member.place)
            if all(other.place is not member.place for other in self._members.values()):
                self._elsewhere.pop(member.machine, None)
            if name in self._lane.names:
                self._drop_group(f"{name} is gone")

    def _stop_waiting(self, name: str) -> None:
        for round_ in self._rounds.values():
            if name in round_.waits_for:
                round_.waits_for.discard(name)
                round_.left_out.add(name)

    def _release(self, name: str, place: Place | None = None) -> None:
        """Remove a reader from all arenas of a place; without one, of the learner's."""
        with self._lock:
            (place or self._home).release(name)

    def _drop_group(self, why: str) -> None:
        log.warning("the weight group is dropped: %s", why)
        for name in self._lane.names & self._members.keys():
            self._members[name].heard_s = time.monotonic()
            self._abandon(self._members[name].place)
        self._lane.drop()

    def _send(self, name: str | int, message: Message) -> bool:
        """Send to a generator by its name, or to a sender by its number."""
        if isinstance(name, int):
            peer = self._senders.get(name)
        else:
            peer = member.peer if (member := self._members.get(name)) is not None else None
        return peer is not None and self._server.send(peer, message)

    @property
    def _read_s(self) -> float:
        """Time allowed for reading or writing a publication."""
        return liveness.copy_s(self._layout.num_bytes)
