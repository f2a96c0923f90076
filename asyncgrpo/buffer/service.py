"""The buffer's process: one socket, one thread, one loop around the state machines of this folder.

    generators ──Hello, Serving, Deliver, LeaseFailed──▶ ┌────────┐ ◀──Take, Published, RequestEval── learner
               ◀──────────Grant, Ack, Nack, Cancel─────  │ buffer │ ──Batch, Waiting, NoMore────────▶
                                                         └────────┘ ◀──Drain, GeneratorLost────────── driver

It promises that every delivered group is acknowledged or refused by name, that a generator gets a lease only while it
serves the version that was published last (or a newer one), and that whoever waits is told what for.
"""

import logging
import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import Buffer, Entry, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.errors import WireError
from asyncgrpo.types import WeightVersion
from asyncgrpo.wire.codec import check_group, decode
from asyncgrpo.wire.messages import (
    PROTOCOL,
    Ack,
    Batch,
    Cancel,
    Deliver,
    Drain,
    EvalResult,
    Farewell,
    Finished,
    GeneratorLost,
    Grant,
    Hello,
    LastEvals,
    LeaseFailed,
    Message,
    Nack,
    NoMore,
    Published,
    RequestEval,
    SayHello,
    Serving,
    Snapshot,
    Take,
    TakeSnapshot,
    Waiting,
    Welcome,
)
from asyncgrpo.wire.sockets import Server

log = logging.getLogger(__name__)

TICK_S = 0.1
WAITING_EVERY_S = 1.0
SILENT_AFTER_S = 60.0
"""A generator that says nothing for so long is taken for dead. It sends a heartbeat every second."""


@dataclass
class Session:
    """A generator in touch."""

    peer: str
    incarnation: str
    window: int
    heard_s: float
    version: WeightVersion | None = None


class BufferService:
    """Runs a `Buffer` and its `Evaluations` behind a socket until the learner has finished."""

    def __init__(self, server: Server, buffer: Buffer, evaluations: Evaluations) -> None:
        self._server = server
        self._buffer = buffer
        self._evaluations = evaluations
        self._sessions: dict[str, Session] = {}
        self._learner: str | None = None
        self._take: Take | None = None
        self._may_take = False  # something changed since the last time a batch was looked for
        self._told_waiting_s = 0.0
        self._results: list[EvalResult] = []
        self._last_evals = False
        self._drain_reason = ""
        self._finished = False
        self._counted: dict[str, int] = {}

    def run(self) -> None:
        """Serve until `Finished`."""
        ticked_s = 0.0
        while not self._finished:
            received = self._server.receive(TICK_S)
            now_s = time.monotonic()
            if received is not None:
                self._receive(*received, now_s)
                self._may_take = True
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                self._tick(now_s)
            self._answer_take(now_s)
            self._grant(now_s)
        for session in self._sessions.values():
            self._server.send(session.peer, Farewell())

    # -- messages in -------------------------------------------------------------------------------------------------

    def _receive(self, peer: str, frames: object, now_s: float) -> None:
        try:
            message, payload = decode(frames)  # type: ignore[arg-type]
        except WireError as error:
            metrics.rejected_frames_total.labels(reason="checksum" if "digest" in str(error) else "decode").inc()
            log.warning("refused a message of %s: %s", peer, error)
            return
        name = getattr(message, "generator_id", None)
        if name in self._sessions:
            self._sessions[name].heard_s = now_s
        self._handle(peer, message, payload, now_s)

    def _handle(self, peer: str, message: Message, payload: memoryview, now_s: float) -> None:
        match message:
            case Deliver():
                self._deliver(peer, message, payload, now_s)
            case Serving(generator_id=name, version=version):
                if name in self._sessions:
                    self._sessions[name].version = version
                else:  # it was silent for too long and taken for dead
                    self._server.send(peer, SayHello())
            case Hello():
                self._hello(peer, message, now_s)
            case LeaseFailed(lease_id=lease_id, reason=reason):
                log.warning("lease %s failed at %s: %s %s", lease_id, message.generator_id, reason, message.detail)
                self._buffer.fail(lease_id, "failed")
                self._keep(self._evaluations.fail(lease_id, reason, now_s))
            case Take():
                self._learner, self._take, self._told_waiting_s = peer, message, now_s
            case Published(version=version):
                self._buffer.published(version)
            case RequestEval(step=step):
                self._evaluations.request(step, now_s)
            case TakeSnapshot():
                state = msgspec.to_builtins(self._buffer.snapshot())
                self._server.send(peer, Snapshot(state=state, draining=bool(self._drain_reason)))
            case LastEvals():
                self._learner, self._last_evals, self._buffer.draining = peer, True, True
            case Drain(reason=reason):
                log.info("draining: %s", reason)
                self._drain_reason, self._buffer.draining = reason, True
            case GeneratorLost(generator_id=name):
                self._lose(name, "its process ended")
            case Finished():
                self._finished = True
            case _:
                log.warning("%s sent %s, which is not for the buffer", peer, type(message).__name__)

    def _hello(self, peer: str, message: Hello, now_s: float) -> None:
        if message.protocol != PROTOCOL:
            log.error("%s speaks protocol %d, the buffer %d", message.generator_id, message.protocol, PROTOCOL)
        if message.generator_id in self._sessions:
            self._lose(message.generator_id, "it started again")
        self._sessions[message.generator_id] = Session(peer, message.incarnation, message.window, now_s)
        self._server.send(peer, Welcome(protocol=PROTOCOL))

    def _deliver(self, peer: str, message: Deliver, payload: memoryview, now_s: float) -> None:
        refusal: str | None
        try:
            check_group(message, len(payload))
            if message.purpose == "eval":
                refusal = None
                self._keep(self._evaluations.accept(message, now_s))
            else:
                refusal = self._buffer.accept(message, bytes(payload))
        except WireError as error:
            metrics.rejected_frames_total.labels(reason="schema").inc()
            log.warning("refused a group of %s: %s", peer, error)
            self._buffer.fail(message.lease_id, "failed")
            refusal = "schema"
        if refusal is None:
            self._server.send(peer, Ack(group_id=message.group_id, lease_id=message.lease_id))
        else:
            self._server.send(peer, Nack(group_id=message.group_id, lease_id=message.lease_id, reason=refusal))

    def _keep(self, result: EvalResult | None) -> None:
        if result is not None:
            self._results.append(result)

    def _lose(self, name: str, why: str) -> None:
        if self._sessions.pop(name, None) is None:
            return
        released = self._buffer.release(name)
        self._evaluations.release(name)
        log.warning("%s is lost (%s); %d of its leases are free again", name, why, len(released))

    # -- what time brings ----------------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        for name, session in list(self._sessions.items()):
            if now_s - session.heard_s > SILENT_AFTER_S:
                self._lose(name, f"silent for {SILENT_AFTER_S:.0f} s")
        late, results = self._evaluations.expire(now_s)
        self._results += results
        for lease in [*self._buffer.expire(now_s), *late]:
            self._may_take = True
            log.warning("lease %s expired", lease.lease_id)
            for session in self._sessions.values():
                self._server.send(session.peer, Cancel(lease_ids=(lease.lease_id,), reason="lease_timeout"))
        self._observe(now_s)

    def _grant(self, now_s: float) -> None:
        """Hand out leases, one at a time to whoever has the most room, evaluation first."""
        current = self._buffer.version
        if current is None:
            return
        able = {n: s for n, s in self._sessions.items() if s.version is not None and s.version >= current}
        room = {n: s.window - self._buffer.held_by(n) for n, s in able.items()}
        eval_room = {n: s.window - self._evaluations.held_by(n) for n, s in able.items()}
        for lend, free in ((self._evaluations.lease, eval_room), (self._buffer.lease, room)):
            while free and max(free.values()) > 0:
                name = max(free, key=lambda n: (free[n], n))
                lease = lend(name, now_s)
                if lease is None:
                    break
                free[name] -= 1
                self._server.send(able[name].peer, Grant(lease=lease))

    # -- the learner ---------------------------------------------------------------------------------------------------

    def _answer_take(self, now_s: float) -> None:
        """Answer the learner as soon as there is something to say."""
        if self._learner is None:
            return
        if self._last_evals:
            if not self._evaluations.under_way:
                self._say_no_more("exhausted")
            return
        if self._take is None:
            return
        if self._drain_reason:
            self._say_no_more("draining")
            return
        entries = self._buffer.take(self._take.version) if self._may_take else None
        self._may_take = False
        if entries is not None:
            self._send_batch(self._take, entries)
        elif self._buffer.exhausted and not self._evaluations.under_way:
            self._say_no_more("exhausted")
        elif now_s - self._told_waiting_s >= WAITING_EVERY_S:
            self._told_waiting_s = now_s
            self._server.send(self._learner, Waiting(what=self._what_is_awaited(now_s), evals=self._take_results()))

    def _send_batch(self, take: Take, entries: list[Entry]) -> None:
        assert self._learner is not None
        groups = tuple(e.message for e in entries if e.message is not None)
        for entry in entries:
            metrics.group_lag_steps.observe(take.version.version - entry.oldest.version)
        message = Batch(
            step=take.step,
            groups=groups,
            payload_sizes=tuple(len(e.payload) for e in entries),
            counters=self._counters(),
            evals=self._take_results(),
            epoch=self._buffer.epoch,
        )
        self._server.send(self._learner, message, b"".join(e.payload for e in entries))
        self._take = None

    def _say_no_more(self, why: Literal["exhausted", "draining"]) -> None:
        assert self._learner is not None
        self._server.send(self._learner, NoMore(why=why, counters=self._counters(), evals=self._take_results()))
        self._take, self._last_evals = None, False

    def _take_results(self) -> tuple[EvalResult, ...]:
        results, self._results = tuple(self._results), []
        return results

    def _what_is_awaited(self, now_s: float) -> str:
        ready, leased = self._buffer.count(State.READY), self._buffer.count(State.LEASED)
        text = f"groups: {ready} ready, {leased} under way"
        oldest = self._buffer.oldest_lease()
        if oldest is not None:
            age_s = now_s - oldest.leased_at_s
            text += f", the oldest for {age_s:.0f} s at {oldest.holder} ({oldest.prompt.prompt_id})"
        elif not self._sessions:
            text += ", no generator is in touch"
        if self._buffer.exhausted:
            text = "the last evaluation"
        return text

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, float]:
        """Totals of this process: groups by outcome, tokens by fate."""
        groups = {f"groups_{k}": float(v) for k, v in self._buffer.outcomes.items()}
        tokens = {f"tokens_{k}": float(v) for k, v in self._buffer.tokens.items()}
        return groups | tokens | {"prompts_done": float(self._buffer.prompts_done)}

    def _observe(self, now_s: float) -> None:
        for outcome, total in self._buffer.outcomes.items():
            metrics.groups_total.labels(outcome=outcome).inc(total - self._counted.get(outcome, 0))
            self._counted[outcome] = total
        for state in State:
            metrics.buffer_groups.labels(state=state.value).set(self._buffer.count(state))
        oldest = self._buffer.oldest_lease()
        metrics.buffer_oldest_group_age_seconds.set(now_s - oldest.leased_at_s if oldest else 0.0)
        metrics.epoch.set(self._buffer.epoch)
        metrics.prompts_done.set(self._buffer.prompts_done)
