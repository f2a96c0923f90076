"""The generator's process: one event loop and one engine that sample groups for leases while weights are swapped.

    buffer ──Grant──▶ [rollout] ──Deliver──▶ buffer          each lease is a task, so groups leave
                         │ engine                            as they complete, in any order
    learner ═weights═▶ [receiver thread] ──load_weights──▶ engine

A delivered group is kept until the buffer acknowledges it, and resent after a timeout. A failure of the engine or of a swap
ends the process; the driver starts another, and the buffer grants its leases again. After a restart of buffer and learner
the engine stays: its requests are dropped, and it works for the new ones (`move`).
"""

import asyncio
import concurrent.futures
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from asyncgrpo import liveness, metrics
from asyncgrpo.engines.base import Engine, EngineOccupancy
from asyncgrpo.errors import EngineError, RequestError, WeightsError, WireError
from asyncgrpo.generators.rollout import Activities, Decode, GivenUp, GroupInFlight, Played, TooFewCompletions
from asyncgrpo.host import CoreClock
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.rewards.base import IN_ENVIRONMENT
from asyncgrpo.rewards.breaker import Breaker, RewardsPaused
from asyncgrpo.types import Group, Lease, PolicyVersion
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import pack_group
from asyncgrpo.wire.rollouts import (
    REWARDS_PAUSED,
    SCORED_AT_ONCE_S,
    Ack,
    AwaitsScores,
    Cancel,
    Deliver,
    Grant,
    LeaseFailed,
    Nack,
    Register,
    Reregister,
    RewardFailed,
    Serving,
    Shutdown,
)
from asyncgrpo.wire.sockets import AsyncClient, Keys

if TYPE_CHECKING:
    from asyncgrpo.generators.turns import Sampler

log = logging.getLogger(__name__)

SCORE_WITHIN_S = 5.0
"""Deadline of the engine for scoring the check sequences. A newer version waits for it."""
FIRST_SCORE_WITHIN_S = 110.0
"""Deadline of the first scoring, in which the engine may compile kernels."""
SHUTDOWN_S = 5.0
"""Time that the end of a run waits for a swap in flight."""
MAX_FAILED_LEASES = 5
"""Consecutive leases whose requests failed before the process ends. Then the engine is the cause, not the prompts."""
UNPUBLISHED = PolicyVersion(0, 0)
"""Version of an engine before its first publication: the weights of the model's folder. Lineages count from 1."""


@dataclass
class Unacknowledged:
    """A delivered group that awaits its acknowledgement."""

    message: Deliver
    payload: bytes
    sent_s: float


@dataclass(frozen=True)
class Work:
    """A lease in progress and its task."""

    group: GroupInFlight
    task: asyncio.Task[None]


@dataclass(eq=False)
class GeneratorService:
    """Runs one engine until the buffer sends `Shutdown`."""

    generator_id: str
    incarnation: str
    engine: Engine
    reward: Breaker
    decode: Decode
    _: KW_ONLY
    window: int
    """Training groups in progress at once."""
    keep_kv: bool
    load_timeout_s: float
    stuck_after_s: float
    """Deadline of the engine for replying to a probe."""
    buffer_endpoint: str
    weights_endpoint: str
    """Of the core, as `buffer_endpoint`; empty if unknown until `move` is called."""
    host: str
    keys: Keys | None
    turns: "Sampler | None" = None
    """Samples completions of several turns; None: a completion is one turn."""
    cores: CoreClock | None = None
    """Of this machine; None: cores are not counted."""

    def __post_init__(self) -> None:
        self._num_failed = 0  # consecutive leases whose requests failed
        self._version: PolicyVersion | None = None
        self._has_scored = False
        self._working: dict[str, Work] = {}
        self._unacknowledged: dict[str, Unacknowledged] = {}
        self._wake: Callable[[], object] = lambda: None  # until the loop runs
        self._is_over = False
        self._leave_buffer = asyncio.Event()
        self.progress = LoopProgress()
        self._token_time = TokenTime()

    async def run(self) -> None:
        """Serve until `Shutdown`. Raises the failure of the engine or of a swap."""
        self._loop = asyncio.get_running_loop()
        self._wake = lambda: self._loop.call_soon_threadsafe(self._leave_buffer.set)
        try:
            with metrics.waiting("engine"):
                await self.engine.start(UNPUBLISHED)
            self._activities = Activities(self._loop.time, self.cores)
            while not self._is_over:
                while not self.buffer_endpoint:  # generators start in parallel with the core
                    await self._leave_buffer.wait()
                    self._leave_buffer.clear()
                await self._serve()
        finally:
            await self.reward.close()
            if self.turns is not None:
                await self.turns.close()
            await self.engine.close()

    def move(self, buffer_endpoint: str, weights_endpoint: str) -> None:
        """Switch to this buffer and this learner. Safe to call from any thread, at any time."""
        if buffer_endpoint == self.buffer_endpoint:
            return
        if self.buffer_endpoint:
            log.warning("buffer and learner restarted: moving to %s", buffer_endpoint)
        self.weights_endpoint = weights_endpoint
        self.buffer_endpoint = buffer_endpoint  # last, because the loop watches it
        self._wake()

    async def _serve(self) -> None:
        """Work for one buffer and one learner until the run ends or they restart."""
        endpoint = self.buffer_endpoint
        self._client = self._connect()
        receiver = self._receiver()
        receiver.start()
        await self._register()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                background = [
                    self._tasks.create_task(self._listen(), name="listen"),
                    self._tasks.create_task(self._send_heartbeats(receiver), name="heartbeat"),
                    self._tasks.create_task(self._probe(), name="probe"),
                    self._tasks.create_task(self._report_rewards(), name="rewards"),
                ]
                while not self._is_over and self.buffer_endpoint == endpoint:  # a wake-up may be stale
                    await self._leave_buffer.wait()
                    self._leave_buffer.clear()
                for task in [*background, *(work.task for work in self._working.values())]:
                    task.cancel()
        finally:
            await self._stop(receiver)
            self._client.close()
            self._working.clear()
            self._unacknowledged.clear()

    async def _stop(self, receiver: Receiver) -> None:
        """Stop the receiver's thread without blocking the loop: a swap in flight needs it.

        Raises:
            WeightsError: the thread is stuck. Beside the next receiver it could load older weights over newer ones.
        """
        receiver.stop()
        deadline = self._loop.time() + (SHUTDOWN_S if self._is_over else self.load_timeout_s)
        while receiver.is_alive and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        if receiver.is_alive and not self._is_over:
            raise WeightsError(f"{self.generator_id}: the weight receiver did not stop")

    def _connect(self) -> AsyncClient:
        return AsyncClient(self.buffer_endpoint, f"{self.generator_id}-{self.incarnation}", self.keys)

    def _receiver(self) -> Receiver:
        return Receiver(
            self.weights_endpoint,
            generator_id=self.generator_id,
            incarnation=self.incarnation,
            host=self.host,
            apply=self._apply_weights,
            score=self._score,
            keys=self.keys,
        )

    # -- the buffer ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            try:
                message, _ = await self._client.receive()
            except WireError as error:
                log.warning("refused a message from the buffer: %s", error)
                continue
            await self._handle(message)

    async def _handle(self, message: Message) -> None:
        match message:
            case Grant(lease=lease):
                # A buffer that lost touch with this generator frees its leases and may grant the same ones again.
                if lease.lease_id not in self._working and lease.lease_id not in self._unacknowledged:
                    reward, engine = self.reward, self.engine
                    sampler = engine if self.turns is None else self.turns.of(lease.prompt, self._activities)
                    group = GroupInFlight(lease, sampler, reward, self.decode, reward.works, self._activities)
                    task = self._tasks.create_task(self._work(lease, group), name=lease.lease_id)
                    self._working[lease.lease_id] = Work(group, task)
                    metrics.groups_in_flight.set(len(self._working))
            case Ack(lease_id=lease_id):
                self._unacknowledged.pop(lease_id, None)
            case Nack(lease_id=lease_id, reason=reason):
                log.warning("the buffer refused the group of lease %s: %s", lease_id, reason)
                self._unacknowledged.pop(lease_id, None)
            case Cancel(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    if lease_id in self._working:
                        self._working[lease_id].group.give_up()
            case Shutdown():
                self._is_over = True
                self._leave_buffer.set()
            case Reregister():
                log.warning("the buffer dropped this generator: registering again")
                await self._register()

    async def _work(self, lease: Lease, group_in_flight: GroupInFlight) -> None:
        """Generate the group of one lease and deliver it, or report the failure."""
        notifying = self._tasks.create_task(self._notify_when_sampled(lease, group_in_flight))
        try:
            group = await group_in_flight.generate(self.generator_id)
            message, payload = pack_group(group)
            self._unacknowledged[lease.lease_id] = Unacknowledged(message, payload, self._loop.time())
            await self._client.send(message, payload)
        except RequestError as error:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_LEASES:
                raise EngineError(f"the requests of {self._num_failed} consecutive leases failed: {error}") from error
            await self._return(lease, "failed", error, group_in_flight.num_tokens)
        except EngineError:
            raise
        except GivenUp as error:
            await self._return(lease, "cancelled", error, group_in_flight.num_tokens)
        except RewardsPaused as error:
            await self._return(lease, REWARDS_PAUSED, error, group_in_flight.num_tokens)
        except TooFewCompletions as error:
            reason = REWARDS_PAUSED if self.reward.is_paused else "lease_timeout"
            await self._return(lease, reason, error, group_in_flight.num_tokens)
        except Exception as error:  # such as a group that is too large for a message
            self._unacknowledged.pop(lease.lease_id, None)
            log.exception("lease %s failed", lease.lease_id)
            await self._return(lease, "failed", error, group_in_flight.num_tokens)
        else:
            self._num_failed = 0
            observe_group(group)
            self._note_play(lease, group)
        finally:
            notifying.cancel()
            self._working.pop(lease.lease_id, None)
            metrics.groups_in_flight.set(len(self._working))

    def _note_play(self, lease: Lease, group: Group) -> None:
        """Report to the breaker what the environment or agent made of a group.

        One that failed is evidence only if all older groups are done: failures are fast, and what works may take minutes.
        """
        given = [one.completion.score for one in group.rollouts if isinstance(one.completion, Played)]
        scores = [score for score in given if score is not None]
        is_oldest = next(iter(self._working), None) == lease.lease_id
        self.reward.played(scores, is_call=is_oldest and len(scores) == len(group.rollouts))

    async def _notify_when_sampled(self, lease: Lease, group_in_flight: GroupInFlight) -> None:
        await group_in_flight.is_sampled.wait()
        await asyncio.sleep(SCORED_AT_ONCE_S)
        await self._client.send(AwaitsScores(generator_id=self.generator_id, lease_id=lease.lease_id))

    async def _return(self, lease: Lease, reason: str, error: Exception, num_tokens: int) -> None:
        level = logging.INFO if reason in ("cancelled", REWARDS_PAUSED) else logging.WARNING
        log.log(level, "returned lease %s of prompt %s: %s", lease.lease_id, lease.prompt.prompt_id, error)
        metrics.tokens_generated_total.inc(num_tokens)
        message = LeaseFailed(
            generator_id=self.generator_id,
            lease_id=lease.lease_id,
            reason=reason,
            detail=f"{type(error).__name__}: {error}"[:300],
            tokens=num_tokens if lease.purpose == "train" else 0,
        )
        await self._client.send(message)

    async def _send_heartbeats(self, receiver: Receiver) -> None:
        """Send heartbeats, resend unacknowledged groups, and check the receiver's thread."""
        while True:
            started = self._loop.time()
            self.progress.tick()
            await asyncio.sleep(liveness.HEARTBEAT_S)
            if receiver.failure is not None:
                raise WeightsError(f"{self.generator_id} cannot receive weights") from receiver.failure
            use = self.engine.occupancy()
            observe_engine(use)
            token_s = self._token_time.poll(use)
            await self._send_serving(None if self._activities.is_active("weights") else token_s, use.running)
            for held in list(self._unacknowledged.values()):
                if started - held.sent_s > liveness.RESEND_AFTER_S:
                    log.warning("group of lease %s was not acknowledged: resending it", held.message.lease_id)
                    held.sent_s = self._loop.time()
                    await self._client.send(held.message, held.payload)

    async def _report_rewards(self) -> None:
        """Report at once when rewards pause or resume, and when a new kind of failure appears."""
        while True:
            await self.reward.changed.wait()
            self.reward.changed.clear()
            for news in self.reward.news():
                message = RewardFailed(
                    generator_id=self.generator_id, failure=news.kind[:256], detail=news.detail, count=news.count
                )
                await self._client.send(message)
            await self._send_serving()

    async def _probe(self) -> None:
        """Probe the engine periodically. Raises EngineError if it does not reply; a swap has a deadline of its own."""
        while True:
            await asyncio.sleep(liveness.PROBE_EVERY_S)
            try:
                async with asyncio.timeout(self.stuck_after_s):
                    await self.engine.probe()
            except TimeoutError as error:
                if not self._activities.is_active("weights"):
                    raise EngineError(f"the engine has not replied for {self.stuck_after_s:.0f} s") from error

    async def _register(self) -> None:
        await self._client.send(
            Register(generator_id=self.generator_id, incarnation=self.incarnation, window=self.window)
        )
        await self._send_serving()

    async def _send_serving(self, token_s: float | None = None, running: int = 0) -> None:
        """Send a `Serving`. Only heartbeats carry the time of a token: the buffer counts consecutive slow ones."""
        message = Serving(
            generator_id=self.generator_id,
            version=self._version,
            rewards=self.reward.health,
            seconds=self._activities.seconds(),
            token_s=token_s,
            running=running,
            leases=(*self._working, *self._unacknowledged),
        )
        await self._client.send(message)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _apply_weights(self, tensors: SharedTensors, version: PolicyVersion) -> Checksum:
        """Swap weights on the event loop and wait for the result. Called by the receiver's thread."""
        future = asyncio.run_coroutine_threadsafe(self._swap(tensors, version), self._loop)
        within_s = self.load_timeout_s + liveness.copy_s(sum(tensor.nbytes for _, tensor in tensors))
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError as error:
            raise EngineError(f"the engine did not load {version} within {within_s:.0f} s") from error

    def _score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """Score sequences under the present weights. Called by the receiver's thread, between two swaps."""
        within_s = SCORE_WITHIN_S if self._has_scored else FIRST_SCORE_WITHIN_S
        scores = asyncio.run_coroutine_threadsafe(self.engine.score(sequences, start), self._loop).result(within_s)
        self._has_scored = True
        return scores

    async def _swap(self, tensors: SharedTensors, version: PolicyVersion) -> Checksum:
        with self._activities.during("weights"):
            await self.engine.load_weights(tensors, version, keep_kv=self.keep_kv)
            checksum = await self.engine.checksum()
        self._token_time.reset(self.engine.occupancy())
        self._version = version
        metrics.generator_policy_version.set(version.number)
        await self._send_serving()
        return checksum


class TokenTime:
    """Measures the time of a token of a running completion, from the engine's steps between two polls.

    A step in progress is a lower bound, so a generator that slows down shows before its next token. Steps before the start,
    an idle period or a swap do not count: the time is known again after the next step.
    """

    def __init__(self) -> None:
        self._steps = self._step_s = math.inf
        self._mean_s: float | None = None

    def poll(self, use: EngineOccupancy) -> float | None:
        """Return the time of a token, seconds; None: nothing runs, or it is unknown."""
        steps, step_s = use.steps - self._steps, use.step_s - self._step_s
        self._steps, self._step_s = use.steps, use.step_s
        if steps > 0:
            self._mean_s = step_s / steps
        if not use.running:
            self._mean_s = None
        return None if self._mean_s is None else max(self._mean_s, use.present_s)

    def reset(self, use: EngineOccupancy) -> None:
        """Ignore the steps so far."""
        self._steps, self._step_s, self._mean_s = use.steps, use.step_s, None


def observe_engine(use: EngineOccupancy) -> None:
    """Set the engine's occupancy in this process's metrics."""
    metrics.engine_completions.labels(state="running").set(use.running)
    metrics.engine_completions.labels(state="waiting").set(use.waiting)
    metrics.engine_places.set(use.places)
    metrics.kv_use_ratio.set(use.kv)


def observe_group(group: Group) -> None:
    """Count a group's completions in this process's metrics."""
    metrics.tokens_generated_total.inc(group.num_tokens + group.discarded.tokens)
    metrics.generate_seconds.observe(group.timings["generate"])
    for rollout in group.rollouts:
        metrics.completions_total.labels(finish_reason=rollout.completion.finish_reason).inc()
        metrics.completion_length_tokens.observe(len(rollout.completion.token_ids))
        metrics.reward_seconds.observe(rollout.score.seconds)
        metrics.reward_wait_seconds.observe(rollout.score.waited)
        # Failures of the reward are counted where it is called.
        if (failure := rollout.score.failure) in ("aborted", IN_ENVIRONMENT):
            metrics.reward_failures_total.labels(failure=failure).inc()
