"""A run on the virtual clock: the product's own buffer, admission, dispatch and services, and engines of continuous batching.

`VirtualRun` runs `BufferService`, `GeneratorService`, `LearnerService` and the codec. A `Case` has the
times of a step, a publication, a token and a reward. Nothing waits, so the cost of an hour is the cost of its events.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import Config
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.learner.ranks import Inbox, Team
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.planner.plan import Prediction, Profile, Split, predict
from asyncgrpo.planner.stand_ins import GeneratorLine, LearnerLine, Receiver, Silent, VirtualEngine, VirtualLoop
from asyncgrpo.rewards.base import Reward, Sampled
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Group, PolicyVersion, Prompt, Sampling, Score
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode

LONGEST = 2**20
"""Tokens of the longest completion; lengths are the case's."""
MOST_STEPS, FEWEST_STEPS = 36, 10
"""Steps that count, after those of the start."""
ROLLOUTS = 40_000
"""Rollouts that are enough: a large batch needs fewer steps."""
START = 12
"""Steps of the start, beside those of the bound: until admission has settled."""
UNITS = 200
"""A mean completion has so many tokens: there are many, and one is like the next."""
LONGEST_STEP_S = 20.0
"""Longest step, in virtual seconds: longer ones are scaled down, which saves heartbeats."""


@dataclass(frozen=True)
class Case:
    """The sizes and times of a simulation. Lengths in tokens, times in seconds."""

    max_lag: int
    steps: int
    seed: int
    generators: int = 4
    window: int = 24
    """Groups that one generator works on at once."""
    group_size: int = 8
    per_step: int = 16
    """Groups of a step."""
    policy: str = "wait"
    slowest: float = 1.0
    """Seconds of a token of the last generator, over those of the others."""
    filters: bool = False
    """True if groups without signal are replaced (`algorithm.filter_zero_signal`)."""

    token_s: float = 0.02
    token_s_per_completion: float = 0.0001
    stall_s: float = 0.0
    """Part of a publication in which the learner waits for the copy of its weights."""
    transfer_s: float = 1.0
    """Part of a publication that overlaps with learner and engines."""
    swap_s: float = 0.5
    """Part of a publication in which an engine pauses."""
    capacity: int | None = None
    """Completions that an engine runs at once at most; None: all."""
    reward_s: float = 0.0
    """Of one reward."""
    reward_workers: int = 1

    latency_s: ClassVar[float] = 0.001
    tick_s: ClassVar[float] = 0.1
    """Interval of the buffer's loop when nothing arrives."""

    @property
    def num_groups(self) -> int:
        return self.steps * self.per_step

    @property
    def num_prompts(self) -> int:
        """Prompts of the run."""
        return self.num_groups

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        """[completions] tokens of one lease."""
        raise NotImplementedError

    def reward(self, prompt_index: int, completion: int) -> float:
        """The reward of one completion; `completion` counts those of the prompt, from 1."""
        return 1.0

    def train_seconds(self, tokens: int) -> float:
        """Return the seconds of a step of so many sampled tokens."""
        raise NotImplementedError

    def token_seconds(self, running: int) -> float:
        """Return the seconds of a token of each of so many completions."""
        return self.token_s + self.token_s_per_completion * running


@dataclass(frozen=True)
class StepSeen:
    """One step, and the time that led to it."""

    start_s: float
    """When its batch was taken."""
    waited_s: float
    """For its batch."""
    tokens: int
    """Sampled tokens in it."""
    lags: tuple[int, ...]


class _Reward(Reward):
    def __init__(self, case: Case) -> None:
        self._case, self._workers = case, asyncio.Semaphore(case.reward_workers)
        self._scored: Counter[str] = Counter()

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        return [await self._score(prompt) for _ in completions]

    async def _score(self, prompt: Prompt) -> Score:
        self._scored[prompt.prompt_id] += 1
        value = self._case.reward(int(prompt.prompt_id[6:]), self._scored[prompt.prompt_id])
        if self._case.reward_s:
            async with self._workers:
                await asyncio.sleep(self._case.reward_s)
        return Score(value=value)

    async def close(self) -> None:
        """Nothing to close."""


class _Generator(GeneratorService):
    line: GeneratorLine

    def _connect(self) -> GeneratorLine:  # type: ignore[override]
        return self.line

    def _receiver(self) -> Receiver:  # type: ignore[override]
        return Receiver(lambda: None)


@dataclass
class VirtualRun:
    """Runs the product on a case. It stands for the learner's model and for its publisher."""

    case: Case
    seen: list[StepSeen] = field(default_factory=list)
    engines: list[VirtualEngine] = field(default_factory=list)
    _is_free_s: float = 0.0
    _newest: PolicyVersion | None = None

    def run(self) -> "VirtualRun":
        self._build()
        self._learner.run()
        self.end_s = self._loop.time()
        self._loop.run_until(self._loop.time() + 1.0)  # the generators receive the shutdown
        return self

    # Stand-ins for the parts of the learner: the clock runs for as long as they take.

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        now_s, tokens = self._loop.time(), sum(group.num_tokens for group in groups)
        lags = tuple(version.number - group.versions[0].number for group in groups)
        self.seen.append(StepSeen(now_s, now_s - self._is_free_s, tokens, lags))
        self._loop.run_until(now_s + self.case.train_seconds(tokens))
        return SimpleNamespace(seconds={}, shares_within={})

    def offer(self, version: PolicyVersion, fill: object) -> bool:
        self._loop.run_until(self._loop.time() + self.case.stall_s)
        self._is_free_s = self._loop.time()
        is_under_way, self._newest = self._newest is not None, version
        if not is_under_way:
            self._loop.call_later(self.case.transfer_s, self._arrive)
        return True

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """Compare nothing: without a model nothing is scored."""

    def _arrive(self) -> None:
        """Swap every engine to the newest version."""
        version, self._newest = self._newest, None
        assert version is not None
        for service in self._generators:
            self._loop.create_task(service._swap((), version))

    def wait_for(self, count: int, timeout_s: float, report: object) -> None:
        self._loop.run_until(0.1)

    is_idle = True

    def reports(self) -> list:
        return []

    def close(self) -> None:
        """Nothing to close."""

    def export(self, folder: str, tokenizer: str) -> None:
        """Nothing to write."""

    # The wiring.

    def _build(self) -> None:
        case = self.case
        self._loop = VirtualLoop()  # type: ignore[abstract]
        prompts = tuple(Prompt(prompt_id=f"train/{i}", token_ids=(1,)) for i in range(case.num_prompts))
        config = self._config()
        source = PromptSource(prompts, seed=case.seed, shuffle=False, epochs=1)
        sampling = Sampling(max_tokens=LONGEST)
        self.buffer = Buffer(config.buffer, config.algorithm, source, sampling, seed=case.seed, lineage=1)
        self._service = BufferService(
            SimpleNamespace(send=self._from_buffer),  # type: ignore[arg-type]
            self.buffer,
            Evaluations((), Sampling(), 0, 1e9),
        )
        self._service._gauges = Silent()  # type: ignore[assignment]  # else half of the work would be metrics
        self._lines: dict[str, Any] = {}
        self._generators = [self._generator(index) for index in range(case.generators)]
        self._lines["learner"] = line = LearnerLine(self._loop, lambda m, p: self._to_buffer("learner", m, p))
        stubs = {"snapshot": SimpleNamespace(close=lambda: None), "check": SimpleNamespace(score=list)}
        trainer = SimpleNamespace(steps=0, step=self.step, export=self.export, **stubs)
        self._learner = LearnerService(
            config,
            trainer,  # type: ignore[arg-type]
            Team(0, 1),
            Inbox(line, 1e9, self._loop.time),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Silent(),  # type: ignore[arg-type]
            lineage=1,
            run_dir=Path("nowhere"),
            start_with=case.generators,
            last_step=case.steps,
        )
        no_checkpoints = SimpleNamespace(latest=lambda: None, begin=lambda state, fill: lambda: Path("none"))
        self._learner._checkpoints = no_checkpoints  # type: ignore[assignment]
        self._tick()

    def _config(self) -> Config:
        case = self.case
        lag = {"max_lag": case.max_lag, "policy": case.policy}
        settings = {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "run": {"seed": case.seed, "checkpoint_every": 10**9},
            "algorithm": {"group_size": case.group_size, "filter_zero_signal": case.filters},
            "buffer": lag | {"prompts_per_step": case.per_step, "lease_timeout_s": 1e9},
            "generators": {"engine": "fake", "count": case.generators},
        }
        return msgspec.convert(settings, Config)

    def _generator(self, index: int) -> GeneratorService:
        peer, case = f"generator-{index}", self.case
        slowness = case.slowest if index == case.generators - 1 else 1.0
        engine = VirtualEngine(
            case.lengths_of, lambda running: slowness * case.token_seconds(running), case.swap_s, case.capacity
        )
        self.engines.append(engine)
        self._lines[peer] = socket = GeneratorLine(lambda m, p: self._to_buffer(peer, m, p))
        service = _Generator(
            peer, "0", engine, Breaker(_Reward(case), at_once=10**6), lambda ids: "", window=case.window, keep_kv=True,
            load_timeout_s=1.0, stuck_after_s=1e9, buffer_endpoint="buffer", weights_endpoint="", host="", keys=None,
        )  # fmt: skip
        service.line = socket
        self._loop.create_task(service.run())
        return service

    def _to_buffer(self, peer: str, message: Message, payload: Any) -> None:
        self._loop.call_later(self.case.latency_s, self._turn, (peer, encode(message, payload)))

    def _from_buffer(self, peer: str, message: Message, payload: Any = b"") -> bool:
        frames = [bytes(frame) for frame in encode(message, payload)]
        self._loop.call_later(self.case.latency_s, self._lines[peer].arrive, frames)
        return True

    def _turn(self, received: Any) -> None:
        if not self._service._finished:
            self._service.turn(received, self._loop.time())

    def _tick(self) -> None:
        self._turn(None)
        if not self._service._finished:
            self._loop.call_later(self.case.tick_s, self._tick)


# -- of a profile ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedCase(Case):
    """A profile and a split as a case. Each of its tokens stands for `unit` tokens, each second for `slowdown` seconds."""

    profile: Profile = field(kw_only=True)
    ranks: int = 1
    slowdown: float = 1.0

    @property
    def num_prompts(self) -> int:
        return 3 * self.num_groups + 2 * self.generators * self.window

    @cached_property
    def unit(self) -> float:
        """Tokens of a unit."""
        return max(1.0, self.profile.lengths.mean / UNITS)

    @cached_property
    def _drawn(self) -> dict[int, np.ndarray]:
        """[prompts, completions] tokens of each attempt that was made."""
        return {}

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        if attempt not in self._drawn:
            sampled = self.profile.lengths.sample(self.num_prompts, self.group_size, [self.seed, attempt])
            self._drawn[attempt] = np.maximum(np.rint(sampled / self.unit), 1).astype(int)
        return self._drawn[attempt][prompt_index]

    def reward(self, prompt_index: int, completion: int) -> float:
        """Equal for all completions of a prompt without signal, else of two kinds."""
        if not self.profile.filtered:
            return float(completion % 2)
        has_signal = np.random.default_rng([self.seed, prompt_index]).random() >= self.profile.filtered
        return float(completion % 2) if has_signal else 1.0

    def train_seconds(self, tokens: int) -> float:
        mean = tokens * self.unit / (self.per_step * self.group_size)
        return self.profile.learner.at(self.profile.learner_tokens(mean) / self.ranks) / self.slowdown

    def token_seconds(self, running: int) -> float:
        return self.unit * self.profile.decode.at(running) / self.slowdown


def simulate(
    profile: Profile, split: Split, *, start: int | None = None, steps: int | None = None, seed: int = 0
) -> Prediction:
    """Run the product on the virtual clock, and measure the steps after the start.

    Args:
        start: steps that do not count; None: until admission has settled.
        steps: that count; None: enough, by the size of a batch.
    """
    begin = min(split.max_lag, START) + START if start is None else start
    if steps is None:
        enough = ROLLOUTS // (profile.prompts_per_step * profile.group_size)
        steps = max(FEWEST_STEPS, min(MOST_STEPS, enough))
    slowdown = max(1.0, predict(profile, split).step_s / LONGEST_STEP_S)
    case = PlannedCase(
        max_lag=split.max_lag,
        steps=begin + steps,
        seed=seed,
        generators=split.generators,
        window=split.groups_in_flight,
        group_size=profile.group_size,
        per_step=profile.prompts_per_step,
        policy=split.policy,
        filters=profile.filtered > 0,
        profile=profile,
        ranks=split.ranks,
        slowdown=slowdown,
        stall_s=profile.publish_s / slowdown,
        transfer_s=0.0,
        swap_s=profile.pause_s / slowdown,
        capacity=profile.kv_completions,
        reward_s=profile.reward_s / slowdown,
        reward_workers=profile.reward_workers,
    )
    run = VirtualRun(case)
    with _quiet():
        run.run()
    assert len(run.seen) == case.steps, "the prompts of the case ran out"
    seen = run.seen[begin:]
    first = run.seen[begin - 1]
    elapsed_s = (seen[-1].start_s - first.start_s) * slowdown
    waited_s = sum(step.waited_s for step in seen) * slowdown
    busy_s = sum(engine.busy_s for engine in run.engines) / len(run.engines)
    completion_s = sum(engine.completion_s for engine in run.engines) / len(run.engines)
    running = completion_s / max(busy_s, 1e-9)
    step_s = elapsed_s / len(seen)
    tokens = sum(step.tokens for step in seen) * case.unit
    return Prediction(
        step_s=step_s,
        lag_mean=fmean(lag for step in seen for lag in step.lags),
        tokens_per_s=tokens / elapsed_s,
        learner_idle=waited_s / elapsed_s,
        generator_idle=1 - busy_s / run.end_s,
        saturation=running / profile.decode.knee,
        running=running,
        bottleneck=predict(profile, split).bottleneck,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of the simulated run."""
    log = logging.getLogger("asyncgrpo")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
