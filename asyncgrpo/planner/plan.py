"""Ways to split GPUs between generators and learner: of a profile in closed form, of a run by the model of its advice.

B prompts a step, G completions to each, L tokens of a completion on average, κ = E[longest of a group] / L, E engines that
hold W groups each, N learner ranks, f the share of groups that are replaced for lack of signal, r seconds of a reward,
B' = B / (1 − f). An engine takes τ(b) = a + c b seconds for a token of each of b completions. A publication takes s_l of
the learner's time and s_g of an engine's; the time in which the weights travel is in no formula.

    engine rate        μ(b) = b / τ(b)                                knee b* = 3 a / c: three quarters of the most, 1 / c
    time of a group    R = κ L τ(b) + r
    groups in flight   M = min(E W, (max_lag + 1) B − B T_l / T − B / 2)      slots, less those in training or ready
    completions        b = (M G / E) · L τ(b) / R                     of M groups, those that are still sampled
    generation         T_g = B' G L / (E μ(b)) + s_g
    learner            T_l = t_0 + t · tokens / N + s_l
    start of step n    S_n = max(S_{n−1} + max(T_l / 0.95, T_g), S_{n−1−max_lag} + T_l + r + τ(b) X_n)      X_n = longest of B G
    step               T = E[S_n − S_{n−1}]
    saturation         b / b*                                         unlike idleness, it sees a starved engine

The second term of S_n is the tail. A group takes its slot when the step n − 1 − max_lag has ended, and is trained by step n, so
max_lag + 1 steps last at least as long as the longest completion of each batch among them. Such stretches overlap, and a batch
that waited for one completion finds the next ones ready. So T has no closed form: the recursion runs with lengths that are drawn.
At max_lag 0 nothing overlaps: T = T_l + s_g + max(a E[longest of B G] + c B' G L / E + r, those of a place in turn). The sum is
the integral of τ over those that are left. In turn are the groups of a full engine, and what replaces one without signal.
An engine samples for a E[longest of B' G / E] + c B' G L / E of a step, as its groups begin together, and at least for
B' G L / (E μ(b)).

The mean lag counts publications from a group's lease to its step. By Little's law it is

    T_g > T_l     M / B' + 1 − idle_l
    T_g ≤ T_l     1 + Σ p_k,   p_k = P(R > k T), k = 1, 2, ...

and at most max_lag. Admission keeps B + F groups under way, F of them in flight when the learner asks. So its lag is the steps
that a group takes to generate, and not the bound. The learner may wait for 5 % of its time, which keeps the margin small. Where
it starves, for more than a quarter of it, all slots are used; if the tail is the reason, they are full of groups that are ready,
and the lag is max_lag.

Sources: Little (1961) for M = R / T; the rest is worked out here. tests/planner compares it with the product's scheduler on a
virtual clock, docs/benchmarks.md with runs.

A profile has the measurements of a task on some hardware, as one JSON file. `tune.py` measures it on the cluster.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from asyncgrpo.buffer.admission import JustInTime
from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import Card
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.placement import problems
from asyncgrpo.config.schema import Config, NonNegativeFloat, PositiveFloat, PositiveInt, Section, changed
from asyncgrpo.errors import ConfigError
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import LARGEST_BYTES, read_tail
from asyncgrpo.recording.pace import EVENTS, FEWEST, SETTLE, Pace, pace_of
from asyncgrpo.wire.rollouts import SCORED_AT_ONCE_S

# -- measurements: a profile -------------------------------------------------------------------------------------------

NEAR = 1.5
"""A decode curve is trusted up to so many times the load at which it was measured."""


class Lengths(Section, frozen=True, kw_only=True, cache_hash=True):
    """Lengths of completions, as measured: a sample draws groups, and completions within each."""

    groups: Annotated[tuple[Annotated[tuple[PositiveFloat, ...], Meta(min_length=1)], ...], Meta(min_length=1)]
    """Tokens of the completions of each group; all groups have one size."""

    def __post_init__(self) -> None:
        if len({len(group) for group in self.groups}) > 1:
            raise ValueError("groups have different numbers of completions")

    def sample(self, prompts: int, completions: int) -> np.ndarray:
        """Draw [prompts, completions] tokens, seeded. A completion of a group comes again only after all others."""
        rng = np.random.default_rng(0)
        drawn = np.array(self.groups)[rng.integers(len(self.groups), size=prompts)]
        repeats = -(-completions // drawn.shape[1])
        return rng.permuted(np.tile(drawn, (1, repeats)), axis=1)[:, :completions]

    @property
    def mean(self) -> float:
        """Tokens of a completion."""
        return self.longest_of(1, 1)

    def longest_of(self, prompts: int, completions: int) -> float:
        """Return the mean tokens of the longest of so many completions per prompt, over so many prompts."""
        return _mean_longest(self, prompts, completions)

    def spread(self, group_size: int) -> float:
        """κ: mean longest of a group over the mean length. A group is complete with its longest completion."""
        return self.longest_of(1, group_size) / self.mean


@cache
def _mean_longest(lengths: Lengths, prompts: int, completions: int) -> float:
    repeats = max(64, 65536 // (prompts * completions))
    return float(lengths.sample(repeats * prompts, completions).reshape(repeats, -1).max(axis=1).mean())


class _Line(Section, frozen=True, kw_only=True):
    """Seconds that grow with a load."""

    base_s: NonNegativeFloat
    """However small the load: a."""
    each_s: NonNegativeFloat
    """For each unit of the load: c."""
    measured: tuple[tuple[float, float], ...] = ()
    """(load, seconds) as measured."""

    def at(self, load: float) -> float:
        return self.base_s + self.each_s * load

    @property
    def residual(self) -> float:
        """Largest relative error of the line at a measured point; 0 without points."""
        return max((abs(self.at(load) / seconds - 1) for load, seconds in self.measured), default=0.0)


class DecodeCurve(_Line, frozen=True, kw_only=True, rename={"each_s": "per_completion_s"}):
    """Seconds of one token of each of b concurrent completions of an engine: a + c b."""

    def rate(self, running: float) -> float:
        """Return the tokens a second of one engine at so many completions."""
        return running / self.at(running) if running else 0.0

    @property
    def knee(self) -> float:
        """b* = 3 a / c: load at three quarters of the largest throughput. Infinite if c is 0."""
        return 3 * self.base_s / self.each_s if self.each_s else float("inf")

    def is_near(self, running: float) -> bool:
        """Return True if the curve was measured at about this load."""
        loads = [load for load, _ in self.measured]
        return not loads or min(loads) / NEAR <= running <= max(loads) * NEAR

    @staticmethod
    def fit(measured: list[tuple[float, float]]) -> "DecodeCurve":
        """Fit (completions, seconds of a token) by least squares of relative errors; neither part is negative.

        Measured at one load alone, both parts are taken to be equal there: then twice the load is 1.3 times the tokens a
        second, which errs by at most a third either way.
        """
        loads, seconds = np.array([b for b, _ in measured]), np.array([s for _, s in measured])
        if loads.max() < NEAR * loads.min():
            half = float(np.median(seconds)) / 2
            return DecodeCurve(base_s=half, each_s=half / float(loads.mean()), measured=tuple(measured))
        base, each = _line(loads, seconds)
        return DecodeCurve(base_s=base, each_s=each, measured=tuple(measured))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return intercept and slope of the line with the least sum of squared relative errors, neither negative."""
    best, _, _, _ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones_like(y), rcond=None)
    if best[1] < 0:
        return float(1 / np.mean(1 / y)), 0.0
    if best[0] < 0:
        return 0.0, float(np.mean(x / y) / np.mean((x / y) ** 2))
    return float(best[0]), float(best[1])


class LearnerTimes(_Line, frozen=True, kw_only=True, rename={"each_s": "rank_s_per_token"}):
    """Seconds of a step of the learner, without its publication, by the tokens of each rank, prompts included."""

    @staticmethod
    def fit(measured: list[tuple[float, float]]) -> "LearnerTimes":
        """Fit (tokens per rank, seconds of a step). With one size alone, all of the time depends on tokens."""
        tokens, seconds = np.array([t for t, _ in measured]), np.array([s for _, s in measured])
        base, each = 0.0, float(np.mean(seconds) / np.mean(tokens))
        if tokens.max() >= 1.2 * tokens.min():
            base, each = _line(tokens, seconds)
        return LearnerTimes(base_s=base, each_s=each, measured=tuple(measured))


class Profile(Section, frozen=True, kw_only=True):
    """A task on some hardware."""

    source: str
    """Origin, as shown to the user."""
    hardware: str
    config: Config
    """The configuration that was measured. An engine on the CPU counts as one process."""
    prompt_tokens: NonNegativeFloat = 0.0
    """Mean."""
    lengths: Lengths
    decode: DecodeCurve
    learner: LearnerTimes
    publish_s: NonNegativeFloat
    """Stall of the learner at a publication: the copy of its weights, and the wait for a free copy. The transfer overlaps with
    the next step."""
    pause_s: NonNegativeFloat
    """Pause of an engine at a publication."""
    reward_s: NonNegativeFloat = 0.0
    """Of one reward."""
    filtered: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the groups that are replaced because they have no signal."""
    kv_completions: PositiveInt | None = None
    """That fit one engine's KV cache at once; none: all."""

    @property
    def prompts_per_step(self) -> int:
        return self.config.buffer.prompts_per_step

    @property
    def group_size(self) -> int:
        return self.config.algorithm.group_size

    @property
    def gpus_of_engine(self) -> int:
        return max(1, self.config.generators.gpus_each)

    @property
    def units(self) -> str:
        """Name of what is split."""
        return "GPUs" if self.config.generators.gpus_each else "processes"

    @property
    def gpus(self) -> int:
        """GPUs of the run that was measured; without GPUs its generators and ranks."""
        return self.config.generators.count * self.gpus_of_engine + self.config.learner.ranks

    def learner_tokens(self, length: float) -> float:
        """Return the tokens that the learner runs in a step of completions of this mean length."""
        prompts = self.prompt_tokens * (1 if self.config.learner.share_prompts else self.group_size)
        return self.prompts_per_step * (self.group_size * length + prompts)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError, which names the file and the error in it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        instead = "`asyncgrpo tune CONFIG` writes a profile, and `asyncgrpo plan --from RUN` needs none"
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {instead}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a profile: {error}; `asyncgrpo tune CONFIG` writes one") from error


# -- prediction of one split -------------------------------------------------------------------------------------------

ROUNDS = 8
DRAWN = 4096
"""Groups whose longest completion is drawn."""
PATHS, TURNS = 64, 8
"""Recursions of the step that run side by side; steps of each, in stretches of max_lag + 1. The first half does not count."""
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Bounds that are tried."""
NEARLY = 0.02
"""A bound or a split that costs no more of a step than this counts as equally good."""


@dataclass(frozen=True)
class Split:
    """Numbers of generators and learner ranks, and the limits on groups under way."""

    generators: int
    ranks: int
    groups_in_flight: int
    """Of one engine."""
    max_lag: int

    @property
    def settings(self) -> dict[str, int]:
        return {
            "generators.count": self.generators,
            "learner.ranks": self.ranks,
            "generators.groups_in_flight": self.groups_in_flight,
            "buffer.max_lag": self.max_lag,
        }


@dataclass(frozen=True)
class Prediction:
    """An expected step. Seconds, tokens, optimizer steps."""

    step_s: float
    lag_mean: float
    tokens_per_s: float
    """Sampled tokens that are trained."""
    learner_idle: float
    """Share of time without a batch."""
    generator_idle: float
    """Share of time in which an engine samples nothing."""
    saturation: float
    """Completions that run in an engine on average, over the knee of the decode curve."""
    running: float
    """b, while any run."""
    bottleneck: str
    """`generators`, `rewards`, `learner` or `longest completions`."""


def predict(profile: Profile, split: Split) -> Prediction:
    """Return the expected step of a split."""
    return _synchronous(profile, split) if split.max_lag == 0 else _asynchronous(profile, split)


def learner_seconds(profile: Profile, ranks: int) -> float:
    """Return T_l: a step of the learner, its publication included."""
    tokens = profile.learner_tokens(profile.lengths.mean)
    return profile.learner.at(tokens / ranks) + profile.publish_s


def generate_seconds(profile: Profile, generators: int, in_flight: float) -> tuple[float, float]:
    """Return T_g and b, with so many groups in flight in all."""
    lengths, decode, size = profile.lengths, profile.decode, profile.group_size
    held, mean, longest = in_flight * size / generators, lengths.mean, lengths.longest_of(1, size)
    # b (κ L τ(b) + r) = held · L τ(b), for b; a group that only awaits its scores gives its place back
    square, constant = longest * decode.each_s, held * mean * decode.base_s
    linear = longest * decode.base_s + min(profile.reward_s, SCORED_AT_ONCE_S) - held * mean * decode.each_s
    running = _root(square, linear, -constant) if constant else held * mean / longest
    running = min(running, profile.kv_completions or math.inf)
    sampled_s = _useful(profile) * size * mean / generators / decode.rate(running)
    return max(sampled_s, _score_seconds(profile, generators)) + profile.pause_s, running


def _score_seconds(profile: Profile, generators: int) -> float:
    """Return the seconds in which the reward workers score the completions of a step."""
    completions = _useful(profile) * profile.group_size
    return completions * profile.reward_s / (generators * profile.config.reward.at_once)


def _root(square: float, linear: float, constant: float) -> float:
    """Return the positive root of `square` x² + `linear` x + `constant`."""
    if not square:
        return -constant / linear
    return (math.sqrt(linear * linear - 4 * square * constant) - linear) / (2 * square)


def _useful(profile: Profile) -> float:
    """Return B': groups that are generated for a step."""
    return profile.prompts_per_step / (1 - profile.filtered)


def _running_at(profile: Profile, generators: int, step_s: float) -> float:
    """Return b: completions that one engine runs when a step takes so long."""
    tokens_per_s = _useful(profile) * profile.group_size * profile.lengths.mean / (generators * step_s)
    left = 1 - profile.decode.each_s * tokens_per_s
    return tokens_per_s * profile.decode.base_s / left if left > 0 else math.inf


def _synchronous(profile: Profile, split: Split) -> Prediction:
    """Generate, then train, then publish."""
    lengths, size = profile.lengths, profile.group_size
    in_flight = min(profile.prompts_per_step, split.generators * split.groups_in_flight)
    waves_s, most = generate_seconds(profile, split.generators, in_flight)
    last_s = profile.decode.base_s * (lengths.longest_of(in_flight, size) - lengths.longest_of(1, size))
    tokens = _useful(profile) * size * lengths.mean / split.generators
    in_turn_s = _longest_in_turn(profile) + profile.decode.each_s * tokens + profile.pause_s
    generate_s = max(waves_s + last_s + profile.reward_s, in_turn_s)
    learn_s = learner_seconds(profile, split.ranks)
    running = tokens * profile.decode.at(most / 2) / generate_s
    return _prediction(profile, split, generate_s + learn_s, learn_s, running, most, 0.0, "longest completions")


def _longest_in_turn(profile: Profile) -> float:
    """Return the mean seconds, at no load, until all prompts of a step have a group with signal, one after the other."""
    rng, prompts = np.random.default_rng(0), profile.prompts_per_step
    longest = _longest_of_groups(profile.lengths, profile.group_size)
    tries = rng.geometric(1 - profile.filtered, (max(PATHS, DRAWN // prompts), prompts))
    seconds = np.zeros(tries.shape)
    for turn in range(tries.max()):
        drawn_s = profile.decode.base_s * rng.choice(longest, tries.shape) + profile.reward_s
        seconds += np.where(tries > turn, drawn_s, 0.0)
    return float(seconds.max(axis=1).mean())


def _asynchronous(profile: Profile, split: Split) -> Prediction:
    batch, engines, bound = profile.prompts_per_step, split.generators, split.max_lag + 1
    learn_s = learner_seconds(profile, split.ranks)
    trained_s = learn_s / (1 - JustInTime.MAY_WAIT)
    longest = _longest_of_batches(profile, TURNS * bound)
    step_s = learn_s
    for _ in range(ROUNDS):
        slots = bound * batch - batch * min(1.0, learn_s / step_s) - batch / 2
        in_flight = max(1.0, min(float(engines * split.groups_in_flight), slots))
        generate_s, most = generate_seconds(profile, engines, in_flight)
        running = min(most, _running_at(profile, engines, step_s))
        tail_s = longest * profile.decode.at(running) + profile.reward_s + learn_s
        step_s += 0.7 * (_mean_step(max(trained_s, generate_s), tail_s, bound) - step_s)
    if step_s <= (1 + NEARLY) * trained_s:
        bottleneck = "learner"
    elif generate_s < _mean_step(trained_s, tail_s, bound):
        bottleneck = "longest completions"
    else:
        is_scored = generate_s <= _score_seconds(profile, engines) + profile.pause_s
        bottleneck = "rewards" if is_scored else "generators"
    lag, starves = in_flight / _useful(profile) + learn_s / step_s, learn_s < (1 - JustInTime.STARVES) * step_s
    if starves and bottleneck == "longest completions":
        lag = split.max_lag
    elif starves and bottleneck == "rewards":  # groups that await scores hold all slots, and no places
        lag = slots / _useful(profile) + learn_s / step_s
    elif learn_s >= generate_s and not starves:
        lag = min(lag, _just_in_time_lag(profile, running, step_s))
    return _prediction(profile, split, step_s, learn_s, running, most, min(lag, split.max_lag), bottleneck)


@cache
def _longest_of_groups(lengths: Lengths, completions: int) -> np.ndarray:
    """Draw [DRAWN] tokens, sorted: the longest completion of each group."""
    return np.sort(lengths.sample(DRAWN, completions).max(axis=1))


def _longest_of_batches(profile: Profile, steps: int) -> np.ndarray:
    """Draw [steps, PATHS] tokens: the longest completion of each batch."""
    groups = _longest_of_groups(profile.lengths, profile.group_size)
    uniform = np.random.default_rng(0).random((steps, PATHS))
    return groups[(uniform ** (1 / profile.prompts_per_step) * len(groups)).astype(int)]  # the largest of so many draws


def _mean_step(least_s: float, tail_s: np.ndarray, bound: int) -> float:
    """Return E[S_n − S_{n−1}] of S_n = max(S_{n−1} + `least_s`, S_{n−`bound`} + `tail_s`_n)."""
    starts = [np.zeros(tail_s.shape[1])]
    for n, tail in enumerate(tail_s, start=1):
        start = starts[-1] + least_s
        starts.append(np.maximum(start, starts[n - bound] + tail) if n >= bound else start)
    half = len(tail_s) // 2
    return float((starts[-1] - starts[half]).mean()) / (len(tail_s) - half)


def _just_in_time_lag(profile: Profile, running: float, step_s: float) -> float:
    """Return the mean lag where generators begin groups just in time."""
    longest = _longest_of_groups(profile.lengths, profile.group_size)
    steps = (longest * profile.decode.at(running) + profile.reward_s) / step_s
    return 1 + sum(float((steps > k).mean()) for k in range(1, math.ceil(float(steps.max())) + 1))


def _sampling_seconds(profile: Profile, engines: int, most: float) -> float:
    """Return the seconds of a step in which an engine samples, at most `most` completions at once. Groups begin together."""
    groups, size = _useful(profile) / engines, profile.group_size
    tokens = groups * size * profile.lengths.mean
    longest_s = profile.decode.base_s * profile.lengths.longest_of(max(1, round(groups)), size)
    together_s = min(1.0, groups) * longest_s + profile.decode.each_s * tokens
    return max(together_s, tokens / profile.decode.rate(max(most, 1.0)))


def _prediction(
    profile: Profile,
    split: Split,
    step_s: float,
    learn_s: float,
    running: float,
    most: float,
    lag_mean: float,
    bottleneck: str,
) -> Prediction:
    tokens = profile.prompts_per_step * profile.group_size * profile.lengths.mean
    sampled_s = _sampling_seconds(profile, split.generators, most)
    return Prediction(
        step_s=step_s,
        lag_mean=lag_mean,
        tokens_per_s=tokens / step_s,
        learner_idle=max(0.0, 1 - learn_s / step_s),
        generator_idle=max(0.0, 1 - (sampled_s + profile.pause_s) / step_s),
        saturation=running / max(profile.decode.knee, 1.0),  # 0 where a token takes longer than its load grows
        running=running,
        bottleneck=bottleneck,
    )


# -- of all splits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One split."""

    split: Split
    expected: Prediction
    fits: bool
    """True if each side fits its GPUs, or the size of the model is unknown."""

    @property
    def flags(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.split.settings.items()]


@dataclass(frozen=True)
class Plan:
    """The splits, best first."""

    gpus: int
    profile: Profile
    options: tuple[Option, ...]


def make_plan(profile: Profile, gpus: int | None = None, max_lag: int | None = None) -> Plan:
    """Return the splits of so many GPUs, best first.

    Args:
        gpus: of the run, those of its teachers included; None: as many as the profile's run had.
        max_lag: the bound; None: the smallest that costs no more than `NEARLY` of a step.
    Raises:
        ConfigError: there are too few GPUs.
    """
    gpus = gpus - profile.config.teacher_gpus if gpus else profile.gpus
    options = [Option(split, predict(profile, split), fits(profile, split)) for split in splits(profile, gpus, max_lag)]
    options.sort(key=lambda option: (not option.fits, option.expected.step_s))
    return Plan(gpus, profile, tuple(options))


def splits(profile: Profile, gpus: int, max_lag: int | None = None) -> list[Split]:
    """Return all ways to share so many GPUs. Raises ConfigError if one side gets none."""
    each = profile.gpus_of_engine
    if gpus < each + 1:
        raise ConfigError(f"{gpus} {profile.units} are too few: an engine takes {each}, and the learner at least one")
    in_flight, multiple = groups_in_flight(profile), profile.config.learner.parallel.multiple
    counts = range(1, (gpus - 1) // each + 1)
    ranks = {count: (gpus - count * each) // multiple * multiple for count in counts}
    found = [Split(count, some, in_flight, 0) for count, some in ranks.items() if some]
    if not found:
        raise ConfigError(f"{gpus} {profile.units} are too few: learner.parallel takes a multiple of {multiple} ranks")
    return [replace(split, max_lag=best_max_lag(profile, split) if max_lag is None else max_lag) for split in found]


def groups_in_flight(profile: Profile) -> int:
    """Return the groups that keep an engine at its knee: past it the lag grows more than the throughput.

    If the curve is unknown there, they are those of the profile's run.
    """
    knee = min(profile.decode.knee, profile.kv_completions or math.inf)
    if math.isinf(knee) or not profile.decode.is_near(profile.decode.knee):
        return profile.config.generators.groups_in_flight
    return max(1, round(knee * profile.lengths.spread(profile.group_size) / profile.group_size))


def best_max_lag(profile: Profile, split: Split) -> int:
    """Return the smallest bound with a step at most `NEARLY` longer than that of the largest."""
    at_most_s = (1 + NEARLY) * predict(profile, replace(split, max_lag=LAGS[-1])).step_s
    return LAGS[
        bisect_left(LAGS[:-1], True, key=lambda lag: predict(profile, replace(split, max_lag=lag)).step_s <= at_most_s)
    ]


def fits(profile: Profile, split: Split) -> bool:
    """Return True if learner and engines fit their GPUs, or the size of the model is unknown."""
    config = profile.config
    if not config.generators.gpus_each or (size := size_at(config.model.path)) is None:
        return True
    return not problems(size, changed(config, split.settings | {"cluster.share_gpu": False}), Card.of(config))


# -- of a run ----------------------------------------------------------------------------------------------------------


def pace_of_run(run: Path) -> tuple[Pace, Config, int | None, tuple[Advice, ...]]:
    """Read the pace of a run under its present conditions from the end of its events.

    Returns:
        The pace, the configuration, the GPUs of the cluster (None: the events lack them), and the advice that `status` shows.
    Raises:
        ConfigError: the steps are too few.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run folder: it has no config.yaml")
    config, file = load_config(run / "config.yaml"), run / "metrics.jsonl"
    events = read_tail(file, -LARGEST_BYTES).events[-EVENTS:]
    first = read_tail(file, limit=10).events  # where the last start is too long ago
    gpus = next((event.get("gpus") for event in (*events[::-1], *first) if event["event"] == "start"), None)
    if (pace := pace_of(events, config)) is None:
        raise ConfigError(f"{run} has fewer than {SETTLE + FEWEST} steps since its last start or change; let it go on")
    return pace, config, gpus, advise(events, config, gpus=gpus)
