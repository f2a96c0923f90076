"""The generator's process: it takes leases, delivers groups, and changes weights while it samples. One loop, one engine.

    buffer ──Grant──▶ [rollout] ──Deliver──▶ buffer          each lease is a task of its own, so groups
                         │ engine                            leave as they complete, in any order
    learner ═weights═▶ [receiver thread] ──load_weights──▶ engine

A delivered group is kept until the buffer acknowledges it, and sent again if that takes long. A failure of the engine or
of a weight change ends the process; the driver starts another, and the buffer leases its groups again. When buffer and
learner were started again, the engine stays: its requests are dropped, and it works for the new ones (`move`).
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from asyncgrpo import metrics
from asyncgrpo.cores import CoreClock
from asyncgrpo.engines.base import Engine, EngineOccupancy
from asyncgrpo.errors import EngineError, RequestError, WeightsError, WireError
from asyncgrpo.generators.activities import Activities, TokenTime
from asyncgrpo.generators.rollout import Decode, GivenUp, GroupInFlight, TooFewCompletions
from asyncgrpo.generators.turns import FAILURE, Sampler
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.rewards.breaker import Breaker, RewardsPaused
from asyncgrpo.types import Group, Lease, PolicyVersion
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.groups import pack_group
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
    Welcome,
)
from asyncgrpo.wire.sockets import AsyncClient, Keys

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
RESEND_AFTER_S = 15.0
PROBE_EVERY_S = 5.0
SCORE_WITHIN_S = 5.0
"""For an engine to score the check sequences; a newer version waits for it."""
FIRST_SCORE_WITHIN_S = 110.0
"""For its first ones, before which it may compile kernels."""
SHUTDOWN_S = 5.0
"""How long the end of a run waits for a change of weights that is in flight."""
MAX_FAILED_LEASES = 5
"""After this many leases in a row whose requests failed, with no group delivered between them, the process ends: the
engine is the cause, not the prompts."""
UNPUBLISHED = PolicyVersion(0, 0)
"""The version of an engine before its first publication: it holds the model's folder. Lineages count from 1."""


@dataclass
class Unacknowledged:
    """A delivered group that the buffer has not acknowledged."""

    message: Deliver
    payload: bytes
    sent_s: float


@dataclass(frozen=True)
class Work:
    """A lease that is worked on, and its task."""

    group: GroupInFlight
    task: asyncio.Task[None]


class GeneratorService:
    """Runs one engine until the buffer sends `Shutdown`."""

    def __init__(
        self,
        generator_id: str,
        incarnation: str,
        engine: Engine,
        reward: Breaker,
        decode: Decode,
        *,
        window: int,
        keep_kv: bool,
        load_timeout_s: float,
        stuck_after_s: float,
        buffer_endpoint: str,
        weights_endpoint: str,
        host: str,
        keys: Keys | None,
        turns: Sampler | None = None,
        cores: CoreClock | None = None,
    ) -> None:
        """
        Args:
            buffer_endpoint, weights_endpoint: of the core; empty while they are not known, and then `move` brings them.
            window: training groups to work on at once.
            stuck_after_s: an engine that replies to no probe for so long is given up.
            turns: samples completions in an environment; None: a completion is one turn.
            cores: of this machine; None: cores are not counted.
        """
        self._id, self._incarnation = generator_id, incarnation
        self._engine, self._reward, self._decode = engine, reward, decode
        self._window, self._turns = window, turns
        self._cores = cores
        self._keep_kv = keep_kv
        self._load_timeout_s, self._stuck_after_s = load_timeout_s, stuck_after_s
        self._buffer_endpoint, self._weights_endpoint = buffer_endpoint, weights_endpoint
        self._host, self._keys = host, keys
        self._num_failed = 0  # leases in a row whose requests failed
        self._version: PolicyVersion | None = None
        self._has_scored = False
        self._working: dict[str, Work] = {}
        self._unacknowledged: dict[str, Unacknowledged] = {}
        self._wake: Callable[[], object] = lambda: None  # there is no loop to wake yet
        self._is_over = False
        self._leave_buffer = asyncio.Event()
        self.progress = LoopProgress()
        self._token_time = TokenTime()

    async def run(self) -> None:
        """Serve until `Shutdown`. Raises whatever made the engine or a weight change fail."""
        self._loop = asyncio.get_running_loop()
        self._wake = lambda: self._loop.call_soon_threadsafe(self._leave_buffer.set)
        try:
            with metrics.waiting("engine"):
                await self._engine.start(UNPUBLISHED)
            self._activities = Activities(self._loop.time, self._cores)
            while not self._is_over:
                await self._wait_for_buffer()
                await self._serve()
        finally:
            await self._reward.close()
            if self._turns is not None:
                await self._turns.close()
            await self._engine.close()

    async def _wait_for_buffer(self) -> None:
        """Wait until it is known where the buffer is: generators start beside it."""
        while not self._buffer_endpoint:
            await self._leave_buffer.wait()
            self._leave_buffer.clear()

    def move(self, buffer_endpoint: str, weights_endpoint: str) -> None:
        """Work for this buffer and this learner from now on. May be called from any thread, at any time."""
        if buffer_endpoint == self._buffer_endpoint:
            return
        if self._buffer_endpoint:
            log.warning("buffer and learner were started again: moving to %s", buffer_endpoint)
        self._weights_endpoint = weights_endpoint
        self._buffer_endpoint = buffer_endpoint  # the last: the loop goes by it
        self._wake()

    @property
    def buffer_endpoint(self) -> str:
        """The buffer that this generator works for; empty before it is known."""
        return self._buffer_endpoint

    async def _serve(self) -> None:
        """Work for one buffer and one learner, until the run is over or they were started again."""
        endpoint = self._buffer_endpoint
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
                while not self._is_over and self._buffer_endpoint == endpoint:  # the event may be of the move to it
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
        """End the receiver's thread. It may be in a swap, which needs this loop, so the wait does not block.

        Raises:
            WeightsError: the thread does not end; beside the next receiver it could load older weights over newer ones.
        """
        receiver.stop()
        deadline = self._loop.time() + (SHUTDOWN_S if self._is_over else self._load_timeout_s)
        while receiver.is_alive and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        if receiver.is_alive and not self._is_over:
            raise WeightsError(f"{self._id}: the receiver of weights does not end")

    def _connect(self) -> AsyncClient:
        return AsyncClient(self._buffer_endpoint, f"{self._id}-{self._incarnation}", self._keys)

    def _receiver(self) -> Receiver:
        return Receiver(
            self._weights_endpoint,
            generator_id=self._id,
            incarnation=self._incarnation,
            host=self._host,
            apply=self._apply_weights,
            score=self._score,
            keys=self._keys,
        )

    # -- the buffer ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            try:
                message, _ = await self._client.receive()
            except WireError as error:
                log.warning("refused a message of the buffer: %s", error)
                continue
            await self._handle(message)

    async def _handle(self, message: Message) -> None:
        match message:
            case Grant(lease=lease):
                # A buffer that lost touch with this generator frees its leases, and may grant the same ones again.
                if lease.lease_id not in self._working and lease.lease_id not in self._unacknowledged:
                    reward, engine = self._reward, self._engine
                    sampler = engine if self._turns is None else self._turns.of(lease.prompt, self._activities)
                    group = GroupInFlight(lease, sampler, reward, self._decode, reward.works, self._activities)
                    task = self._tasks.create_task(self._work(lease, group), name=lease.lease_id)
                    self._working[lease.lease_id] = Work(group, task)
                    metrics.groups_in_flight.set(len(self._working))
            case Ack(lease_id=lease_id):
                self._unacknowledged.pop(lease_id, None)
            case Nack(lease_id=lease_id, reason=reason):
                log.warning("the buffer refuses the group of lease %s: %s", lease_id, reason)
                self._unacknowledged.pop(lease_id, None)
            case Cancel(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    if lease_id in self._working:
                        self._working[lease_id].group.give_up()
            case Shutdown():
                self._is_over = True
                self._leave_buffer.set()
            case Reregister():
                log.warning("the buffer had given this generator up; registering again")
                await self._register()
            case Welcome():
                log.info("in touch with the buffer")

    async def _work(self, lease: Lease, group_in_flight: GroupInFlight) -> None:
        """Work on one lease: deliver its group, or report a failure."""
        telling = self._tasks.create_task(self._tell_when_sampled(lease, group_in_flight))
        try:
            group = await group_in_flight.generate(self._id)
        except RequestError as error:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_LEASES:
                raise EngineError(f"the requests of {self._num_failed} leases in a row failed: {error}") from error
            await self._return(lease, "failed", error, group_in_flight.num_tokens)
        except EngineError:
            raise
        except GivenUp as error:
            await self._return(lease, "cancelled", error, group_in_flight.num_tokens)
        except RewardsPaused as error:
            await self._return(lease, REWARDS_PAUSED, error, group_in_flight.num_tokens)
        except TooFewCompletions as error:
            reason = REWARDS_PAUSED if self._reward.is_paused else "lease_timeout"
            await self._return(lease, reason, error, group_in_flight.num_tokens)
        except Exception as error:
            log.exception("lease %s failed", lease.lease_id)
            await self._return(lease, "failed", error, group_in_flight.num_tokens)
        else:
            self._num_failed = 0
            observe_group(group)
            message, payload = pack_group(group)
            self._unacknowledged[lease.lease_id] = Unacknowledged(message, payload, self._loop.time())
            await self._client.send(message, payload)
        finally:
            telling.cancel()
            self._working.pop(lease.lease_id, None)
            metrics.groups_in_flight.set(len(self._working))

    async def _tell_when_sampled(self, lease: Lease, group_in_flight: GroupInFlight) -> None:
        await group_in_flight.is_sampled.wait()
        await asyncio.sleep(SCORED_AT_ONCE_S)
        await self._send(AwaitsScores(generator_id=self._id, lease_id=lease.lease_id))

    async def _return(self, lease: Lease, reason: str, error: Exception, num_tokens: int) -> None:
        level = logging.INFO if reason in ("cancelled", REWARDS_PAUSED) else logging.WARNING
        log.log(level, "giving lease %s of prompt %s back: %s", lease.lease_id, lease.prompt.prompt_id, error)
        metrics.tokens_generated_total.inc(num_tokens)
        message = LeaseFailed(
            generator_id=self._id,
            lease_id=lease.lease_id,
            reason=reason,
            detail=f"{type(error).__name__}: {error}"[:300],
            tokens=num_tokens if lease.purpose == "train" else 0,
        )
        await self._send(message)

    async def _send_heartbeats(self, receiver: Receiver) -> None:
        """Send heartbeats, resend groups that are not acknowledged, and watch the receiver's thread."""
        while True:
            started = self._loop.time()
            self.progress.tick()
            await asyncio.sleep(HEARTBEAT_S)
            if receiver.failure is not None:
                raise WeightsError(f"{self._id} cannot take weights any more") from receiver.failure
            use = self._engine.occupancy()
            observe_engine(use)
            token_s = self._token_time.look(use)
            await self._send_serving(None if self._activities.goes_on("weights") else token_s, use.running)
            for held in list(self._unacknowledged.values()):
                if started - held.sent_s > RESEND_AFTER_S:
                    lease_id = held.message.lease_id
                    log.warning(
                        "the group of %s is not acknowledged after %.0f s: sending it again", lease_id, RESEND_AFTER_S
                    )
                    held.sent_s = self._loop.time()
                    await self._client.send(held.message, held.payload)

    async def _report_rewards(self) -> None:
        """Report at once that rewards paused or work again, and kinds of failures that are news."""
        while True:
            await self._reward.changed.wait()
            self._reward.changed.clear()
            for news in self._reward.news():
                message = RewardFailed(
                    generator_id=self._id, failure=news.kind[:256], detail=news.detail, count=news.count
                )
                await self._send(message)
            await self._send_serving()

    async def _probe(self) -> None:
        """Probe the engine now and then. Raises EngineError when it does not reply."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                async with asyncio.timeout(self._stuck_after_s):
                    await self._engine.probe()
            except TimeoutError as error:
                raise EngineError(f"the engine has not replied for {self._stuck_after_s:.0f} s") from error

    async def _register(self) -> None:
        await self._send(
            Register(protocol=PROTOCOL, generator_id=self._id, incarnation=self._incarnation, window=self._window)
        )
        await self._send_serving()

    async def _send_serving(self, token_s: float | None = None, running: int = 0) -> None:
        """Send a `Serving`. Only heartbeats give the time of a token: the buffer counts each one that is slow."""
        message = Serving(
            generator_id=self._id,
            version=self._version,
            rewards=self._reward.health,
            seconds=self._activities.seconds(),
            token_s=token_s,
            running=running,
        )
        await self._send(message)

    async def _send(self, message: Message) -> None:
        await self._client.send(message)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _apply_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> str:
        """Swap on the loop and wait for it. The receiver's thread calls this."""
        future = asyncio.run_coroutine_threadsafe(self._swap(tensors, version), self._loop)
        try:
            return future.result(self._load_timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise EngineError(f"the engine did not load {version} within {self._load_timeout_s:.0f} s") from error

    def _score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """Score sequences under the present weights. The receiver's thread calls this, between two swaps."""
        within_s = SCORE_WITHIN_S if self._has_scored else FIRST_SCORE_WITHIN_S
        scores = asyncio.run_coroutine_threadsafe(self._engine.score(sequences, start), self._loop).result(within_s)
        self._has_scored = True
        return scores

    async def _swap(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> str:
        with self._activities.during("weights"):
            await self._engine.load_weights(tensors, version, keep_kv=self._keep_kv)
            checksum = await self._engine.checksum()
        self._token_time.begin_anew(self._engine.occupancy())
        self._version = version
        metrics.generator_policy_version.set(version.number)
        await self._send_serving()
        return checksum


def observe_engine(use: EngineOccupancy) -> None:
    """Set how full the engine is in this process's metrics."""
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
        if (failure := rollout.score.failure) in (
            "aborted",
            FAILURE,
        ):  # those of the reward are counted where it is called
            metrics.reward_failures_total.labels(failure=failure).inc()
