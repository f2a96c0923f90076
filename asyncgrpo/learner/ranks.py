"""Batches from the buffer to rank 0, and commands from rank 0 to the other ranks.

Rank 0 broadcasts a command before every collective that the other ranks have to join. Frames are those of the wire format,
so no rank unpickles anything. While rank 0 waits for a batch it reports the reason, and raises after `stall_timeout_s`.
"""

import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from asyncgrpo import liveness, metrics
from asyncgrpo.errors import RewardError, StalledError, WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
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
    """The next operation of all ranks."""

    what: Literal["step", "snapshot", "check", "save", "export", "set_lr", "wait", "end"]
    version: PolicyVersion | None = None
    folder: str = ""
    lr: float = 0.0
    file: str = ""
    """`snapshot`: file of the arenas of rank 0."""
    slot: int = 0
    """`snapshot`: number of the arena in that file."""
    header: bytes = b""
    """`step`: the encoded Batch. Its payload follows the command."""


class Team:
    """The ranks of one learner. With one rank no message is sent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._sent_s = time.monotonic()

    def broadcast(self, command: RankCommand, payload: bytes | memoryview = b"") -> None:
        """Send a command, and the payload of its batch as it is, from rank 0 to all other ranks."""
        if self.world == 1:
            return
        self._sent_s = time.monotonic()
        parts = [bytearray(msgspec.msgpack.encode(command)), payload]
        dist.broadcast(torch.tensor([len(part) for part in parts]), src=0)
        for part in filter(len, parts):
            dist.broadcast(torch.frombuffer(part, dtype=torch.uint8), src=0)

    def train(self, version: PolicyVersion, batch: Batch, payload: memoryview) -> None:
        """Have all other ranks train a batch under `version`."""
        if self.world > 1:
            header = bytes(encode(batch, payload)[0])
            self.broadcast(RankCommand(what="step", version=version, header=header), payload)

    def send_heartbeat(self) -> None:
        """Send `wait` if rank 0 sent no command for some time. Without commands the other ranks time out within minutes."""
        if time.monotonic() - self._sent_s > liveness.RANK_HEARTBEAT_S:
            self.broadcast(RankCommand(what="wait"))

    def receive(self) -> tuple[RankCommand, memoryview]:
        """Return the next command of rank 0, and its payload. Blocks."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(sizes, src=0)
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        for part in filter(len, parts):
            dist.broadcast(part, src=0)
        command, payload = (part.numpy().data for part in parts)
        return msgspec.msgpack.decode(command, type=RankCommand), payload


# -- from the buffer ---------------------------------------------------------------------------------------------------


class Inbox:
    """Rank 0's connection to the buffer."""

    def __init__(self, client: Client, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._trained: PolicyVersion | None = None
        self._evaluate: int | None = None
        """Step of the last evaluation that was requested."""
        self._evaluated: set[int] = set()
        """Steps whose evaluation arrived with the last reply or since: a message may repeat those."""
        self._early: tuple[Message, memoryview] | None = None
        """A reply to `take` that arrived before a pending snapshot."""
        self.on_eval: Callable[[EvalResult], object] = lambda result: None
        """Called with every complete evaluation."""
        self.while_waiting: Callable[[str, float], object] = lambda what, seconds: None
        """Called about once a second with the missing item and the time waited so far, seconds."""

    def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> tuple[Batch | NoMore, memoryview]:
        """Return the batch of the step that starts at `version`, with its payload. Blocks until enough groups are ready.

        Args:
            shares_within: `StepReport.shares_within` of the previous step; empty before the first step of this start.
        Raises:
            StalledError: no group and no evaluation arrived within `stall_timeout_s`; names the missing item.
            RewardError: every reward call failed, so no group can arrive.
            WireError: the buffer does not respond.
        """
        return self._request(Take(version=version, shares_within=shares_within, evaluate=self._evaluate))

    def last_evals(self) -> str:
        """Wait for the pending evaluations, or until the run is to stop. No batch is taken afterwards.

        Returns:
            The reason of `NoMore`.
        """
        ended = self._request(LastEvals(evaluate=self._evaluate))[0]
        assert isinstance(ended, NoMore)
        return ended.why

    def trained(self, version: PolicyVersion) -> None:
        """Report to the buffer that all groups taken before `version` are trained, which frees their slots."""
        self._trained = version
        self._client.send(Trained(version=version))

    def request_eval(self, step: int) -> None:
        """Request an evaluation of this step, once. Later requests of batches name it, too, in case it is lost."""
        if self._evaluate != step:
            self._evaluate = step
            self._client.send(RequestEval(step=step))

    def give_up(self, reason: str) -> None:
        """Stop the buffer from granting leases before the last checkpoint of a failed run."""
        self._client.send(Drain(reason=reason, is_failure=True))

    def snapshot(
        self, within_s: float = math.inf, while_waiting: Callable[[str, float], object] = lambda what, seconds: None
    ) -> Snapshot:
        """Return the buffer's part of a checkpoint and its drain state.

        Args:
            while_waiting: called about once a second while the journal cannot be written, as `self.while_waiting`.
        Raises:
            StalledError: the journal could not be written for `stall_timeout_s`, or `within_s` if that is less.
            WireError: the buffer does not respond.
        """
        limit_s, request = min(within_s, self._stall_timeout_s), TakeSnapshot(trained=self._trained)
        self._client.send(request)
        started = heard = asked = self._clock()
        while True:
            received = self._client.receive(0.5)
            message, now = received[0] if received is not None else None, self._clock()
            if isinstance(message, Snapshot) and message.trained == request.trained:
                return message
            if isinstance(message, Batch | NoMore):
                self._early = received
            if isinstance(message, Waiting) and message.of_snapshot:
                heard = now
                while_waiting(message.what, now - started)
                if now - started > limit_s:
                    why = " (cluster.stall_timeout_s)" if limit_s == self._stall_timeout_s else ""
                    raise StalledError(f"no checkpoint for {limit_s:.0f} s{why}: waited for {message.what}")
            if now - max(heard, asked) >= liveness.RESEND_AFTER_S:  # it may still reply to `take`
                asked = now
                self._client.send(request)
            if now - heard > liveness.BUFFER_TIMEOUT_S:
                raise WireError(f"the buffer did not reply to a snapshot request for {liveness.BUFFER_TIMEOUT_S:.0f} s")

    def saved(self, step: int) -> None:
        """Report to the buffer that the checkpoint of `step` is on disk."""
        self._client.send(Saved(step=step))

    def finish(self) -> None:
        """Report the end of the run to the buffer and disconnect."""
        self._client.send(Finished())
        self._client.close()

    def _request(self, request: Take | LastEvals) -> tuple[Batch | NoMore, memoryview]:
        """Send a request and wait for its reply. While the buffer is silent, one of them may be lost, so it is sent again."""
        self._client.send(request)
        started = heard = progressed = asked = self._clock()
        what = "the reply of the buffer"
        with metrics.waiting("batch"):
            while True:
                received, self._early = self._early or self._client.receive(0.5), None
                now = self._clock()
                if received is not None:
                    heard = now
                    message, payload = received
                    if isinstance(message, Batch | NoMore) and message.version != getattr(request, "version", None):
                        continue  # an earlier reply that was repeated, but not lost
                    for result in getattr(message, "evals", ()):
                        if result.step not in self._evaluated:
                            self._evaluated.add(result.step)
                            self.on_eval(result)
                            progressed = now
                    if isinstance(message, Batch | NoMore):
                        self._evaluated = {result.step for result in message.evals}
                        return message, payload
                    if isinstance(message, Waiting):
                        what = message.what
                        progressed = now if message.is_paused else progressed
                        self.while_waiting(what, now - started)
                        if message.hopeless:
                            raise RewardError(message.hopeless)
                if now - max(heard, asked) >= liveness.RESEND_AFTER_S:
                    asked = now
                    self._client.send(request)
                if now - heard > liveness.BUFFER_TIMEOUT_S:
                    raise WireError(f"the buffer did not respond for {now - heard:.0f} s")
                if now - progressed > self._stall_timeout_s:
                    raise StalledError(
                        f"nothing to train for {now - started:.0f} s (cluster.stall_timeout_s): waited for {what}"
                    )
