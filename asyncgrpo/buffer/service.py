"""The buffer's process: one thread and one loop that serve generators, the learner and the driver over one socket.

`BufferService` turns messages into calls of `Buffer` and `Evaluations`, and their results into messages.
"""

import heapq
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from asyncgrpo import liveness, metrics
from asyncgrpo.buffer.buffer import Buffer, GroupEntry, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.fleet import Emit, Load, RewardMonitor, Session, Speeds
from asyncgrpo.data.prompts import PromptState
from asyncgrpo.errors import DataError, RefusedError
from asyncgrpo.journal.history import Committed
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer as Frame
from asyncgrpo.wire.codec import OfLearnerOrDriver, ToBuffer, check_group, check_lease, decode, kinds_of
from asyncgrpo.wire.rollouts import (
    OF_ONE_BATCH,
    REWARDS_PAUSED,
    Ack,
    AwaitsScores,
    Batch,
    Cancel,
    Deliver,
    Finished,
    Grant,
    LastEvals,
    LeaseFailed,
    Nack,
    NoMore,
    Register,
    RequestEval,
    Reregister,
    RewardFailed,
    Saved,
    Serving,
    Shutdown,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from asyncgrpo.wire.sockets import Server
from asyncgrpo.wire.supervision import Drain, GeneratorLost, Steer

log = logging.getLogger(__name__)

READ = kinds_of(ToBuffer)

TICK_S = 0.1
BURST = 32
"""Messages read before leases are granted again."""
EVENLY_S = 0.5
"""Time after a version is first served in which no generator gets more than its share of the leases."""
BEHIND = 1
"""Versions that a generator may be behind the newest served one and still get a lease."""


class BufferService:
    """Runs a `Buffer` and its `Evaluations` behind a socket until the learner has finished."""

    def __init__(
        self,
        server: Server,
        buffer: Buffer,
        evaluations: Evaluations,
        vocabulary: int | None = None,
        *,
        reward_name: str = "the reward",
        reward_has_worked: bool = False,
        emit: Emit = lambda event, **fields: None,
    ) -> None:
        """
        Args:
            vocabulary: token ids are below it; None: unknown, and not checked.
            reward_has_worked: True if it worked in an earlier start under the same command.
            emit: writes an event of the run.
        """
        self._server, self._buffer, self._evaluations = server, buffer, evaluations
        self._journal = buffer.journal
        self._vocabulary = 2**31 if vocabulary is None else vocabulary
        self._write_event = emit
        self._pending_events: list[tuple[str, dict[str, Any]]] = []
        self._rewards = RewardMonitor(reward_name, has_worked=reward_has_worked, emit=self._emit)
        self._failures = Tally()  # of leases, by reason
        self._load = Load()
        self._counted: dict[tuple[str, str], int] = {}  # what metrics have counted, by label and value
        self.progress = LoopProgress()
        self._ticked_s = 0.0
        self._finished = False
        # Generators.
        self._sessions: dict[str, Session] = {}
        self._speeds = Speeds()
        self._listened_s = self._caught_up_s = 0.0  # when messages were read last, and when none was left unread
        self._served, self._served_s = -1, 0.0  # newest version that a generator serves, and when it was first served
        self._newest: dict[str, str] = {}  # by generator: the peer of its newest incarnation
        self._speaks_for: dict[str, str] = {}  # by peer: the generator that it registered as
        # By lease id, in journal order: position in the journal, peer and reply.
        self._unacknowledged: dict[str, tuple[int, str, Ack]] = {}
        # The learner.
        self._learner: str | None = None
        self._take: Take | None = None
        self._may_take = False  # True if anything changed since `Buffer.take` last returned None
        self._batch: list[GroupEntry] | None = None  # taken, but not in the journal yet
        # The reply to the learner's last request and the groups in it, until the learner has trained them.
        self._replied: tuple[Batch | NoMore, Sequence[GroupEntry]] | None = None
        self._waiting_sent_s = 0.0
        self._filtered_before = 0  # groups filtered up to the last batch
        self._last_evals = False
        self._snapshot_asked: tuple[str, PolicyVersion | None] | None = None  # the learner's peer and version
        self._snapshot: PromptState | None = None  # the last one sent
        # Steering: as last requested, and as applied.
        self._steer_asked = self._steer = Steer()
        # The end of the run.
        self._drain_reason = ""
        self._is_failing = False
        self._failure: DataError | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Generators that lost touch, as `<name>-<incarnation>`. Safe to read from any thread."""
        return tuple(peer for name, peer in tuple(self._newest.items()) if name not in self._sessions)

    def steer(self, asked: Steer) -> None:
        """Apply the operator's request within a tick. Safe to call from any thread."""
        self._steer_asked = asked

    @property
    def steered(self) -> int:
        """Revision of the applied `Steer`. Safe to read from any thread."""
        return self._steer.revision

    def run(self) -> None:
        """Serve until `Finished`.

        Raises:
            DataError: every remaining prompt is in quarantine. The learner has written a checkpoint before.
        """
        while not self._finished:
            self.progress.tick()
            self.serve(TICK_S)
        if self._failure is not None:
            raise self._failure

    def serve(self, timeout_s: float) -> None:
        """Run one round: read at most BURST messages, then act on all of them."""
        received, now_s, count = self._server.receive(timeout_s), time.monotonic(), 1
        self._note_reading(now_s)
        with self._server.together():
            while received is not None and count < BURST and not self._finished:
                self._receive(*received, now_s)
                received, count = self._server.receive(0.0), count + 1
            self.turn(received, now_s)

    def turn(self, received: tuple[str, Sequence[Frame]] | None, now_s: float) -> None:
        """Handle the message received at `now_s`, or None if all are read, and act on it and on the time.

        A generator is judged by its messages up to the time at which all were read: those that queue up are no silence.
        """
        self._note_reading(now_s)
        if received is not None:
            self._receive(*received, now_s)
        else:
            self._caught_up_s = now_s
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            self._tick(now_s)
        if self._learner is not None:
            for event, fields in self._pending_events:
                self._write_event(event, **fields)
            self._pending_events.clear()
        self._reply_to_take(now_s)
        self._cancel_late()
        try:
            self._grant(now_s)
        except DataError as error:
            self._failure = error
            self._drain(str(error), is_failure=True)
        self._load.note(
            now_s,
            in_flight=self._buffer.num_sampled,
            places=sum(session.window for session in self._sessions.values()),
            in_touch=len(self._sessions),
        )
        if self._finished:  # after the last message, which may be a group
            self._journal.close()
            for session in self._sessions.values():
                self._server.send(session.peer, Shutdown())

    def _note_reading(self, now_s: float) -> None:
        """Exclude the time in which this process was stopped: messages that arrived meanwhile are still unread."""
        stopped_s = now_s - self._listened_s
        self._listened_s = now_s
        if stopped_s > liveness.QUIET_S / 2:
            for session in self._sessions.values():
                session.heard_s += stopped_s

    def _tick(self, now_s: float) -> None:
        """Do the periodic work: acknowledge durable groups, expire sessions and leases, update metrics."""
        self._journal.tick()
        self._apply_steering(now_s)
        self._acknowledge()
        self._send_snapshot(now_s)
        for name, session in list(self._sessions.items()):
            if self._caught_up_s - session.heard_s > liveness.SESSION_S:
                self._lose(name, f"silent for {liveness.SESSION_S:.0f} s", now_s)
        self._expire_leases(self._caught_up_s)
        self._reassign_leases_of_silent(now_s)
        self._show_metrics(now_s)
        for fields in self._buffer.prompts.rounds_begun():
            self._emit("curriculum", **fields)

    def _apply_steering(self, now_s: float) -> None:
        """Apply the operator's request. A new bound waits for the first weights, because its record names a version.

        Its revision counts as applied only then. The rest does not wait: a restart does not interrupt a pause.
        """
        asked = self._steer_asked
        if asked.revision > self._steer.revision:
            if asked.max_lag is not None and self._buffer.version is None:
                asked = msgspec.structs.replace(asked, revision=self._steer.revision)
            elif asked.max_lag is not None:
                self._buffer.change_max_lag(asked.max_lag)
            for session in self._sessions.values():
                session.window = asked.groups_in_flight or session.window
            metrics.paused.set(asked.is_paused)
            if self._steer.is_paused and not asked.is_paused:  # the learner did not wait for groups meanwhile
                self._buffer.forget_request(now_s)
            self._steer, self._may_take = asked, True
        for name, session in self._sessions.items():
            if session.peer in self._steer.ending:
                num_held = self._buffer.held_by(name) + self._evaluations.held_by(name)
                if not num_held and all(peer != session.peer for _, peer, _ in self._unacknowledged.values()):
                    self._server.send(session.peer, Shutdown())

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self, peer: str, frames: Sequence[Frame], now_s: float) -> None:
        self._may_take = True
        try:
            message, payload = decode(frames, READ)
            self._check_sender(peer, message)
            session = self._sessions.get(getattr(message, "generator_id", ""))
            if session is not None and session.peer == peer:
                session.heard_s = now_s
            self._handle(peer, message, payload, frames[0], now_s)
        except RefusedError as error:
            self._count_refusal(peer, error)
            if peer in self._speaks_for:  # undecodable, so its group is unknown
                self._server.send(peer, Nack(lease_id="", reason=error.reason))

    def _check_sender(self, peer: str, message: Message) -> None:
        """Raise RefusedError for a generator's message under another name, or of a kind that generators do not send."""
        speaks_for = self._speaks_for.get(peer)
        if speaks_for is None:
            return
        kind = type(message).__name__
        if isinstance(message, OfLearnerOrDriver):
            raise RefusedError("sender", f"a generator may not send {kind}")
        name = getattr(message, "generator_id", speaks_for)
        if name != speaks_for and not isinstance(message, Deliver):
            raise RefusedError("sender", f"{kind} of {name[:100]!r} from {speaks_for}")

    def _count_refusal(self, peer: str, error: RefusedError) -> None:
        metrics.rejected_frames_total.labels(reason=error.reason).inc()
        log.warning("refused a message from %s (%s): %s", peer, error.reason, str(error)[:500])

    def _handle(self, peer: str, message: Message, payload: memoryview, head: Frame, now_s: float) -> None:
        match message:
            case Deliver():
                self._deliver(peer, message, payload, head, now_s)
            case Serving():
                self._note_serving(peer, message, now_s)
            case Register():
                self._register(peer, message, now_s)
            case AwaitsScores(generator_id=name, lease_id=lease_id):
                self._buffer.awaits_scores(name, lease_id)
                self._evaluations.awaits_scores(name, lease_id)
            case LeaseFailed():
                self._lease_failed(message, now_s)
            case RewardFailed(generator_id=name, failure=failure, detail=detail, count=count):
                if name in self._sessions:
                    self._emit("reward_failed", actor=name, failure=failure, detail=detail[:500], count=count)
            # Not compared as a whole: a NaN share differs from itself.
            case Take() | LastEvals() if self._replied is not None and _version_of(message) == self._replied[0].version:
                log.info("the learner has not received the reply to its request, which is repeated")
                self._send_reply(peer)
            case Take():
                self._trained(message.version)
                self._evaluations.request(message.evaluate, now_s)
                if self._take is None:  # else it is repeated
                    self._buffer.step_ended(message.version, message.shares_within, now_s)
                self._learner, self._waiting_sent_s, self._take = peer, now_s, message
            case Trained(version=version):
                self._trained(version)
            case RequestEval(step=step):
                self._evaluations.request(step, now_s)
            case TakeSnapshot(trained=version):
                self._trained(version)
                self._snapshot_asked = peer, version
                self._send_snapshot(now_s)
            case Saved(step=step):
                if self._snapshot is None:
                    raise RefusedError("schema", f"a checkpoint of step {step} without a snapshot")
                self._journal.append(Committed(step=step, prompts=self._snapshot.without_shares))
            case LastEvals(evaluate=step):
                self._evaluations.request(step, now_s)
                self._learner, self._last_evals, self._buffer.draining = peer, True, True
            case Drain(reason=reason, is_failure=is_failure):
                self._drain(reason, is_failure=is_failure)
            case GeneratorLost(generator_id=name, incarnation=incarnation):
                session = self._sessions.get(name)
                if session is not None and incarnation in ("", session.incarnation):
                    self._lose(name, "its process ended", now_s)
            case Finished():
                self._finished = True

    def _drain(self, reason: str, *, is_failure: bool) -> None:
        log.info("draining: %s", reason)
        self._drain_reason, self._buffer.draining = reason, True
        self._is_failing |= is_failure

    # -- generators ----------------------------------------------------------------------------------------------------

    def _register(self, peer: str, message: Register, now_s: float) -> None:
        name = message.generator_id
        if self._is_replaced(name, peer):
            self._server.send(peer, Shutdown())
            return
        session = self._sessions.get(name)
        if session is None or (session.peer, session.incarnation) != (peer, message.incarnation):
            self._lose(name, "it restarted", now_s)
            self._newest[name] = peer
            self._speaks_for[peer] = name
            window = self._steer.groups_in_flight or message.window
            self._sessions[name] = Session(peer, message.incarnation, window, now_s)
            log.info("generator %s has registered", name)

    def _note_serving(self, peer: str, message: Serving, now_s: float) -> None:
        name = message.generator_id
        session = self._sessions.get(name)
        if session is not None and session.peer == peer:
            session.version, current = message.version, self._buffer.version
            if session.version is not None and current is not None and session.version.lineage == current.lineage:
                self._note_served(session.version.number, now_s)
            if session.seconds is not None:
                self._load.spent(session.seconds, message.seconds)
            session.seconds = message.seconds
            self._rewards.update(name, message.rewards, now_s)
            load = self._buffer.sampled_by(name) / session.window
            is_slow = self._speeds.heard(name, message.token_s, message.running, load, now_s)
            if is_slow and self._others_may_lease([name], now_s):
                log.warning("generator %s is slow: %.3g s per token, far above the others", name, message.token_s)
                self._reassign_leases(name, "slow")
            if message.leases is not None:
                self._free_unknown(name, frozenset(message.leases))
        elif self._is_replaced(name, peer):
            self._server.send(peer, Shutdown())
        else:  # its Register was lost, or it exceeded the liveness timeout
            self._server.send(peer, Reregister())

    def _is_replaced(self, name: str, peer: str) -> bool:
        """Return True if `peer` is an earlier incarnation of `name`, which may outlive its replacement unnoticed."""
        return peer in self._speaks_for and self._newest[name] != peer

    def _lose(self, name: str, why: str, now_s: float) -> None:
        """Forget a lost generator and free its leases."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        self._rewards.forget(name, now_s)
        self._speeds.forget(name)
        released = self._buffer.release(name)
        self._evaluations.release(name, now_s)
        if released:  # if it is alive, it would continue with leases that are no longer its own
            self._server.send(session.peer, Cancel(lease_ids=tuple(released), reason="lost"))
        log.warning("lost generator %s (%s); freed %d leases", name, why, len(released))

    # -- leases --------------------------------------------------------------------------------------------------------

    def _reassign_leases_of_silent(self, now_s: float) -> None:
        """Free the leases of silent generators while another generator may get one.

        They are not lost yet. Work that a returning generator did in vain costs less than a waiting learner.
        """
        before_s = self._caught_up_s - liveness.SUSPECT_S
        silent = [name for name, session in self._sessions.items() if session.heard_s < before_s]
        if any(map(self._buffer.held_by, silent)) and self._others_may_lease(silent, now_s):
            for name in silent:
                self._reassign_leases(name, "silent")

    def _others_may_lease(self, names: Sequence[str], now_s: float) -> bool:
        version = self._buffer.version
        if version is None or self._steer.is_paused or self._drain_reason or self._journal.is_blocked is not None:
            return False
        return bool(self._eligible(version, now_s).keys() - set(names))

    def _free_unknown(self, name: str, known: frozenset[str]) -> None:
        """Free the leases that a generator should have and does not know: a broken connection loses messages."""
        before_s = self._caught_up_s - liveness.SUSPECT_S
        lost = self._evaluations.free_unknown(name, known, before_s)
        if self._buffer.held_by(name) > len(known):  # the next line reads all groups
            lost += self._buffer.free_unknown(name, known, before_s)
        if lost:
            self._may_take = True
            self._server.send(self._sessions[name].peer, Cancel(lease_ids=tuple(lost), reason="lost"))
            log.warning("generator %s has not received %d of its leases, which are granted again", name, len(lost))

    def _reassign_leases(self, name: str, why: Literal["silent", "slow"]) -> None:
        if freed := self._buffer.free_leases_of(name, is_silent=why == "silent"):
            self._may_take = True
            self._server.send(self._sessions[name].peer, Cancel(lease_ids=tuple(freed), reason=why))
            log.warning("generator %s is %s: reassigned %d of its leases", name, why, len(freed))

    def _grant(self, now_s: float) -> None:
        """Grant leases one at a time, each to the generator that would finish it first; evaluation leases first."""
        current = self._buffer.version
        if current is None or self._steer.is_paused:
            return
        owners: tuple[Evaluations | Buffer, ...] = self._evaluations, self._buffer
        if owners := tuple(filter(self._has_room, owners)):
            able = self._eligible(current, now_s)
            self._buffer.set_eligible(able)
            for owner in owners:
                self._grant_of(owner, able, now_s)

    def _has_room(self, owner: Evaluations | Buffer) -> bool:
        """Return True if the owner may grant a lease and a generator's window is not full."""
        return owner.may_lease() and any(owner.sampled_by(n) < session.window for n, session in self._sessions.items())

    def _grant_of(self, owner: Evaluations | Buffer, able: Mapping[str, Session], now_s: float) -> None:
        """Grant the leases of one owner to these generators, less those whose version may get none."""
        is_open = {version: owner.may_lease(version) for version in {session.version for session in able.values()}}
        able = {name: session for name, session in able.items() if is_open[session.version]}
        share, fastest_s = self._share(now_s), self._speeds.fastest_s
        sampled = {name: owner.sampled_by(name) for name in able}
        held = {name: owner.held_by(name) for name in able}

        def has_room(name: str) -> bool:
            return sampled[name] < able[name].window and held[name] < share

        def order(name: str) -> tuple[float, int, str]:
            load = (sampled[name] + 1) / able[name].window
            # Of generators that are as fast, one with many groups that await scores is the last.
            return self._speeds.seconds_per_token(name, load, fastest_s), held[name], name

        queue = [order(name) for name in able if has_room(name)]
        heapq.heapify(queue)
        while queue and owner.may_lease():
            *_, name = queue[0]
            lease = owner.lease(name, now_s, able[name].version)
            if lease is not None:
                self._server.send(able[name].peer, Grant(lease=lease))
                sampled[name] += 1
                held[name] += 1
            if lease is None or not has_room(name):
                heapq.heappop(queue)
            else:
                heapq.heapreplace(queue, order(name))

    def _eligible(self, current: PolicyVersion, now_s: float) -> dict[str, Session]:
        """Return the generators that may get a lease: live ones at the newest served version, or nearly at it."""
        served = {
            name: session.version.number
            for name, session in self._sessions.items()
            if session.version is not None and session.version.lineage == current.lineage
        }
        newest = max(served.values(), default=-1)
        self._note_served(newest, now_s)
        able = {
            name: self._sessions[name]
            for name, number in served.items()
            if number >= newest - BEHIND and self._is_live(self._sessions[name]) and not self._rewards.is_paused(name)
        }
        return {name: session for name, session in able.items() if not self._speeds.is_benched(name, now_s)} or able

    def _note_served(self, newest: int, now_s: float) -> None:
        if newest > self._served:
            self._served, self._served_s = newest, now_s

    def _is_live(self, session: Session) -> bool:
        """Return True if its last message is recent and it may get leases."""
        return self._caught_up_s - session.heard_s <= liveness.QUIET_S and session.peer not in self._steer.leaving

    def _share(self, now_s: float) -> float:
        """Return the most leases that a generator may hold, whatever its window: the slots of ready groups are no one's."""
        if now_s - self._served_s > EVENLY_S:
            return math.inf
        num_live = sum(self._is_live(session) for session in self._sessions.values())
        num_held = self._buffer.num_slots - self._buffer.count(State.READY)
        return max(1, -(-num_held // max(num_live, 1)))

    def _lease_failed(self, message: LeaseFailed, now_s: float) -> None:
        self._buffer.count_aborted(message.tokens)
        name, reason = message.generator_id, message.reason
        if reason == "cancelled":  # by the buffer
            return
        if reason == REWARDS_PAUSED:
            self._buffer.give_back(message.lease_id)
            self._evaluations.give_back(message.lease_id)
            return
        log.warning("lease %s failed at %s: %s %s", message.lease_id, name, reason, message.detail)
        self._emit_failure(name, reason, message.detail[:500])
        is_late = reason == "lease_timeout"
        if is_late and name in self._sessions:
            self._speeds.note(name, is_late=True)
        self._fail(message.lease_id, "lease_timeout" if is_late else "failed", now_s, eval_reason=reason)

    def _fail(self, lease_id: str, reason: str, now_s: float, *, eval_reason: str = "failed") -> None:
        """Fail a lease of training or evaluation."""
        self._buffer.fail(lease_id, reason)
        self._evaluations.fail(lease_id, eval_reason, now_s)

    def _expire_leases(self, now_s: float) -> None:
        is_paused = self._rewards.is_paused
        late = self._evaluations.expire(now_s, is_paused)
        expired = self._buffer.expire(now_s, is_paused)
        for entry in expired:
            if entry.holder in self._sessions and not is_paused(entry.holder):
                self._speeds.note(entry.holder, is_late=True)
        for lease, holder in [*((entry.lease, entry.holder) for entry in expired), *late]:
            self._may_take = True
            log.warning("lease %s expired", lease.lease_id)
            reason = REWARDS_PAUSED if is_paused(holder) else "lease_timeout"
            if reason == "lease_timeout":
                self._emit_failure(holder, reason, f"prompt {lease.prompt.prompt_id} was not completed in time")
            if (session := self._sessions.get(holder)) is not None:
                self._server.send(session.peer, Cancel(lease_ids=(lease.lease_id,), reason=reason))

    def _cancel_late(self) -> None:
        """Send Cancel for the leases that the buffer gave up for their age."""
        late = self._buffer.cancelled()
        lease_ids = defaultdict[str, list[str]](list)  # by holder
        for entry in late:
            lease_ids[entry.holder].append(entry.lease.lease_id)
        for name in filter(self._sessions.__contains__, lease_ids):
            self._server.send(self._sessions[name].peer, Cancel(lease_ids=tuple(lease_ids[name]), reason="stale"))
        if late:
            log.info("cancelled %d leases whose groups would exceed the bound on lag", len(late))

    # -- delivered groups ----------------------------------------------------------------------------------------------

    def _deliver(self, peer: str, message: Deliver, payload: memoryview, head: Frame, now_s: float) -> None:
        if message.lease_id in self._unacknowledged:
            return  # a duplicate of a group that the journal is still writing
        refusal = self._refusal(peer, message, payload, now_s)
        if refusal is None and message.purpose == "eval":
            self._evaluations.accept(message, now_s)
        elif refusal is None:
            refusal = self._buffer.accept(message, payload, now_s, head)
        if refusal is not None:
            self._server.send(peer, Nack(lease_id=message.lease_id, reason=refusal))
            return
        if (name := self._speaks_for.get(peer)) in self._sessions:
            self._speeds.note(name, is_late=False)
        ack = Ack(lease_id=message.lease_id)
        if message.purpose == "eval" or self._journal.is_durable(self._journal.position):
            self._server.send(peer, ack)
        else:
            self._unacknowledged[message.lease_id] = self._journal.position, peer, ack

    def _refusal(self, peer: str, message: Deliver, payload: memoryview, now_s: float) -> str | None:
        """Check a group; return the reason if it is malformed or does not match its lease. Its lease fails then."""
        try:
            check_group(message, payload, self._vocabulary)
            owner = self._evaluations if message.purpose == "eval" else self._buffer
            lease = owner.lease_of(message.lease_id)
            if lease is not None:
                check_lease(message, lease, self._buffer.version)
        except RefusedError as error:
            self._count_refusal(peer, error)
            self._fail(message.lease_id, "failed", now_s)
            return error.reason
        return None

    def _acknowledge(self) -> None:
        """Acknowledge the groups that the journal has made durable."""
        while self._unacknowledged:
            lease_id, (position, peer, ack) = next(iter(self._unacknowledged.items()))
            if not self._journal.is_durable(position):
                return
            del self._unacknowledged[lease_id]
            self._server.send(peer, ack)

    # -- the learner ---------------------------------------------------------------------------------------------------

    def _trained(self, version: PolicyVersion | None) -> None:
        """Record that the learner has made a version. Two kinds of messages carry it, so that losing one is harmless."""
        if version is not None and (self._buffer.version is None or version > self._buffer.version):
            self._buffer.trained(version)
            self._replied = None

    def _reply_to_take(self, now_s: float) -> None:
        """Send the learner its batch, or NoMore. Until then, send Waiting once a second."""
        if self._learner is None or (self._take is None and not self._last_evals):
            return
        why: Literal["exhausted", "draining", "failing"] | None = None
        if self._last_evals and not self._evaluations.in_flight:
            why = "exhausted"
        elif self._drain_reason:
            why = "failing" if self._is_failing else "draining"
        elif self._take is not None:
            is_blocked = self._journal.is_blocked is not None
            if self._batch is None and self._may_take and not is_blocked and not self._steer.is_paused:
                self._may_take = False
                self._batch = self._buffer.take(self._take.version, now_s)
            if self._batch is not None and self._journal.is_blocked is None:  # its manifest is written
                self._reply(self._make_batch(self._take, self._batch, now_s), self._batch)
                return
            if self._buffer.exhausted and not self._evaluations.in_flight:
                why = "exhausted"
        if why is not None:
            version, evals = _version_of(self._take), self._evaluations.take_finished()
            self._reply(NoMore(why=why, version=version, counters=counters(self._buffer), evals=evals), ())
        elif now_s - self._waiting_sent_s >= liveness.WAITING_EVERY_S:
            self._waiting_sent_s = now_s
            what, hopeless = self._describe_wait(now_s), self._rewards.fatal_reason
            message = Waiting(
                what=what, evals=self._evaluations.finished, hopeless=hopeless, is_paused=self._steer.is_paused
            )
            self._server.send(self._learner, message)

    def _make_batch(self, take: Take, entries: list[GroupEntry], now_s: float) -> Batch:
        figures = batch_figures(self._buffer, entries, take.version.number, now_s) | self._load.since_batch()
        self._filtered_before = self._buffer.filtered.total()
        return Batch(
            version=take.version,
            groups=tuple(e.message for e in entries if e.message is not None),
            payload_sizes=tuple(len(e.payload) for e in entries),
            counters=counters(self._buffer) | {OF_ONE_BATCH + name: float(figure) for name, figure in figures.items()},
            evals=self._evaluations.take_finished(),
        )

    def _reply(self, message: Batch | NoMore, entries: Sequence[GroupEntry]) -> None:
        """Reply to the request of the learner, and keep the reply in case it is lost."""
        assert self._learner is not None
        self._replied = message, entries
        self._take, self._batch, self._last_evals = None, None, False
        self._send_reply(self._learner)

    def _send_reply(self, peer: str) -> None:
        assert self._replied is not None
        message, entries = self._replied
        self._server.send(peer, message, b"".join(entry.payload for entry in entries))

    def _send_snapshot(self, now_s: float) -> None:
        """Send a snapshot once the journal is synced: a checkpoint must not contain a step whose manifest may be lost."""
        if self._snapshot_asked is None:
            return
        peer, version = self._snapshot_asked
        if self._journal.sync():
            self._snapshot_asked, self._snapshot = None, self._buffer.prompts.state()
            reply = Snapshot(
                state=msgspec.to_builtins(self._snapshot),
                draining=bool(self._drain_reason),
                failing=self._is_failing,
                counters=counters(self._buffer),
                trained=version,
            )
            self._server.send(peer, reply)
            self._acknowledge()
        elif now_s - self._waiting_sent_s >= liveness.WAITING_EVERY_S:
            self._waiting_sent_s = now_s
            self._server.send(peer, Waiting(what=f"the journal: {self._journal.is_blocked}", of_snapshot=True))

    def _describe_wait(self, now_s: float) -> str:
        """Return a phrase for messages: what the learner waits for."""
        if (blocked := self._buffer.blocked_by) is not None:
            return blocked
        if (paused := self._rewards.describe_pause()) is not None:
            return paused
        if self._steer.is_paused:
            return "the end of the pause"
        if self._last_evals or self._buffer.exhausted:
            return "the last evaluation"
        ready, leased = self._buffer.count(State.READY), self._buffer.count(State.LEASED)
        text = f"groups: {ready} ready, {leased} in flight"
        oldest = self._buffer.oldest_lease()
        if oldest is not None:
            age_s = now_s - oldest.leased_at_s
            text += f", the oldest for {age_s:.0f} s at {oldest.holder} ({oldest.lease.prompt.prompt_id})"
        elif not self._sessions:
            text += ", no generator is connected"
        if filtered := self._buffer.filtered.total() - self._filtered_before:
            text += f"; {filtered} since the last batch had equal rewards and were replaced"
        return text

    # -- metrics and events --------------------------------------------------------------------------------------------

    def _show_metrics(self, now_s: float) -> None:
        """Set all metrics."""
        buffer = self._buffer
        for name, distance in buffer.bias.distances().items():
            metrics.bias_distance.labels(of=name).set(distance)
        for metric, label, totals in (
            (metrics.groups_total, "outcome", buffer.outcomes),
            (metrics.tokens_total, "fate", buffer.tokens),
            (metrics.completions_discarded_total, "why", buffer.discarded),
        ):
            for value, total in totals.items():
                metric.labels(**{label: value}).inc(total - self._counted.get((label, value), 0))
                self._counted[label, value] = total
        metrics.lease_deadline_seconds.set(buffer.deadlines.seconds(is_last=False))
        metrics.quarantined_prompts.set(len(buffer.quarantine.cases))
        metrics.buffer_tokens.set(buffer.tokens_in_flight)
        for state in State:
            metrics.buffer_groups.labels(state=state.value).set(buffer.count(state))
        metrics.max_lag_steps.set(buffer.max_lag)
        metrics.buffer_slots.set(buffer.num_slots)
        metrics.groups_wanted.set(buffer.wanted)
        oldest = buffer.oldest_lease()
        metrics.buffer_oldest_group_age_seconds.set(now_s - oldest.leased_at_s if oldest else 0.0)
        metrics.epoch.set(buffer.prompts.epoch)
        metrics.prompts_done.set(buffer.prompts.num_done)

    def _emit(self, event: str, **fields: Any) -> None:
        """Queue an event until the learner's first message: until then a resume may be rewriting the file."""
        self._pending_events.append((event, fields))

    def _emit_failure(self, generator: str, reason: str, detail: str) -> None:
        """Emit an event for the 1st, 10th, 100th, ... failed lease of each reason."""
        if (count := self._failures.add(reason)) is not None:
            self._emit("lease_failed", actor=generator, reason=reason, detail=detail, count=count)


def _version_of(request: Take | LastEvals | None) -> PolicyVersion | None:
    """Return the version by which a reply names its request; None: of `LastEvals`."""
    return request.version if isinstance(request, Take) else None


# -- counters ----------------------------------------------------------------------------------------------------------


def counters(buffer: Buffer) -> dict[str, float]:
    """Return the totals of this process: groups by outcome, filtered groups by kind, tokens by fate, discarded completions.

    Tokens in flight, prompts done and the distances of bias are momentary values.
    """
    totals: dict[str, Mapping[str, float]] = {
        "groups": buffer.outcomes,
        "filtered": buffer.filtered,
        "tokens": buffer.tokens,
        "completions": buffer.discarded,
        "bias": buffer.bias.distances(),
    }
    now = {"tokens_in_flight": float(buffer.tokens_in_flight), "prompts_done": float(buffer.prompts.num_done)}
    return {f"{name}_{key}": float(value) for name, counts in totals.items() for key, value in counts.items()} | now


def batch_figures(buffer: Buffer, batch: Sequence[GroupEntry], version: int, now_s: float) -> dict[str, float]:
    """Observe the batch of the step that starts at `version` in this process's metrics, and return its statistics.

    These are the occupancy of the buffer and the waiting time. `under_way` counts leased and ready groups, the batch
    included. `ready_seconds` is absent if all groups come from an earlier start.
    """
    under_way = buffer.count(State.LEASED) + buffer.count(State.READY) + len(batch)
    figures: dict[str, float] = {"max_lag": buffer.max_lag, "slots": buffer.num_slots}
    figures |= {"under_way": under_way, "wanted": buffer.wanted}
    for entry in batch:
        lag = version - entry.oldest.number
        metrics.group_lag_steps.observe(lag)
        metrics.groups_at_bound_total.inc(lag >= entry.max_lag)
    waited = [now_s - entry.ready_at_s for entry in batch if entry.ready_at_s is not None]
    for waited_s in waited:
        metrics.group_ready_seconds.observe(waited_s)
    return figures | ({"ready_seconds": sum(waited) / len(waited)} if waited else {})
