"""A profile out of the folder of a run: what its events and samples say of lengths, decoding, steps and publications.

A run has one split and one load, so its decode curve is known near that load alone; `asyncgrpo tune` measures more of it. All
figures are of the last `STEPS` steps: lengths change while a model learns.
"""

import itertools
import platform
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncgrpo.config.load import read_plain, recorded
from asyncgrpo.config.memory import Card, engine_gpu
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.rules import local_model
from asyncgrpo.config.schema import Config
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.profile import DecodeCurve, LearnerTimes, Lengths, Profile
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import EVENTS, FEWEST, SETTLE, Pace, pace_of
from asyncgrpo.recording.sample_search import SampleFiles
from asyncgrpo.recording.tail import newest_first, newest_steps, read_tail

STEPS = 100
"""Newest steps that are looked at."""
FIRST = SETTLE
"""Steps of a start that are left out: engines and caches warm up."""
PROMPTS = 256
"""Prompts whose tokens are counted."""


def profile_of_run(run: Path) -> Profile:
    """Raises ConfigError, which says what the folder lacks."""
    config, steps = config_of(run), timed_steps(run)
    rows = list(_samples(run, {step["step"] for step in steps}))
    lengths = lengths_of(rows, config.algorithm.group_size)
    if lengths is None:
        raise ConfigError(f"{run} has no samples of complete groups, and a plan needs the lengths of completions")
    return profile_of(config, steps, lengths, _prompt_tokens(rows, config), source=f"run {run}")


def profile_of(config: Config, steps: Sequence[Event], lengths: Lengths, prompt_tokens: float, source: str) -> Profile:
    """What the events of some steps say of a run.

    Args:
        steps: `step` events, in order.
        prompt_tokens: mean.
    """
    generators, size = config.generators, config.algorithm.group_size
    profile = Profile(
        source=source,
        hardware=hardware(config),
        model=config.model.path,
        engine=generators.engine,
        config=msgspec.to_builtins(config),
        prompts_per_step=config.buffer.prompts_per_step,
        group_size=size,
        groups_in_flight=generators.groups_in_flight,
        generators=generators.count,
        ranks=config.learner.ranks,
        gpus_each=generators.gpus_each,
        max_lag=config.buffer.largest_max_lag,
        admission=config.buffer.admission,
        policy=config.buffer.policy,
        prompt_tokens=prompt_tokens,
        shares_prompts=config.learner.share_prompts,
        lengths=lengths,
        decode=DecodeCurve.fit(decode_points(steps)),
        learner=LearnerTimes(base_s=0.0, rank_s_per_token=0.0),
        publish_s=statistics.median(step["seconds"].get("publish", 0.0) for step in steps),
        pause_s=pause_seconds(steps),
        reward_s=reward_seconds(steps, config),
        reward_workers=config.reward.at_once,
        filtered=filtered_share(steps),
        kv_completions=kv_completions(config, prompt_tokens + lengths.mean),
    )
    learner = LearnerTimes.fit(learner_points(steps, profile))
    return msgspec.structs.replace(profile, learner=learner)


def config_of(run: Path) -> Config:
    """The configuration of its last start. Raises ConfigError."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml")
    return recorded(read_plain(file), str(file))


def timed_steps(run: Path) -> list[Event]:
    """The newest `step` events of the last start, without its first ones. Raises ConfigError where there are too few."""
    steps = newest_steps(run / "metrics.jsonl", FIRST + STEPS)
    if len(steps) < FIRST + FEWEST:
        raise ConfigError(
            f"{run} has {len(steps)} steps since its last start, and a profile needs {FIRST + FEWEST}: let it run longer"
        )
    return steps[FIRST:][-STEPS:]


class RunPace(NamedTuple):
    """The pace of a run under its present conditions, and the advice on it: what `status` and the summary show too."""

    pace: Pace
    config: Config
    gpus: int | None
    """Of the cluster; None: the run's events do not say."""
    advice: tuple[Advice, ...]


def pace_of_run(run: Path) -> RunPace:
    """Read the pace of a run from the end of its events. Raises ConfigError where there are too few steps."""
    config, file = config_of(run), run / "metrics.jsonl"
    newest = list(itertools.islice(newest_first(file), EVENTS))
    first = read_tail(file, 0, limit=10).events  # where the last start is too long ago
    gpus = next((event.get("gpus") for event in (*newest, *first) if event["event"] == "start"), None)
    events = newest[::-1]
    pace = pace_of(events, config)
    if pace is None:
        raise ConfigError(
            f"{run} has fewer than {SETTLE + FEWEST} steps since its last start or change: let it run longer"
        )
    return RunPace(pace, config, gpus, advise(events, config, gpus=gpus))


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(run: Path, steps: set[int]) -> Iterable[dict[str, Any]]:
    import pyarrow.parquet as pq

    files = SampleFiles(run / "samples")
    for file in filter(None, map(files.find, sorted(steps))):
        yield from pq.read_table(file, columns=["group_id", "num_tokens", "prompt"]).to_pylist()


def lengths_of(rows: Iterable[dict[str, Any]], group_size: int) -> Lengths | None:
    """The lengths in rows of samples; None without a complete group."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["num_tokens"])
    complete = [lengths for lengths in groups.values() if len(lengths) == group_size]
    return Lengths.of(np.array(complete)) if complete else None


def _prompt_tokens(rows: Sequence[dict[str, Any]], config: Config) -> float:
    """Mean tokens of a prompt; 0 where the model is not on this machine."""
    try:
        is_here = local_model(config.model.path) is not None
    except ConfigError:
        is_here = False
    if not is_here:
        return 0.0
    tokenizer, prompts = load_tokenizer(config.model.path), list({row["prompt"] for row in rows})[:PROMPTS]
    return statistics.fmean(len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts)


# -- events ------------------------------------------------------------------------------------------------------------


def learner_points(steps: Sequence[Event], profile: Profile) -> list[tuple[float, float]]:
    """(tokens of a rank, seconds) of the steps: the medians of their thirds, by size."""
    size = profile.prompts_per_step * profile.group_size
    points = [
        (profile.learner_tokens(step["tokens_trained"] / size) / profile.ranks, train_seconds(step)) for step in steps
    ]
    return _thirds(points)


def train_seconds(step: Event) -> float:
    """What the learner took for a step, without waiting, publication, checkpoint and evaluation."""
    apart = ("wait_data", "publish", "checkpoint", "eval")
    return sum(seconds for activity, seconds in step["seconds"].items() if activity not in apart)


def _thirds(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    ordered = sorted(points)
    parts = [part for part in np.array_split(np.array(ordered), 3) if len(part)]
    return [(float(np.median(part[:, 0])), float(np.median(part[:, 1]))) for part in parts]


def decode_points(steps: Sequence[Event]) -> list[tuple[float, float]]:
    """(completions that run in an engine, seconds of a token), of the thirds of the steps by load.

    The seconds of all completions over those in which anything is sampled are how many run at once; over their tokens they are
    what one takes. Completions wait in a change of weights, which is no part of it.
    """
    points = []
    for before, step in pairwise(steps):
        load, tokens = step.get("generators", {}), step["tokens"]["generated"] - before["tokens"]["generated"]
        if load.get("generate", 0) > 0 and load.get("sampling", 0) > 0 and tokens > 0:
            sampling = load["sampling"] * load["generate"] / (load["generate"] + load["weights"])
            points.append((sampling / load["generate"], sampling / tokens))
    if not points:
        raise ConfigError(
            "the events of this run say nothing of its generators' time; run it with this version, or use tune"
        )
    return _thirds(points)


def pause_seconds(steps: Sequence[Event]) -> float:
    """How long an engine samples nothing at a publication."""
    pauses = [
        step["generators"].get("weights", 0.0) / step["generators"]["in_touch"]
        for step in steps
        if step.get("generators", {}).get("in_touch")
    ]
    return statistics.fmean(pauses) if pauses else 0.0


def reward_seconds(steps: Sequence[Event], config: Config) -> float:
    """What a completion waited for its score; where workers were always busy, as long as they took for it."""
    loads = [step.get("generators", {}) for step in steps]
    scored = sum(step.get("completions", 0) for step in steps)
    waited = sum(load.get("scoring", 0.0) for load in loads)
    of_workers = sum(load.get(what, 0.0) for load in loads for what in ("generate", "reward", "weights", "idle"))
    return min(waited, config.reward.at_once * of_workers) / scored if scored else 0.0


def filtered_share(steps: Sequence[Event]) -> float:
    """Share of the groups that `algorithm.filter_zero_signal` replaced."""
    filtered = sum(sum(step.get("filtered", {}).values()) for step in steps)
    trained = sum(sum(step["lags"].values()) for step in steps)
    return filtered / (filtered + trained)


# -- what is not measured ----------------------------------------------------------------------------------------------


def hardware(config: Config) -> str:
    """The GPU here, or the machine."""
    import torch

    if config.generators.gpus_each and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return platform.processor() or platform.machine()


def kv_completions(config: Config, tokens: float) -> int | None:
    """Completions of so many tokens, prompts included, that fit an engine's KV cache, as `config/memory.py` reckons."""
    is_sglang = config.generators.gpus_each > 0 and config.generators.engine == "sglang"
    if not is_sglang or (size := size_at(config.model.path)) is None:
        return None
    return max(1, int(engine_gpu(size, config, Card.of(config)).tokens / tokens))
