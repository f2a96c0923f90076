"""The learner's side of a publication: snapshot, offer, compare digests, and note who samples with what.

The learner copies its weights into an arena (`offer`) and trains on. Everything else happens in a thread beside it: the offer to
each generator as soon as it has nothing else to do, the digest, and the proof. Generators adopt a version at their
own pace; nobody waits for the slowest. If the learner makes versions faster than they travel, the latest wins.

    Join -> WeightsLayout -> [ Offer -> Staged -> Swapped ]*

A generator holds a version once its engine has swapped to it, out of the arena or of received bytes that have the digest, and the
engine's checksum is that of the other engines at this version. Whoever says nothing for some seconds is left out, whoever
says it (this thread, the driver), and is back with its next sign of life.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast

from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.scratch import same_machine
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, IsWritten, Layout, Slot
from asyncgrpo.weights.check import SyncCheck
from asyncgrpo.weights.delta import Delta, State
from asyncgrpo.weights.digest import digest_pieces
from asyncgrpo.weights.group import Backend
from asyncgrpo.weights.lane import DeltaLane, GroupLane, at_most
from asyncgrpo.weights.publication import Member, Publication, Round
from asyncgrpo.weights.threads import SHARE_BYTES
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, Kinds, decode
from asyncgrpo.wire.sockets import Client, Keys, Server
from asyncgrpo.wire.weights import (
    Alive,
    Checked,
    GroupFormed,
    Join,
    Offer,
    PartTaken,
    Staged,
    Swapped,
    SyncFailed,
    ToPublisher,
    WeightsLayout,
)

log = logging.getLogger(__name__)

READ = Kinds(ToPublisher)

ATTEMPTS = 3
"""How often one version is offered to a generator that reports other bytes, or other weights, than it should."""
SILENT_S = 5.0
"""A generator's receiver that has said nothing for so long is left out. It says that it is alive twice a second."""
LOST_S = 20.0
"""After so long the others are told, who give its leases away. An engine may hold the interpreter for seconds."""
READ_BYTES_PER_S = 100e6
"""What a generator that receives weights must manage at least; it says nothing while it does. So must a learner rank that sends
its own."""
LOOK_EVERY_S = 0.2
LOOK_WHILE_SENDING_S = 0.02
LOOK_WHILE_WRITING_S = 0.005
NOT_CONNECTED = "it is not connected any more"
COMPARING, HASHING = "(deltas)", "(digest)"
"""Read an arena as generators do, while a delta is made of it, or its digest is computed."""


class Publisher:
    """Brings versions to generators, from a thread of its own. The learner's loop calls what is not private."""

    def __init__(
        self, config: WeightsConfig, *, maps: bool, backend: Backend, bind: str, host: str, keys: Keys | None
    ) -> None:
        """Bind the control socket.

        Args:
            maps: generators on this machine copy weights out of this process's memory.
            backend: of the broadcasts to all others.
            host: address at which the generators reach this process.
        """
        self._config = config
        self._keys = keys
        self._maps = maps
        self._server = Server(bind, keys, advertise=host)
        self._lane = GroupLane(backend, host, config.timeout_s, config.bucket_mb * 2**20)
        self._deltas = DeltaLane(config.bucket_mb * 2**20)
        self._machine = same_machine()
        self._members: dict[str, Member] = {}
        self._missing: dict[str, Member] = {}
        self._leaving: tuple[str, ...] = ()
        self._rounds: dict[PolicyVersion, Round] = {}
        self._lock = threading.Lock()  # over the slots
        self._slots: list[Slot] = []
        self._newest: Slot | None = None  # of those that may be read
        self._preparing: Slot | None = None
        self._told: SimpleQueue[tuple[str, str]] = SimpleQueue()  # who was given up
        self._reports: SimpleQueue[Publication] = SimpleQueue()
        self._failure: WeightsError | None = None
        self._wake: Client | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-publisher", daemon=True)
        self.on_left_out: Callable[[str, str, str], None] = lambda name, incarnation, why: None
        """Called in this thread with each generator that is lost: name, incarnation, and what it did not do."""
        self.endpoint = self._server.endpoint

    # -- what the learner's loop calls ---------------------------------------------------------------------------------

    def start(self, layout: list[TensorInfo], check: SyncCheck | None = None) -> None:
        """Fix the layout of all publications, and begin to listen.

        Args:
            layout: names, shapes and dtypes.
            check: which versions the engines are to score sequences under; `expect` then says what they should find.
        """
        self._layout, self._check = Layout(layout), check or SyncCheck.none()
        self._layout_message = WeightsLayout(tensors=self._layout.tensors, **self._check.asked())
        self._arenas = Arenas(self._layout)
        if self._maps and not self._arenas.file:
            log.warning("%s; until then weights are broadcast", self._arenas.trouble)
            self._maps = False
        self._arenas.pin()
        self._slots = [Slot(flat, number) for number, flat in enumerate(self._arenas.slots)]
        self._wake = Client(self.endpoint, "learner", self._keys)
        self._thread.start()

    @property
    def file(self) -> str:
        """Name of the arenas' file in shared memory; empty: no other process can map them."""
        return self._arenas.file

    @property
    def generators(self) -> list[str]:
        """Generators in touch."""
        return sorted(self._members.copy())

    @property
    def missing(self) -> tuple[str, ...]:
        """Generators that were left out and are not back, by name and incarnation. May be read from any thread."""
        late = ((name, member) for name, member in tuple(self._members.items()) if member.is_late)
        return tuple(f"{name}-{m.incarnation}" for name, m in (*tuple(self._missing.items()), *late))

    def wait_for(self, count: int, timeout_s: float, tell: Callable[[str, float], None]) -> None:
        """Wait until `count` generators are in touch, at most for `timeout_s`; then go on with those there are.

        Args:
            tell: called about once a second with what is awaited and since how many seconds. What it raises ends the wait.
        Raises:
            WeightsError: no generator came.
        """
        started, told_s = time.monotonic(), 0.0
        while len(self._members) < count and (waited := time.monotonic() - started) < timeout_s:
            if waited >= told_s:
                tell(f"generators to start ({len(self._members)} of {count} have)", waited)
                told_s = waited + 1.0
            time.sleep(0.02)
        if not self._members:
            raise WeightsError(f"no generator asked for weights within {timeout_s:.0f} s; their logs say why")

    def offer(self, version: PolicyVersion, fill: Callable[[Layout, Tensor], IsWritten | None]) -> bool:
        """Publish `version` beside whatever the caller does next.

        Args:
            fill: writes the weights into the views of the layout's arena, [num_bytes] uint8. It may return a function that
                says whether all bytes are there.
        Returns:
            Whether it was taken: not if generators still read both arenas. Then offer it again, or a later version.
        """
        with self._lock:
            slot = self._free_slot()
            if slot is None:
                return False
            slot.is_ours, slot.is_ready, slot.version, slot.digest = True, False, None, ""
            slot.writes = self._arenas.begin(slot.number)
            if slot is self._newest:
                self._newest = None
        is_filled = False
        try:
            slot.is_written = fill(self._layout, slot.flat)
            is_filled = True
        finally:
            with self._lock:
                slot.is_ours = False
                if is_filled:
                    slot.version = version
        self._look_again()
        return True

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """Compare what the engines find under `version`, which is being published, with these scores of the learner."""
        self._check.expect(version, scores)
        self._look_again()

    def reports(self) -> list[Publication]:
        """The publications that have ended since the last call.

        Raises:
            WeightsError: no generator can hold what is published, and none will.
        """
        ended = []
        while not self._reports.empty():
            ended.append(self._reports.get())
        if self._failure is not None:
            raise self._failure
        return ended

    @property
    def is_idle(self) -> bool:
        """Whether every generator in touch has what was offered last."""
        if self._failure is not None:
            return True
        if self._rounds or self._preparing is not None or self._filled() is not None:
            return False
        newest = self._newest
        return newest is None or all(m.holds == newest.version for m in tuple(self._members.values()))

    def give_up(self, generator_id: str, incarnation: str) -> None:
        """Wait for this generator no more: it is gone. May be called from any thread."""
        self._told.put((generator_id, incarnation))

    def dismiss(self, leaving: tuple[str, ...]) -> None:
        """Publish no more to these, by name and incarnation: they leave."""
        self._leaving = leaving
        self._look_again()

    def close(self) -> None:
        self._stop.set()
        self._look_again()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._wake is not None:
            self._wake.close()
            self._arenas.close()
        self._server.close()

    def _look_again(self) -> None:
        """Have the thread look now."""
        if self._wake is not None:
            self._wake.send(Alive(generator_id="", incarnation=""))

    def _free_slot(self) -> Slot | None:
        """An arena that nobody reads: the one that is not published, or else the newest, if nobody was offered it yet."""
        free = [slot for slot in self._slots if not slot.readers and not slot.is_ours]
        return min(free, key=lambda slot: slot is self._newest, default=None)

    def _filled(self) -> Slot | None:
        """The arena with the newest version, if that may not be read yet and nobody prepares it."""
        filled = [slot for slot in self._slots if slot.version is not None and not slot.is_ours]
        newest = max(filled, key=lambda slot: cast(PolicyVersion, slot.version), default=None)
        return None if newest is None or newest.is_ready else newest

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read()
                self._look_at_members()
                self._prepare_newest()
                self._offer_to_near()
                self._offer_to_far()
                self._compare_newest()
                self._conclude()
        except BaseException as error:
            log.exception("the publisher ended")
            self._failure = WeightsError(f"the publisher ended: {error!r}")
        finally:
            self._lane.close()
            self._deltas.close()

    def _read(self) -> None:
        """Read what has arrived; wait a little if it is nothing."""
        is_sending = self._lane.state in ("forming", "sending") or self._deltas.is_busy
        timeout_s = LOOK_WHILE_SENDING_S if is_sending else LOOK_EVERY_S
        timeout_s = LOOK_WHILE_WRITING_S if self._preparing is not None else timeout_s
        received = self._server.receive(timeout_s)
        while received is not None:
            peer, frames = received
            try:
                self._handle(peer, cast(ToPublisher, decode(frames, READ)[0]))
            except WireError as error:
                log.warning("refused a message of %s: %s", peer, error)
            received = self._server.receive(0.0)

    def _handle(self, peer: str, message: ToPublisher) -> None:
        name = message.generator_id
        if isinstance(message, Join):
            self._join(peer, message)
            return
        if (missing := self._missing.get(name)) is not None and missing.peer == peer:  # it is back
            del self._missing[name]
            self._members[name] = missing
            missing.is_told = False
        member = self._members.get(name)
        if member is None or member.peer != peer:
            return
        member.heard_s = time.monotonic()
        if isinstance(message, Staged):
            self._staged(name, member, message)
        elif isinstance(message, Swapped):
            self._swapped(name, member, message)
        elif isinstance(message, Checked) and message.version in self._rounds:
            self._check.scored(message.version, name, message.scores)
        elif isinstance(message, PartTaken):
            self._deltas.taken(name, message, self._send)
        elif isinstance(message, SyncFailed):
            self._sync_failed(name, member, message)
        elif isinstance(message, GroupFormed) and message.problem and message.group_number == self._lane.number:
            self._drop_group(f"{name} is not in group {message.group_number}: {message.problem}")

    def _join(self, peer: str, message: Join) -> None:
        name = message.generator_id
        if any(m.peer == peer and other != name for other, m in self._members.items()):
            log.warning("refused a Join of %s from %s, who has joined as another", name, peer)
            return
        if f"{name}-{message.incarnation}" in self._leaving:
            return
        self._forget(name)
        self._deltas.forget(name)
        self._missing.pop(name, None)
        if self._server.send(peer, self._layout_message):
            is_near = self._maps and message.machine == self._machine
            self._members[name] = Member(peer, message.incarnation, is_near, time.monotonic())

    # -- one version ---------------------------------------------------------------------------------------------------

    def _prepare_newest(self) -> None:
        """Let the newest version be read once all its bytes are there, and compute its digest. Engines that load out of the
        arena need none, and get it before."""
        if self._preparing is None:
            with self._lock:
                self._preparing = slot = self._filled()
                if slot is not None:
                    slot.is_ours = True
        slot = self._preparing
        if slot is None or not (slot.is_written is None or slot.is_written()):
            return
        with self._lock:
            slot.is_ours, slot.is_ready = False, True
            slot.readers.add(HASHING)
            self._newest, self._preparing = slot, None
        self._offer_to_near()
        slot.digest = digest_pieces(slot.flat, self._layout.slices(SHARE_BYTES))
        if (round_ := self._rounds.get(cast(PolicyVersion, slot.version))) is not None:
            round_.digest = slot.digest
        self._read_by(HASHING)

    def _offer_to_near(self) -> None:
        for name, member in list(self._members.items()):
            if not member.is_near or member.offered is not None:
                continue
            with self._lock:
                slot = self._newest
                if slot is None or slot.version is None:
                    return
                if member.holds == slot.version:
                    continue
                slot.readers.add(name)
            self._offered(name, member, slot.version, slot.digest, self._layout.num_bytes)
            member.is_staging = False  # its engine loads them from where they lie
            offer = Offer(
                version=slot.version,
                digest=slot.digest,
                file=self._arenas.file,
                slot=slot.number,
                writes=slot.writes,
            )
            if not self._server.send(member.peer, offer):
                self._leave_out(name, NOT_CONNECTED)
                self._tell_of(name, member, NOT_CONNECTED)

    def _offer_to_far(self) -> None:
        """Deltas to those that hold a version from which they lead on, to all others one broadcast after the other."""
        trouble = self._lane.look()
        if trouble is not None:
            self._drop_group(trouble)
        if self._deltas.look():
            self._read_by(COMPARING)
        far = self._far()
        if self._lane.state != "none" and not self._lane.names <= far.keys():
            self._drop_group("one of it is gone")
        most = at_most(self._layout.num_bytes, len(far), self._lane.broadcast_s)
        paths = {name: self._deltas.path(name, most) for name in far}
        for name, path in paths.items():
            if path and far[name].offered is None:
                self._offer_deltas(name, far[name], path)
        whole = {
            name: member for name, member in far.items() if paths[name] is None and not self._deltas.may_reach(name)
        }
        if whole and self._lane.state not in ("forming", "sending"):
            self._broadcast(whole)

    def _offer_deltas(self, name: str, member: Member, path: list[Delta]) -> None:
        version, digest = path[-1].after
        self._offered(name, member, version, digest, sum(delta.packed_bytes for delta in path))
        if not self._deltas.offer(name, path, self._send):
            self._leave_out(name, NOT_CONNECTED)
            self._tell_of(name, member, NOT_CONNECTED)

    def _broadcast(self, whole: dict[str, Member]) -> None:
        """Send all weights to these generators; a group is formed when one is needed."""
        if any(member.is_staging for member in whole.values()):
            return
        with self._lock:
            slot = self._newest
            if slot is None or slot.version is None:
                return
            if all(slot.version in (m.holds, m.offered) for m in whole.values()):
                return
            is_ready = self._lane.state == "ready" and self._lane.names == whole.keys()
            if is_ready:
                slot.readers |= whole.keys()
        if not is_ready:
            self._lane.drop()
            self._lane.form(sorted(whole), self._send)
            return
        for name, member in whole.items():
            self._offered(name, member, slot.version, slot.digest, self._layout.num_bytes)
        self._lane.broadcast(slot.version, slot.digest, self._layout, slot.flat, self._send)

    def _compare_newest(self) -> None:
        """Begin to make a delta of the newest version, unless there is nobody to send it to."""
        far = self._far()
        if not far or not self._config.deltas:
            self._deltas.clear()
            return
        with self._lock:
            slot = self._newest
            if slot is None or slot.version is None:
                return
            state = State(slot.version, slot.digest)
            if not self._deltas.wants(state):
                return
            slot.readers.add(COMPARING)
        most = at_most(self._layout.num_bytes, len(far), self._lane.broadcast_s)
        self._deltas.follow(state, self._layout, slot.flat, most)

    def _far(self) -> dict[str, Member]:
        """Members that cannot map the learner's memory."""
        return {name: member for name, member in self._members.items() if not member.is_near}

    def _offered(self, name: str, member: Member, version: PolicyVersion, sent: str, num_bytes: int) -> None:
        round_ = self._rounds.setdefault(version, Round(time.monotonic(), sent))
        round_.waits_for.add(name)
        round_.sent_bytes += num_bytes
        self._deltas.forget(name)
        member.offered, member.offered_s, member.is_staging = version, time.monotonic(), True

    def _staged(self, name: str, member: Member, message: Staged) -> None:
        self._read_by(name)
        member.is_staging = False
        round_ = self._rounds.get(message.version)
        if round_ is None or message.version != member.offered:
            return
        if message.digest != round_.digest:
            self._again(name, member, f"digest mismatch: sent {round_.digest}, {name} received {message.digest}")
            return
        self._deltas.received(name, State(message.version, message.digest))
        member.loaded = message.digest

    def _swapped(self, name: str, member: Member, message: Swapped) -> None:
        round_ = self._rounds.get(message.version)
        if member.is_near and message.version == member.offered:
            self._read_by(name)
            member.loaded = round_.digest if round_ is not None else ""
        if round_ is None or name not in round_.waits_for:
            if message.version == member.offered:  # later than anybody waited for
                member.offered, member.is_late = None, False
            return
        loaded, checksum = member.before
        others = {other: c for other, c in round_.swapped.items() if other != name}
        if message.checksum not in (others or {name: message.checksum}).values():
            held = others | {name: message.checksum}
            self._again(name, member, f"engines hold different weights after {message.version} was published: {held}")
            return
        if member.loaded != loaded and message.checksum == checksum:
            self._again(name, member, f"{name} swapped to {message.version} and still holds the weights before it")
            return
        member.before, member.failures, member.is_late = (member.loaded, message.checksum), 0, False
        member.holds = message.version
        if member.offered == message.version:
            member.offered = None
        round_.swapped[name] = message.checksum
        round_.ended_s = time.monotonic()
        for version, other in self._rounds.items():
            if version <= message.version:
                other.waits_for.discard(name)  # one that was overtaken will not come

    def _sync_failed(self, name: str, member: Member, message: SyncFailed) -> None:
        if message.transfer and not self._deltas.is_sending(name, message.transfer):
            return  # it has been offered something else since
        log.warning("%s could not take weights %s: %s", name, member.offered, message.reason)
        if message.poisoned:
            was_staging, version = member.is_staging, member.offered
            self._forget(name)
            if was_staging and not self._members:  # a generator started in its place could not either
                self._failure = WeightsError(f"weights {version} reached no generator; first failure: {message.reason}")
        else:
            self._again(name, member, message.reason)

    def _again(self, name: str, member: Member, problem: str) -> None:
        """Offer the newest version to it once more, unless that has failed often enough."""
        log.warning("publication to %s: %s", name, problem)
        self._read_by(name)
        self._deltas.forget(name)
        version, member.offered, member.is_staging, member.holds = member.offered, None, False, None
        member.failures += 1
        if version in self._rounds:
            self._rounds[version].attempts = max(self._rounds[version].attempts, member.failures + 1)
        if member.failures >= ATTEMPTS:
            self._failure = WeightsError(f"weights were offered to {name} {ATTEMPTS} times: {problem}")

    def _conclude(self) -> None:
        """Report the publications for which nobody is awaited any more."""
        newest = self._newest.version if self._newest is not None else None
        for version, round_ in sorted(self._rounds.items()):
            if round_.waits_for or (version == newest and any(self._wants(m, version) for m in self._members.values())):
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
                digest=round_.digest,
                checksums=round_.swapped,
                attempts=round_.attempts,
                sent_bytes=round_.sent_bytes,
                dropped=tuple(sorted((round_.left_out | self._missing.keys()) - holders)),
                gaps=self._check.conclude(version),
                gap_limit=self._check.limit.nats,
            )
            if report.differing:
                log.error("%s", report.describe_gap())
            self._reports.put(report)

    def _wants(self, member: Member, version: PolicyVersion) -> bool:
        return member.holds != version and member.offered is None

    # -- members -------------------------------------------------------------------------------------------------------

    def _look_at_members(self) -> None:
        while not self._told.empty():
            name, incarnation = self._told.get()
            for known in (self._members, self._missing):
                if name in known and known[name].incarnation == incarnation:
                    log.warning("%s is gone", name)
                    self._forget(name)
                    self._missing.pop(name, None)
        now_s = time.monotonic()
        for name, member in list(self._members.items()):
            patience_s = SILENT_S + (self._layout.num_bytes / READ_BYTES_PER_S if member.is_staging else 0.0)
            in_group = name in self._lane.names and self._lane.state in ("forming", "sending")
            if f"{name}-{member.incarnation}" in self._leaving:
                self._forget(name)
            elif now_s - member.heard_s > max(patience_s, self._config.timeout_s if in_group else 0.0):
                self._leave_out(name, f"it has said nothing for {patience_s:.0f} s")
            elif self._deltas.is_stuck(name, patience_s):
                self._again(name, member, f"no reply to a part of deltas to {member.offered}")
            elif member.offered is not None and not member.is_late:
                self._look_at_swap(name, member, now_s)
        for name, member in self._missing.items():
            if now_s - member.heard_s > LOST_S and not member.is_told:
                self._tell_of(name, member, f"its receiver of weights has said nothing for {LOST_S:.0f} s")

    def _look_at_swap(self, name: str, member: Member, now_s: float) -> None:
        if now_s - member.offered_s > self._config.timeout_s:
            member.is_late = True
            why = f"it did not swap to {member.offered} within {self._config.timeout_s:.0f} s"
            log.warning("%s is left out: %s", name, why)
            self._await_no_more(name)
            self._read_by(name)
            self._tell_of(name, member, why)

    def _leave_out(self, name: str, why: str) -> None:
        """Leave a member out. It may be alive, and come back."""
        log.warning("%s is left out: %s", name, why)
        member = self._members[name]
        self._forget(name)
        member.offered, member.is_staging, member.holds, member.is_late = None, False, None, False
        self._missing[name] = member

    def _tell_of(self, name: str, member: Member, why: str) -> None:
        member.is_told = True
        self.on_left_out(name, member.incarnation, why)

    def _forget(self, name: str) -> None:
        if self._members.pop(name, None) is not None:
            self._await_no_more(name)
            self._deltas.stop(name)
            self._read_by(name)
            if name in self._lane.names:
                self._drop_group(f"{name} is gone")

    def _await_no_more(self, name: str) -> None:
        for round_ in self._rounds.values():
            if name in round_.waits_for:
                round_.waits_for.discard(name)
                round_.left_out.add(name)

    def _read_by(self, name: str) -> None:
        """It reads no arena any more."""
        with self._lock:
            for slot in self._slots:
                slot.readers.discard(name)

    def _drop_group(self, why: str) -> None:
        log.warning("the weight group is given up: %s", why)
        for name in self._lane.names & self._members.keys():
            member = self._members[name]
            member.heard_s = time.monotonic()
            if member.is_staging and not self._deltas.is_sending(name):
                member.offered, member.is_staging = None, False
                self._await_no_more(name)
            self._read_by(name)
        self._lane.drop()

    def _send(self, name: str, message: Message, payload: Buffer = b"") -> bool:
        member = self._members.get(name)
        return member is not None and self._server.send(member.peer, message, payload)
