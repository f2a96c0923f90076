"""A profile, measured on the cluster of a configuration: a decode sweep, two short runs of different sizes, the reward alone.

The sweep asks one engine, placed as in a run. The two runs are real ones, of a quarter and of all `buffer.prompts_per_step`:
the learner at two sizes, publications and lengths come out of their events and samples. So what is timed is what a run does.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncgrpo.cluster.alone import in_generator
from asyncgrpo.cluster.folder import RunFolder, look, record
from asyncgrpo.cluster.run import Run
from asyncgrpo.config.explain import sizes_in_words
from asyncgrpo.config.placement import changed
from asyncgrpo.config.schema import Config
from asyncgrpo.data.prompts import load_prompts
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.planner.from_run import FEWEST, FIRST, learner_points, profile_of_run, timed_steps
from asyncgrpo.planner.profile import DecodeCurve, LearnerTimes, Profile
from asyncgrpo.planner.sweep import LOADS, decode_sweep
from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.build import build_reward

SMALL = 4
"""The small run has so many times fewer prompts a step."""
SCORED = 32
"""Completions that are scored alone."""


def tune(config: Config, tell: Callable[[str], None], *, steps: int = FIRST + FEWEST) -> Profile:
    """Measure a profile. Nothing of the runs is kept.

    Args:
        tell: called with a line for each thing that was measured.
        steps: of each run.
    Raises:
        AsyncGRPOError: a run or the engine failed.
    """
    points = []
    for load, token_s in in_generator(_for_sweep(config), decode_sweep):
        points.append((load, token_s))
        tell(f"decode: {load:.0f} completions, {1e3 * token_s:.2f} ms a token, {load / token_s:,.0f} tokens/s")
    with tempfile.TemporaryDirectory(prefix="asyncgrpo-tune-") as folder:
        batch = config.buffer.prompts_per_step
        sizes = sorted({max(1, batch // SMALL), batch})
        runs = [_short_run(config, Path(folder) / f"{size}", size, steps, tell) for size in sizes]
        profiles = [profile_of_run(run) for run in runs]
        whole = profiles[-1]
        trained = [
            point for run, of in zip(runs, profiles, strict=True) for point in learner_points(timed_steps(run), of)
        ]
        reward_s = _reward_seconds(config, runs[-1])
    tell(f"reward: {1e3 * reward_s:.1f} ms")
    return msgspec.structs.replace(
        whole,
        source=f"tune of {config.model.path}",
        config=msgspec.to_builtins(config),
        decode=DecodeCurve.fit(points),
        learner=LearnerTimes.fit(trained),
        reward_s=reward_s,
    )


def _for_sweep(config: Config) -> Config:
    """The configuration with an engine that holds as many completions as the sweep asks for."""
    groups = -(-max(LOADS) // config.algorithm.group_size)
    return changed(config, {"generators.groups_in_flight": max(groups, config.generators.groups_in_flight)})


def _short_run(config: Config, path: Path, prompts: int, steps: int, tell: Callable[[str], None]) -> Path:
    """Run so many steps of so many prompts. Returns its folder."""
    short = changed(
        config,
        {
            "run.out": str(path),
            "run.steps": steps,
            "run.epochs": None,
            "run.checkpoint_every": 10**6,
            "run.samples_every": 1,
            "run.loggers": (),
            "control.port": None,
            "generators.autopilot": False,
            "data.eval": None,
            "buffer.prompts_per_step": prompts,
        },
    )
    folder = RunFolder(path)
    folder.claim()
    started = time.monotonic()
    try:
        record(short, folder, look(short, folder))
        outcome = Run(short, folder, sizes_in_words(short)).execute()
    finally:
        folder.release()
    if outcome.status != "done":
        raise AsyncGRPOError(f"asked to stop in the run of {prompts} prompts a step: no profile is written")
    found = timed_steps(path)
    seconds = statistics.median(sum(step["seconds"].values()) for step in found)
    publish = statistics.median(step["seconds"].get("publish", 0.0) for step in found)
    tell(
        f"run: {prompts} prompts a step, {seconds:.2f} s a step, {publish:.2f} s of it publication "
        f"({time.monotonic() - started:.0f} s in all)"
    )
    return path


def _reward_seconds(config: Config, run: Path) -> float:
    """Median seconds of one reward, called alone on completions of the run."""
    import pyarrow.parquet as pq

    tokenizer = load_tokenizer(config.model.path)
    prompts = {p.prompt_id: p for p in load_prompts(config.data.sources, "train", tokenizer, config.data)}
    file = max((run / "samples").rglob("step_*.parquet"))
    rows = pq.read_table(file, columns=["prompt_id", "completion"]).to_pylist()[:SCORED]
    texts = [(prompts[row["prompt_id"]], row["completion"]) for row in rows if row["prompt_id"] in prompts]
    return asyncio.run(_score(config, texts))


async def _score(config: Config, texts: Sequence[tuple]) -> float:
    reward = build_reward(config.reward)
    seconds = []
    try:
        for prompt, text in texts:
            started = time.perf_counter()
            await score_one(reward, prompt, text)
            seconds.append(time.perf_counter() - started)
    finally:
        await reward.close()
    return statistics.median(seconds[1:] or [0.0])  # the first one starts its process
