"""How much the scheduler loses: the product's buffer, admission and dispatch against a plain event model of the same rule.

python -m benchmarks.scheduler --lags 0 1 4 --steps 40

`product` runs `BufferService`, `GeneratorService`, `LearnerService` and the codec on a virtual clock; its engines are fakes
of continuous batching: every running completion gets a token each `BASE_S + PER_COMPLETION_S * running` seconds, and lengths are
lognormal. `model` knows none of these classes: a list of engines, a list of groups, and the rule in twenty lines. Both
meet the same lengths, training times and publications, so the ratio of rollouts/s is what messages, heartbeats and our
code lose. CPU microseconds are of one process that does everything; `buffer` is the share of the buffer's process.
"""

import argparse
import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
)
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.engines.base import PendingCompletion, Request
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.learner.ranks import Inbox, Team
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Sampling, Score
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from benchmarks.measuring import line, rounded, show
from tests.simulation.clock import VirtualLoop
from tests.simulation.network import BufferSocket, GeneratorLine, LearnerLine
from tests.simulation.nodes import Receiver, Silent

BASE_S, PER_COMPLETION_S = 0.02, 0.0001
LATENCY_S = 0.001
TRANSFER_S, SWAP_S = 1.0, 0.5
TICK_S = 0.1


@dataclass(frozen=True)
class Case:
    """One setting of both programs."""

    max_lag: int
    steps: int
    seed: int
    generators: int = 4
    window: int = 24
    group_size: int = 8
    per_step: int = 16
    train_s: float = 12.0
    policy: str = "wait"
    admission: str = "eager"
    slowest: float = 1.0
    """How many times as long as the others the last generator takes for a token. The event model knows only equal ones."""

    @property
    def num_groups(self) -> int:
        return self.steps * self.per_step

    @property
    def num_prompts(self) -> int:
        """Prompts of the run. There are more than it trains, so that it ends after `steps`."""
        return self.num_groups

    def lengths(self) -> np.ndarray:
        """[groups, completions] tokens: lognormal, median 600, at most 8192."""
        drawn = np.random.default_rng(self.seed).lognormal(math.log(600), 1.0, (self.num_groups, self.group_size))
        return np.clip(drawn, 1, 8192).astype(int)

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        """[completions] tokens of one lease."""
        return self._lengths[prompt_index]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths()

    def reward(self, prompt_index: int, completion: int) -> float:
        """The reward of one completion; `answer` counts the completions of the prompt."""
        return 1.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args(argv)
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    for max_lag in arguments.lags:
        ratios, cpu_us, buffer_us, rates, most, exact = [], [], [], [], 0, True
        for seed in arguments.seeds:
            case = Case(max_lag, arguments.steps, seed)
            product = Product(case, with_cpu=True).run()
            exact = exact and Product(case).run().trained_at == product.trained_at
            rates.append(product.rollouts_per_s)
            ratios.append(product.rollouts_per_s / model(case))
            cpu_us.append(product.cpu_s / product.rollouts * 1e6)
            buffer_us.append(product.buffer_s / product.rollouts * 1e6)
            most = max(most, product.largest_lag)
        show(
            line(
                "rollouts/s of the product / of the event model",
                ratios,
                "1",
                seed=arguments.seeds[0],
                max_lag=max_lag,
                largest_lag=most,
                same_run_twice=exact,
                rollouts_per_virtual_s=[rounded(rate) for rate in rates],
                cpu_us_per_rollout=[rounded(one, 3) for one in cpu_us],
                buffer_us_per_rollout=[rounded(one, 3) for one in buffer_us],
                **{k: v for k, v in asdict(case).items() if k not in ("max_lag", "seed")},
            )
        )


# -- the product -------------------------------------------------------------------------------------------------------


class BatchingEngine:
    """`generators.Engine` of continuous batching: one event for each completion that ends, whatever its length."""

    def __init__(self, lengths_of: Callable[[int, int], np.ndarray], slowness: float = 1.0) -> None:
        """
        Args:
            lengths_of: [completions] tokens of the group of this prompt index and attempt.
            slowness: factor on the time of a token.
        """
        self._lengths_of, self._slowness = lengths_of, slowness
        self.aborted_tokens = 0.0
        self._tokens = 0.0  # that a completion has got which runs since the start
        self._since_s = 0.0
        self._running: list[
            tuple[float, int, float, PendingCompletion]
        ] = []  # (end, tie, start, completion), in `_tokens`; a heap
        self._ties = itertools.count()
        self._paused = False
        self._wake: asyncio.TimerHandle | None = None
        self.version = PolicyVersion(0, 0)

    async def start(self, version: PolicyVersion) -> None:
        self.version = version

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        self._advance()
        request = Request(request_id, prompt, num_completions, sampling, seed)
        lengths = self._lengths_of(*map(int, request_id.split(".")[1:3]))
        for completion in request.pending:
            completion.sampled_by(self.version, 0)
            entry = (self._tokens + int(lengths[completion.index]), next(self._ties), self._tokens, completion)
            heapq.heappush(self._running, entry)
        self._set_alarm()
        async for completion in request.completions():
            yield completion

    async def load_weights(self, tensors: Iterable, version: PolicyVersion, **how: Any) -> None:
        self._advance()
        self._paused = True
        self._set_alarm()
        await asyncio.sleep(SWAP_S)
        self._advance()
        self._paused, self.version = False, version
        for _, _, start, completion in self._running:
            completion.sampled_by(version, int(self._tokens - start))
        self._set_alarm()

    async def abort(self, request_id: str) -> None:
        self._advance()
        ended = [entry for entry in self._running if entry[3].request.request_id == request_id]
        self.aborted_tokens += sum(self._tokens - start for _, _, start, _ in ended)
        self._running = [entry for entry in self._running if entry[3].request.request_id != request_id]
        heapq.heapify(self._running)
        self._set_alarm()

    async def probe(self) -> None:
        """It never hangs."""

    async def checksum(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing runs."""

    @property
    def _token_s(self) -> float:
        """Seconds of a token of all that run."""
        return self._slowness * (BASE_S + PER_COMPLETION_S * len(self._running))

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._paused:
            self._tokens += (now_s - self._since_s) / self._token_s
        self._since_s = now_s

    def _set_alarm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        if self._running and not self._paused:
            wait_s = (self._running[0][0] - self._tokens) * self._token_s
            self._wake = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._complete)

    def _complete(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            end, _, start, completion = heapq.heappop(self._running)
            length = round(end - start)
            completion.complete(np.zeros(length, np.int32), np.zeros(length, np.float32), "length")
        self._set_alarm()


class _Reward:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._scored: Counter[str] = Counter()

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        self._scored[prompt.prompt_id] += 1
        return Score(value=self._case.reward(int(prompt.prompt_id[6:]), self._scored[prompt.prompt_id]))

    async def close(self) -> None:
        """Nothing to close."""


class _Generator(GeneratorService):
    line: GeneratorLine

    def _connect(self) -> GeneratorLine:  # type: ignore[override]
        return self.line

    def _receiver(self) -> Receiver:  # type: ignore[override]
        return Receiver(lambda: None)


@dataclass
class Product:
    """Runs the product on a case."""

    case: Case
    with_cpu: bool = False
    """Whether the CPU time of the buffer's part is measured, which itself takes long."""
    rollouts: int = 0
    rollouts_per_s: float = 0.0
    cpu_s: float = 0.0
    buffer_s: float = 0.0
    largest_lag: int = 0
    trained_at: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When which prompt indices were trained."""
    groups: list[tuple[Group, PolicyVersion]] = field(default_factory=list)
    """What was trained, and the version at which its step started."""
    engines: list[BatchingEngine] = field(default_factory=list)

    def run(self) -> "Product":
        started = time.process_time()
        self._build()
        self._learner.run()
        self._loop.run_until(self._loop.time() + 1.0)  # the last words arrive, and the generators end
        self.cpu_s = time.process_time() - started
        self.rollouts_per_s = self.rollouts / self.trained_at[-1][0]
        return self

    # What stands for the learner's parts: they take their time, and the world goes on.

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        self._loop.run_until(self._loop.time() + self.case.train_s)
        self.rollouts += sum(len(group.rollouts) for group in groups)
        lags = [version.number - group.versions[0].number for group in groups]
        self.largest_lag = max(self.largest_lag, *lags)
        self.groups += [(group, version) for group in groups]
        self.trained_at.append((self._loop.time(), tuple(group.prompt_index for group in groups)))
        return SimpleNamespace(seconds={}, shares_within={})

    def publish(self, version: PolicyVersion, tensors: object) -> SimpleNamespace:
        self._loop.run_until(self._loop.time() + TRANSFER_S)
        swaps = [self._loop.create_task(service._swap((), version)) for service in self._generators]
        self._loop.run_until(math.inf, lambda: all(swap.done() for swap in swaps))
        return SimpleNamespace(version=version)

    def wait_for(self, count: int, timeout_s: float, tell: object) -> None:
        self._loop.run_until(0.1)

    def newcomers(self) -> bool:
        return False

    @property
    def generators(self) -> list[str]:
        return list(self._lines)

    def close(self) -> None:
        """Nothing to close."""

    def export(self, folder: str, tokenizer: str) -> None:
        """Nothing to write."""

    # The wiring.

    def _build(self) -> None:
        case = self.case
        self._loop = VirtualLoop()  # type: ignore[abstract]
        prompts = tuple(Prompt(prompt_id=f"train/{i}", token_ids=(1,)) for i in range(case.num_prompts))
        config = Config(
            model=ModelConfig(path="none"),
            data=DataConfig(train="none"),
            run=RunConfig(seed=case.seed, checkpoint_every=10**9),
            algorithm=AlgorithmConfig(group_size=case.group_size),
            buffer=BufferConfig(
                prompts_per_step=case.per_step,
                max_lag=case.max_lag,
                policy=case.policy,  # type: ignore[arg-type]
                admission=case.admission,  # type: ignore[arg-type]
                lease_timeout_s=1e9,
            ),
            generators=GeneratorConfig(engine="fake", count=case.generators),
        )
        source = PromptSource(prompts, seed=case.seed, shuffle=False, epochs=1)
        buffer = Buffer(config.buffer, config.algorithm, source, Sampling(max_tokens=8192), seed=case.seed, lineage=1)
        self.buffer = buffer
        self._service = BufferService(
            BufferSocket(self._from_buffer),  # type: ignore[arg-type]
            buffer,
            Evaluations((), Sampling(), 0, 1e9),
        )
        self._lines: dict[str, Any] = {}
        self._reward = Breaker(_Reward(case), at_once=10**6)
        self._generators = [self._generator(index) for index in range(case.generators)]
        self._lines["learner"] = line_ = LearnerLine(self._loop, lambda m, p: self._to_buffer("learner", m, p))
        self._learner = LearnerService(
            config,
            _Trainer(self),  # type: ignore[arg-type]
            Team(0, 1),
            Inbox(line_, 1e9, self._loop.time),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Silent(),  # type: ignore[arg-type]
            lineage=1,
            run_dir=Path("nowhere"),
            start_with=case.generators,
            last_step=case.steps,
        )
        self._learner._checkpoints = _NoCheckpoints()  # type: ignore[assignment]
        self._tick()

    def _generator(self, index: int) -> GeneratorService:
        peer = f"generator-{index}"
        slowness = self.case.slowest if index == self.case.generators - 1 else 1.0
        self.engines.append(engine := BatchingEngine(self.case.lengths_of, slowness))
        self._lines[peer] = socket = GeneratorLine(lambda m, p: self._to_buffer(peer, m, p))
        service = _Generator(
            peer, "0", engine, self._reward, lambda ids: "", window=self.case.window, keep_kv=True,
            merger=None, load_timeout_s=1.0, stuck_after_s=1e9, buffer_endpoint="", weights_endpoint="", host="", keys=None,
        )  # fmt: skip
        service.line = socket
        self._loop.create_task(service.run())
        return service

    def _to_buffer(self, peer: str, message: Message, payload: Any) -> None:
        self._loop.call_later(LATENCY_S, self._turn, (peer, encode(message, payload)))

    def _from_buffer(self, peer: str, message: Message, payload: Any) -> bool:
        frames = [bytes(frame) for frame in encode(message, payload)]
        self._loop.call_later(LATENCY_S, self._lines[peer].arrive, frames)
        return True

    def _turn(self, received: Any) -> None:
        if self._service._finished:
            return
        started = time.process_time() if self.with_cpu else 0.0
        self._service.turn(received, self._loop.time())
        self.buffer_s += time.process_time() - started if self.with_cpu else 0.0

    def _tick(self) -> None:
        self._turn(None)
        if not self._service._finished:
            self._loop.call_later(TICK_S, self._tick)


class _Trainer:
    steps = 0

    def __init__(self, product: Product) -> None:
        self.step, self.export = product.step, product.export
        self.sent = SimpleNamespace(weights=lambda: iter(()))


class _NoCheckpoints:
    def latest(self) -> None:
        return None

    def write(self, state: object, fill: object) -> Path:
        return Path("none")


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass
class _Engine:
    tokens: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # (end in tokens, group)
    groups: int = 0

    @property
    def seconds_per_token(self) -> float:
        return BASE_S + PER_COMPLETION_S * len(self.running)


def model(case: Case) -> float:
    """Rollouts a second of the same rule with nothing around it."""
    lengths, goal = case.lengths(), case.num_groups
    engines = [_Engine() for _ in range(case.generators)]
    where: dict[int, int] = {}
    missing: dict[int, int] = {}
    born: dict[int, int] = {}  # version at which a group that is not taken began
    issued = version = trained = in_training = 0
    phase, phase_ends, now = "swap", TRANSFER_S + SWAP_S, 0.0
    while trained < goal:
        if not (phase == "swap" and version == 0):  # before the first publication nobody may begin
            while issued < goal and len(born) + in_training < (case.max_lag + 1) * case.per_step:
                target = min(range(case.generators), key=lambda e: engines[e].groups)
                if engines[target].groups == case.window:
                    break
                engines[target].groups += 1
                where[issued], missing[issued], born[issued] = target, case.group_size, version
                for tokens in lengths[issued]:
                    heapq.heappush(engines[target].running, (engines[target].tokens + tokens, issued))
                issued += 1
        if phase == "wait" and (batch := _batch(case, born, missing, version, goal - trained)):
            for group in batch:
                del born[group]
            in_training, phase, phase_ends = len(batch), "train", now + case.train_s
        paused = phase == "swap"
        ends = [
            math.inf if paused or not e.running else (e.running[0][0] - e.tokens) * e.seconds_per_token for e in engines
        ]
        passed = min(*ends, phase_ends - now)
        now += passed
        for engine in engines:
            engine.tokens += 0.0 if paused else passed / engine.seconds_per_token
        for engine in engines:
            while not paused and engine.running and engine.running[0][0] <= engine.tokens + 1e-6:
                _, group = heapq.heappop(engine.running)
                missing[group] -= 1
                engines[where[group]].groups -= missing[group] == 0
        if now >= phase_ends - 1e-9:
            if phase == "train":
                trained += in_training
                phase, phase_ends = "transfer", now + TRANSFER_S
            elif phase == "transfer":
                phase, phase_ends = "swap", now + SWAP_S
            elif phase == "swap":
                version, in_training = version + 1, 0
                phase, phase_ends = "wait", math.inf
    return trained * case.group_size / now


def _batch(case: Case, born: dict[int, int], missing: dict[int, int], version: int, left: int) -> list[int]:
    """The oldest complete groups, if all the others can still be trained in time."""
    complete = sorted((born[g], g) for g in born if not missing[g])[: case.per_step]
    if len(complete) < min(case.per_step, left):
        return []
    batch = [group for _, group in complete]
    others = [born[g] + case.max_lag - version for g in born if g not in batch]
    fits = all(sum(due <= k for due in others) <= k * case.per_step for k in range(case.max_lag + 1))
    return batch if fits and all(due >= 0 for due in others) else []


if __name__ == "__main__":
    main()
