"""From the buffer to every rank: the groups of one step, and how the first rank tells the others what to do.

Every command is a collective that all ranks enter, so rank 0 must give one for whatever the others have to join in.
Frames are those of the wire, so no rank unpickles anything.

While it waits it says what for, every 30 seconds, and gives up with an error after `stall_timeout_s`.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from asyncgrpo import metrics
from asyncgrpo.errors import RewardError, StalledError, WireError
from asyncgrpo.types import Group, PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.groups import unpack_batch
from asyncgrpo.wire.rollouts import (
    Batch,
    EvalResult,
    Finished,
    LastEvals,
    NoMore,
    RequestEval,
    Saved,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
    Waiting,
)
from asyncgrpo.wire.sockets import Client
from asyncgrpo.wire.supervision import Drain

# -- from the first rank to the others ---------------------------------------------------------------------------------


class RankCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do next."""

    what: Literal["step", "snapshot", "check", "save", "export", "set_lr", "wait", "end"]
    version: PolicyVersion | None = None
    folder: str = ""
    lr: float = 0.0
    file: str = ""
    """`snapshot`: of the arenas, empty if the weights are gathered, and the arena's first byte in it."""
    start: int = 0
    header: bytes = b""
    """`step`: the encoded Batch."""
    payload: bytes = b""


class Team:
    """The ranks of one learner. With one rank nothing is sent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._told_s = time.monotonic()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, command: RankCommand) -> None:
        """Rank 0: send a command to all other ranks."""
        if self.world == 1:
            return
        self._told_s = time.monotonic()
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0)
        dist.broadcast(data, src=0)

    def tell_to_wait(self) -> None:
        """Rank 0, while it waits: now and then tell the others that it does, who give up after some minutes of silence."""
        if time.monotonic() - self._told_s > SAY_EVERY_S:
            self.tell(RankCommand(what="wait"))

    def hear(self) -> RankCommand:
        """Other ranks: the next command; waits as long as rank 0 waits."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return msgspec.msgpack.decode(data.numpy().tobytes(), type=RankCommand)


# -- from the buffer ---------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
REPLY_WITHIN_S = 60.0


@dataclass(frozen=True)
class Taken:
    """What one `take` gave."""

    groups: list[Group]
    """Empty exactly when `ended` is given."""
    message: Batch | None
    payload: memoryview
    counters: dict[str, float]
    waited_s: float
    ended: str | None = None
    """`exhausted`, `draining` or `failing`."""


class Inbox:
    """The learner's first rank owns one."""

    def __init__(self, client: Client, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._trained: PolicyVersion | None = None
        self._early: tuple[Message, memoryview] | None = (
            None  # a reply to `take` that came while a snapshot was awaited
        )

    def take(
        self,
        step: int,
        version: PolicyVersion,
        shares_within: dict[int, float],
        *,
        on_eval: Callable[[EvalResult], None],
        while_waiting: Callable[[str, float], None],
    ) -> Taken:
        """The groups of the step that starts at `version`; blocks until there are enough.

        Args:
            shares_within: of the step before (`report.StepReport`); empty before the first one of this start.
            on_eval: called with every evaluation that has ended.
            while_waiting: called about once a second with what is awaited and for how long, seconds.
        Raises:
            StalledError: no group and no evaluation came within `stall_timeout_s`; names what was awaited.
            RewardError: none will come, because no reward call ever worked.
            WireError: the buffer itself is silent.
        """
        self._client.send(Take(step=step, version=version, shares_within=shares_within))
        return self._wait(on_eval, while_waiting)

    def last_evals(self, on_eval: Callable[[EvalResult], None], while_waiting: Callable[[str, float], None]) -> None:
        """Wait for the evaluations under way; no batch is taken any more."""
        self._client.send(LastEvals())
        self._wait(on_eval, while_waiting)

    def trained(self, version: PolicyVersion) -> None:
        """Tell the buffer that the groups taken before `version` are trained: their slots are free."""
        self._trained = version
        self._client.send(Trained(version=version))

    def request_eval(self, step: int) -> None:
        self._client.send(RequestEval(step=step))

    def give_up(self, reason: str) -> None:
        """Nothing is to be leased any more: what follows is the last checkpoint."""
        self._client.send(Drain(reason=reason, is_failure=True))

    def snapshot(self, within_s: float = math.inf) -> Snapshot:
        """The buffer's part of a checkpoint, and whether the run is to end.

        Raises:
            StalledError: the buffer's journal cannot be written for `stall_timeout_s`, or `within_s` if that is less.
            WireError: the buffer itself is silent.
        """
        limit_s = min(within_s, self._stall_timeout_s)
        self._client.send(TakeSnapshot(trained=self._trained))
        started = heard = self._clock()
        while True:
            received = self._client.receive(REPLY_WITHIN_S)
            message = received[0] if received is not None else None
            if isinstance(message, Snapshot):
                return message
            if isinstance(message, Batch | NoMore):
                self._early = received
            if isinstance(message, Waiting) and message.of_snapshot:
                heard = self._clock()
                if heard - started > limit_s:
                    why = " (cluster.stall_timeout_s)" if limit_s == self._stall_timeout_s else ""
                    raise StalledError(f"no checkpoint for {limit_s:.0f} s{why}: waited for {message.what}")
            if received is None or self._clock() - heard > REPLY_WITHIN_S:  # it may go on to reply to `take`
                raise WireError(f"the buffer has said nothing of a snapshot for {REPLY_WITHIN_S:.0f} s")

    def saved(self, step: int) -> None:
        """Tell the buffer that the checkpoint of `step` is on the disk."""
        self._client.send(Saved(step=step))

    def finish(self) -> None:
        """Tell the buffer that the run is over."""
        self._client.send(Finished())
        self._client.close()

    def _wait(self, on_eval: Callable[[EvalResult], None], while_waiting: Callable[[str, float], None]) -> Taken:
        started = heard = came = said = self._clock()
        what = "the buffer's completion"
        with metrics.waiting("batch"):
            while True:
                received, self._early = self._early or self._client.receive(0.5), None
                now = self._clock()
                if received is not None:
                    heard = now
                    message, payload = received
                    for result in getattr(message, "evals", ()):
                        on_eval(result)
                        came = now
                    if isinstance(message, Batch):
                        groups = unpack_batch(message, payload)
                        return Taken(groups, message, payload, message.counters, now - started)
                    if isinstance(message, NoMore):
                        return Taken([], None, memoryview(b""), message.counters, now - started, message.why)
                    if isinstance(message, Waiting):
                        what = message.what
                        came = now if message.is_paused else came
                        while_waiting(what, now - started)
                        if message.hopeless:
                            raise RewardError(message.hopeless)
                if now - said >= SAY_EVERY_S:
                    said = now
                    log.warning("waiting for %s, %.0f s so far", what, now - started)
                if now - heard > REPLY_WITHIN_S:
                    raise WireError(f"the buffer has said nothing for {now - heard:.0f} s")
                if now - came > self._stall_timeout_s:
                    raise StalledError(
                        f"nothing to train for {now - started:.0f} s (cluster.stall_timeout_s): waited for {what}"
                    )
