"""Measure a profile on the cluster of a configuration: a decode sweep, two short runs of different sizes, the reward alone.

The sweep asks one engine, placed as in a run. The two runs are real ones, of a quarter and of all `buffer.prompts_per_step`:
the learner at two sizes, publications and lengths come out of their events and samples.
"""

import asyncio
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncgrpo.cluster.folder import RunFolder, look, record
from asyncgrpo.cluster.run import Run, in_generator
from asyncgrpo.config.explain import sizes_in_words
from asyncgrpo.config.memory import Card, engine_gpu
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.schema import Config, changed
from asyncgrpo.data.images import Images
from asyncgrpo.data.loading import Prompts
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.engines.base import Engine
from asyncgrpo.engines.build import build_engine
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.planner.plan import DecodeCurve, LearnerTimes, Lengths, Profile
from asyncgrpo.recording.events import Event, read_events
from asyncgrpo.recording.pace import FEWEST, SETTLE
from asyncgrpo.recording.progress import seconds_of
from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import PolicyVersion, Prompt, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

STEPS = SETTLE + FEWEST
"""Steps of a short run. The first `SETTLE` are left out: engines and caches warm up."""
SMALL = 4
"""The small run has so many times fewer prompts a step."""
SCORED = 32
"""Completions that are scored alone."""
PROMPTS = 256
"""Prompts whose tokens are counted."""
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT = 8
"""Tokens of the first of two measurements: their difference excludes prefill and start."""
ENOUGH_S = 1.0
"""Seconds that the difference should last, where completions may be as long as that."""
SLOWER = 50.0
"""The sweep ends at a load at which a token takes so many times as long as for one completion."""
COLUMNS = ["group_id", "num_tokens", "prompt", "prompt_id", "completion"]
"""Columns of the samples that are read."""

_SHORT_RUN = {
    "run.epochs": None,
    "run.checkpoint_every": 10**6,
    "run.samples_every": 1,
    "run.loggers": (),
    "control.port": None,
    "generators.autopilot": False,
    "data.eval": None,
}
"""Settings of a short run, beside its folder, its steps and their size."""

Rows = list[dict[str, Any]]


def tune(config: Config, log: Callable[[str], None], *, steps: int = STEPS) -> Profile:
    """Measure a profile. The folders of the runs are removed.

    Args:
        log: called with a line for each measurement.
        steps: of each run.
    Raises:
        AsyncGRPOError: a run or the engine failed.
    """
    curve, groups = [], -(-max(LOADS) // config.algorithm.group_size)
    room = {"generators.groups_in_flight": max(groups, config.generators.groups_in_flight)}
    for load, token_s in in_generator(changed(config, room), decode_sweep):
        curve.append((load, token_s))
        log(f"decode: {load:.0f} completions, {1e3 * token_s:.2f} ms a token, {load / token_s:,.0f} tokens/s")
    tokenizer = load_tokenizer(config.model.path)
    batch, trained = config.buffer.prompts_per_step, []
    with tempfile.TemporaryDirectory(prefix="asyncgrpo-tune-") as folder:
        for size in sorted({max(1, batch // SMALL), batch}):
            sizes = {"run.out": f"{folder}/{size}", "run.steps": steps, "buffer.prompts_per_step": size}
            short = changed(config, _SHORT_RUN | sizes)
            events, rows = _run(short, log)
            profile = profile_of(short, events, rows, tokenizer, DecodeCurve.fit(curve))
            trained += learner_points(events, profile)
    reward_s = asyncio.run(_reward_seconds(config, tokenizer, rows))
    log(f"reward: {1e3 * reward_s:.1f} ms")
    return msgspec.structs.replace(profile, config=config, learner=LearnerTimes.fit(trained), reward_s=reward_s)


# -- the short runs ----------------------------------------------------------------------------------------------------


def _run(config: Config, log: Callable[[str], None]) -> tuple[list[Event], Rows]:
    """Run a configuration. Return the `step` events that count, and the samples of these steps."""
    import pyarrow.parquet as pq

    path, started = Path(config.run.out), time.monotonic()
    folder = RunFolder(path)
    folder.claim()
    try:
        record(config, folder, look(config, folder))
        status = Run(config, folder, sizes_in_words(config)).execute()
    finally:
        folder.release()
    prompts = config.buffer.prompts_per_step
    if status != "done":
        raise AsyncGRPOError(f"asked to stop in the run of {prompts} prompts a step: no profile is written")
    steps = [event for event in read_events(path / "metrics.jsonl") if event["event"] == "step"][SETTLE:]
    files = sorted((path / "samples").rglob("step_*.parquet"))[SETTLE:]
    seconds = statistics.median(map(seconds_of, steps))
    took = f"{seconds:.2f} s a step, {_publish_s(steps):.2f} s of it publication"
    log(f"run: {prompts} prompts a step, {took} ({time.monotonic() - started:.0f} s in all)")
    return steps, [row for file in files for row in pq.read_table(file, columns=COLUMNS).to_pylist()]


def profile_of(
    config: Config, steps: Sequence[Event], rows: Rows, tokenizer: "Tokenizer", decode: DecodeCurve
) -> Profile:
    """Return the profile of a run, without the times of its learner and its reward.

    Args:
        steps: `step` events.
        rows: samples of these steps.
        decode: curve of its engine.
    """
    size = config.algorithm.group_size
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["num_tokens"])
    whole = size + (config.algorithm.advantage == "remax")  # the last one is greedy, and not trained
    lengths = Lengths(groups=tuple(tuple(map(float, group[:size])) for group in groups.values() if len(group) == whole))
    prompts = list({row["prompt"] for row in rows})[:PROMPTS]
    prompt_tokens = statistics.fmean(len(tokenizer.encode(text, add_special_tokens=False)) for text in prompts)
    filtered = sum(sum(step.get("filtered", {}).values()) for step in steps)
    return Profile(
        source=f"tune of {config.model.path}",
        hardware=_hardware(config),
        config=config,
        prompt_tokens=prompt_tokens,
        lengths=lengths,
        decode=decode,
        learner=LearnerTimes(base_s=0.0, each_s=0.0),
        publish_s=_publish_s(steps),
        pause_s=statistics.fmean(
            step["generators"].get("weights", 0.0) / step["generators"]["in_touch"]
            for step in steps
            if step["generators"]["in_touch"]
        ),
        filtered=filtered / (filtered + sum(sum(step["lags"].values()) for step in steps)),
        kv_completions=_kv_completions(config, prompt_tokens + lengths.mean),
    )


def _publish_s(steps: Sequence[Event]) -> float:
    return statistics.median(step["seconds"].get("publish", 0.0) for step in steps)


def learner_points(steps: Sequence[Event], profile: Profile) -> list[tuple[float, float]]:
    """Return (tokens of a rank, seconds) of the steps: the medians of their thirds, by size.

    Waiting, publication, checkpoint and evaluation do not count.
    """
    size, apart = profile.prompts_per_step * profile.group_size, ("wait_data", "publish", "checkpoint", "eval")
    points = sorted(
        (
            profile.learner_tokens(step["tokens_trained"] / size) / profile.config.learner.ranks,
            sum(seconds for activity, seconds in step["seconds"].items() if activity not in apart),
        )
        for step in steps
    )
    parts = [part for part in np.array_split(np.array(points), 3) if len(part)]
    return [(float(np.median(part[:, 0])), float(np.median(part[:, 1]))) for part in parts]


def _hardware(config: Config) -> str:
    import torch

    if config.generators.gpus_each and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return platform.processor() or platform.machine()


def _kv_completions(config: Config, tokens: float) -> int | None:
    """Return how many completions of so many tokens, prompts included, fit an engine's KV cache; None: all."""
    has_cache = config.generators.gpus_each and config.generators.engine == "sglang"
    if not has_cache or (size := size_at(config.model.path)) is None:
        return None
    return max(1, int(engine_gpu(size, config, Card.of(config)).tokens / tokens))


async def _reward_seconds(config: Config, tokenizer: "Tokenizer", rows: Rows) -> float:
    """Return the median seconds of one reward, called alone on completions of a run."""
    prompts = {prompt.prompt_id: prompt for prompt in _prompts(config, tokenizer)}
    reward, seconds = build_reward(config.reward), []
    try:
        for row in [row for row in rows[:SCORED] if row["prompt_id"] in prompts]:
            started = time.perf_counter()
            await score_one(reward, prompts[row["prompt_id"]], row["completion"])
            seconds.append(time.perf_counter() - started)
    finally:
        await reward.close()
    return statistics.median(seconds[1:] or [0.0])  # the first one starts its process


def _prompts(config: Config, tokenizer: "Tokenizer") -> Sequence[Prompt]:
    return Prompts(config.data.sources, "train", tokenizer, config.data, images=Images.of(config))


# -- the decode sweep --------------------------------------------------------------------------------------------------


def decode_sweep(config: Config) -> Iterator[tuple[float, float]]:
    """Yield (completions that run, seconds of a token) for each load, on prompts of the training file."""
    prompts = [prompt.token_ids for prompt in _prompts(config, load_tokenizer(config.model.path))]
    engine = build_engine(config, seed=config.run.seed)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start(PolicyVersion(0, 0)))
        measure = Measure(engine, prompts, config)
        loop.run_until_complete(measure.seconds(1, SHORT))  # the first request is slow
        first_s = None
        for load in LOADS:
            token_s = loop.run_until_complete(measure.token_seconds(load))
            yield float(load), token_s
            first_s = first_s or token_s
            if token_s > SLOWER * first_s:
                return
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


class Measure:
    """Times completions of one length."""

    def __init__(self, engine: Engine, prompts: list[tuple[int, ...]], config: Config) -> None:
        self._engine, self._prompts = engine, itertools.cycle(prompts)
        self._temperature, self._longest = config.sampling.temperature, config.sampling.max_tokens
        self._requests = itertools.count()

    async def token_seconds(self, load: int) -> float:
        """Return the seconds of a token of each of `load` completions, from the difference of a long and a short one."""
        short = min(SHORT, self._longest)
        # The first of a load is often slower than those after it, which would make the difference too small.
        short_s = min([await self.seconds(load, short) for _ in range(2)])
        guess_s = short_s / short
        long = min(self._longest, short + max(SHORT, round(ENOUGH_S / guess_s)))
        if long < 2 * short:
            return guess_s  # completions are too short to leave the start out
        return max(await self.seconds(load, long) - short_s, 0.1 * guess_s * (long - short)) / (long - short)

    async def seconds(self, load: int, tokens: int) -> float:
        """Return the seconds until the last of `load` completions of so many tokens."""
        started = time.perf_counter()
        await asyncio.gather(*(self._sample(tokens) for _ in range(load)))
        return time.perf_counter() - started

    async def _sample(self, tokens: int) -> None:
        sampling = Sampling(temperature=self._temperature, max_tokens=tokens)  # nothing stops it before
        number = next(self._requests)
        async for _ in self._engine.generate(f"sweep-{number}", next(self._prompts), 1, sampling, number):
            pass
