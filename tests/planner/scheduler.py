"""The product's buffer, generators and learner loop on the virtual clock, with fake engines of a known decode curve.

Their steps are what the formulas of `asyncgrpo.planner.plan` must predict. `python -m tests.planner.scheduler` compares 32 cases.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import msgspec

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import Config
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.learner.ranks import Inbox, Team
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.planner.plan import LearnerTimes, Lengths, Profile, Split, predict
from asyncgrpo.rewards.base import Reward, Sampled
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Group, PolicyVersion, Prompt, Sampling, Score
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from tests.planner.profiles import profile
from tests.simulation.virtual import NO_WEIGHTS, GeneratorLine, LearnerLine, Receiver, Silent, VirtualLoop

MEDIAN, LONGEST = 100, 2000
"""Tokens of a completion."""
LATENCY_S, TICK_S = 0.001, 0.1
"""Time of a message, and interval of the buffer's loop when nothing arrives."""
START = 12
"""Steps that do not count, beside those of the bound: until admission has settled."""


class EveryOther(Reward):
    """Scores every second completion of a prompt 1, the others 0. Of ten prompts, `num_alike` have one reward only."""

    def __init__(self, num_alike: int) -> None:
        self._num_alike = num_alike
        self._scored: Counter[str] = Counter()

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        first, is_alike = self._scored[prompt.prompt_id], int(prompt.prompt_id) % 10 < self._num_alike
        self._scored[prompt.prompt_id] += len(completions)
        return [Score(value=float(is_alike or (first + i) % 2)) for i in range(len(completions))]

    async def close(self) -> None:
        """Nothing to close."""


class Generator(GeneratorService):
    line: GeneratorLine

    def _connect(self) -> GeneratorLine:  # type: ignore[override]
        return self.line

    def _receiver(self) -> Receiver:  # type: ignore[override]
        return Receiver(lambda: None)


class Scheduled:
    """A run of a profile's task in a split. It stands for the learner's model and for its publisher."""

    def __init__(self, profile: Profile, split: Split, *, sigma: float, steps: int, start: int | None = None) -> None:
        """
        Args:
            sigma: spread of the log-normal lengths, see `FakeEngine`.
            steps: number of steps that count.
            start: number of steps before them; None: until admission has settled.
        """
        self._profile, self._split, self._sigma = profile, split, sigma
        self._start = min(split.max_lag, START) + START if start is None else start
        self._steps = self._start + steps
        self._begun_s: list[float] = []
        self._groups: list[list[Group]] = []
        self._lags: list[float] = []
        self._build()
        self._learner.run()
        self._loop.run_until(self._loop.time() + 1.0)  # the generators receive the shutdown

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return (self._begun_s[-1] - self._begun_s[self._start - 1]) / (self._steps - self._start)

    @property
    def lag_mean(self) -> float:
        return fmean(self._lags[self._start :])

    @property
    def generator_idle(self) -> float:
        """Share of time in which an engine samples nothing, the start included."""
        sampled_s = fmean(generator._activities.seconds().generate for generator in self._generators)
        return 1 - sampled_s / self._loop.time()

    @property
    def lengths(self) -> Lengths:
        """Lengths of the completions that were trained."""
        groups = [[len(r.completion.token_ids) for r in group.rollouts] for batch in self._groups for group in batch]
        return Lengths(groups=tuple(tuple(map(float, group)) for group in groups))

    # -- stand-ins for parts of the learner: the clock runs for as long as they take ------------------------------------

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        self._begun_s.append(self._loop.time())
        self._groups.append(groups)
        self._lags.append(fmean(version.number - group.versions[0].number for group in groups))
        length = sum(g.num_tokens for g in groups) / (len(groups) * self._profile.group_size)
        tokens = self._profile.learner_tokens(length)
        self._loop.run_until(self._loop.time() + self._profile.learner.at(tokens / self._split.ranks))
        return SimpleNamespace(seconds={}, shares_within={})

    def offer(self, version: PolicyVersion, fill: object) -> bool:
        self._loop.run_until(self._loop.time() + self._profile.publish_s)
        for service in self._generators:
            self._loop.create_task(service._swap(NO_WEIGHTS, version))
        return True

    def wait_for(self, count: object, timeout_s: float, report: object) -> None:
        self._loop.run_until(0.1)

    # -- the wiring ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        profile, split = self._profile, self._split
        self._loop = VirtualLoop()  # type: ignore[abstract]
        num_prompts = 3 * self._steps * profile.prompts_per_step
        prompts = tuple(Prompt(prompt_id=str(i), token_ids=(i,)) for i in range(num_prompts))
        config = self._config()
        source = PromptSource(prompts, seed=0, shuffle=False, epochs=1)
        sampling = Sampling(max_tokens=LONGEST, stop_token_ids=(0,))
        self._service = BufferService(
            SimpleNamespace(send=self._from_buffer),  # type: ignore[arg-type]
            Buffer(config.buffer, config.algorithm, source, sampling, seed=0, lineage=1),
            Evaluations((), Sampling(), 0, 1e9),
        )
        self._lines: dict[str, Any] = {}
        self._generators = [self._generator(index) for index in range(split.generators)]
        self._lines["learner"] = line = LearnerLine(self._loop, lambda m, p: self._to_buffer("learner", m, p))
        closed = SimpleNamespace(close=lambda: None)
        trainer: Any = SimpleNamespace(
            steps=0, step=self.step, snapshot=closed, check=SimpleNamespace(score=list), export=lambda *_: None
        )
        publisher: Any = SimpleNamespace(expect=lambda *_: None, reports=list, is_idle=True, close=closed.close)
        publisher.offer, publisher.wait_for = self.offer, self.wait_for
        inbox: Any = Inbox(line, 300.0, self._loop.time)
        about = {"lineage": 1, "run_dir": Path("nowhere"), "start_with": split.generators, "last_step": self._steps}
        self._learner = LearnerService(config, trainer, Team(0, 1), inbox, publisher, Silent(), **about)
        no_checkpoints = SimpleNamespace(latest=lambda: None, begin=lambda state, fill: lambda: Path("none"))
        self._learner._checkpoints = no_checkpoints  # type: ignore[assignment]
        self._tick()

    def _config(self) -> Config:
        settings = {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "run": {"checkpoint_every": 10**9},
            "algorithm": {"group_size": self._profile.group_size, "filter_zero_signal": self._profile.filtered > 0},
            "buffer": {
                "max_lag": self._split.max_lag, "prompts_per_step": self._profile.prompts_per_step, "lease_timeout_s": 1e9
            },
            "generators": {"engine": "fake", "count": self._split.generators},
        }  # fmt: skip
        return msgspec.convert(settings, Config)

    def _generator(self, index: int) -> GeneratorService:
        peer, decode = f"generator-{index}", self._profile.decode
        engine = FakeEngine(
            vocab_size=2**20, seconds_per_token=decode.base_s, seconds_per_completion=decode.each_s,
            median_tokens=MEDIAN, sigma=self._sigma,
        )  # fmt: skip
        reward = EveryOther(round(10 * self._profile.filtered))
        service = Generator(
            peer, "0", engine, Breaker(reward, at_once=10**6), lambda ids: "", window=self._split.groups_in_flight, keep_kv=True,
            load_timeout_s=1.0, stuck_after_s=1e9, buffer_endpoint="buffer", weights_endpoint="", host="", keys=None,
        )  # fmt: skip
        service.line = self._lines[peer] = GeneratorLine(lambda m, p: self._to_buffer(peer, m, p))
        self._loop.create_task(service.run())
        return service

    def _to_buffer(self, peer: str, message: Message, payload: Any) -> None:
        self._loop.call_later(LATENCY_S, self._turn, (peer, encode(message, payload)))

    def _from_buffer(self, peer: str, message: Message, payload: Any = b"") -> bool:
        frames = [bytes(frame) for frame in encode(message, payload)]
        self._loop.call_later(LATENCY_S, self._lines[peer].arrive, frames)
        return True

    def _turn(self, received: Any) -> None:
        if not self._service._finished:
            self._service.turn(received, self._loop.time())

    def _tick(self) -> None:
        self._turn(None)
        if not self._service._finished:
            self._loop.call_later(TICK_S, self._tick)


def main() -> None:
    """Print the step of each case, in the product and by the formulas."""
    cases = itertools.product((1, 2, 4, 8), (0.5, 1.0), (0.2, 3.0), (2, 4))
    for max_lag, sigma, base_s, generators in cases:
        task = profile(learner=LearnerTimes(base_s=base_s, each_s=0.0005), pause_s=0.0)
        split = Split(generators, 2, 8, max_lag)
        run = Scheduled(task, split, sigma=sigma, steps=60)
        formula = predict(msgspec.structs.replace(task, lengths=run.lengths), split)
        case = f"max_lag {max_lag}  sigma {sigma}  learner {base_s:.1f} s + tokens  generators {generators}"
        step = f"step {run.step_s:5.2f} s {formula.step_s / run.step_s - 1:+4.0%}"
        lag = f"lag {run.lag_mean:.2f} {formula.lag_mean - run.lag_mean:+.2f}"
        print(f"{case}  {step}  {lag}  {formula.bottleneck}", flush=True)


if __name__ == "__main__":
    main()
