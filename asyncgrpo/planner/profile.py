"""The measurements of a task on some hardware that a plan needs, as one JSON file.

`tune.py` measures it on the cluster, `plan.py` predicts from it, `simulation.py` simulates it.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from asyncgrpo.errors import ConfigError

FORMAT = 2
NEAR = 1.5
"""A decode curve is trusted up to so many times the load at which it was measured."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Lengths(_Part, frozen=True, kw_only=True, cache_hash=True):
    """Lengths of completions, as measured: a sample draws groups, and completions within each."""

    groups: Annotated[tuple[tuple[Positive, ...], ...], Meta(min_length=1)]
    """Tokens of the completions of each group; all groups have one size."""

    def sample(self, prompts: int, completions: int, seed: object = 0) -> np.ndarray:
        """Draw [prompts, completions] tokens. A completion of a group comes again only after all others."""
        rng = np.random.default_rng(seed)  # type: ignore[arg-type]
        drawn = np.array(self.groups)[rng.integers(len(self.groups), size=prompts)]
        repeats = -(-completions // drawn.shape[1])
        return rng.permuted(np.tile(drawn, (1, repeats)), axis=1)[:, :completions]

    @property
    def mean(self) -> float:
        """Tokens of a completion."""
        return _means(self, 1, 1)[0]

    def longest_of(self, prompts: int, completions: int) -> float:
        """Return the mean tokens of the longest of so many completions per prompt, over so many prompts."""
        return _means(self, prompts, completions)[1]

    def spread(self, group_size: int) -> float:
        """κ: mean longest of a group over the mean length. A group is complete with its longest completion."""
        return self.longest_of(1, group_size) / self.mean


@cache
def _means(lengths: Lengths, prompts: int, completions: int) -> tuple[float, float]:
    """Return the mean length and the mean of the longest, of seeded draws."""
    repeats = max(64, 65536 // (prompts * completions))
    drawn = lengths.sample(repeats * prompts, completions).reshape(repeats, -1)
    return float(drawn.mean()), float(drawn.max(axis=1).mean())


class DecodeCurve(_Part, frozen=True, kw_only=True):
    """Seconds of one token of each of b concurrent completions of an engine: a + c b."""

    base_s: NotNegative
    """a: however few run."""
    per_completion_s: NotNegative
    """c: for each one more."""
    measured: tuple[tuple[float, float], ...] = ()
    """(b, seconds) as measured."""

    def token_seconds(self, running: float) -> float:
        return self.base_s + self.per_completion_s * running

    def rate(self, running: float) -> float:
        """Return the tokens a second of one engine at so many completions."""
        return running / self.token_seconds(running) if running else 0.0

    @property
    def knee(self) -> float:
        """b* = 3 a / c: load at three quarters of the largest throughput. Infinite if c is 0."""
        return 3 * self.base_s / self.per_completion_s if self.per_completion_s else float("inf")

    @property
    def residual(self) -> float:
        """Largest relative error of the line at a measured point; 0 without points."""
        return max((abs(self.token_seconds(b) / seconds - 1) for b, seconds in self.measured), default=0.0)

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
            return DecodeCurve(base_s=half, per_completion_s=half / float(loads.mean()), measured=tuple(measured))
        base, each = _line(loads, seconds)
        return DecodeCurve(base_s=base, per_completion_s=each, measured=tuple(measured))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return intercept and slope of the line with the least sum of squared relative errors, neither negative."""
    best, _, _, _ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones_like(y), rcond=None)
    if best[1] < 0:
        return float(1 / np.mean(1 / y)), 0.0
    if best[0] < 0:
        return 0.0, float(np.mean(x / y) / np.mean((x / y) ** 2))
    return float(best[0]), float(best[1])


class LearnerTimes(_Part, frozen=True, kw_only=True):
    """Seconds of a step of the learner, without its publication."""

    base_s: NotNegative
    """However few tokens are trained."""
    rank_s_per_token: NotNegative
    """For each token, times the ranks that share the work."""
    measured: tuple[tuple[float, float], ...] = ()
    """(tokens for each rank, seconds) as measured."""

    def seconds(self, tokens: float, ranks: int) -> float:
        """Return the seconds of a step of so many tokens, prompts included."""
        return self.base_s + self.rank_s_per_token * tokens / ranks

    @property
    def residual(self) -> float:
        """Largest relative error of the line at a measured point."""
        errors = [abs((self.base_s + self.rank_s_per_token * each) / seconds - 1) for each, seconds in self.measured]
        return max(errors, default=0.0)

    @staticmethod
    def fit(measured: list[tuple[float, float]]) -> "LearnerTimes":
        """Fit (tokens per rank, seconds of a step). With one size alone, all of the time depends on tokens."""
        tokens, seconds = np.array([t for t, _ in measured]), np.array([s for _, s in measured])
        if tokens.max() < 1.2 * tokens.min():
            return LearnerTimes(
                base_s=0.0, rank_s_per_token=float(np.mean(seconds) / np.mean(tokens)), measured=tuple(measured)
            )
        base, each = _line(tokens, seconds)
        return LearnerTimes(base_s=base, rank_s_per_token=each, measured=tuple(measured))


class Profile(_Part, frozen=True, kw_only=True):
    """A task on some hardware."""

    format: Annotated[int, Meta(ge=1)] = FORMAT
    source: str
    """Origin, as shown to the user."""
    hardware: str
    model: str = ""
    engine: str = ""
    config: dict[str, Any] = {}
    """The configuration that was measured; empty: none."""
    prompts_per_step: Count
    group_size: Annotated[int, Meta(ge=2)]
    groups_in_flight: Count
    """Of one engine."""
    generators: Count
    """Of the run that was measured."""
    ranks: Count
    gpus_each: Annotated[int, Meta(ge=0)]
    """GPUs of one engine; 0: it ran on the CPU, and counts as one process."""
    max_lag: Annotated[int, Meta(ge=0)] = 4
    admission: str = "fresh"
    """Unused. Profiles of older releases have it."""
    policy: str = "wait"
    prompt_tokens: NotNegative = 0.0
    """Mean."""
    shares_prompts: bool = True
    """True if the learner runs a prompt once for all completions of its group."""
    lengths: Lengths
    decode: DecodeCurve
    learner: LearnerTimes
    publish_s: NotNegative
    """Stall of the learner at a publication: the copy of its weights, and the wait for a free copy. The transfer overlaps with
    the next step."""
    pause_s: NotNegative
    """Pause of an engine at a publication."""
    reward_s: NotNegative = 0.0
    """Of one reward."""
    reward_workers: Count = 1
    filtered: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the groups that are replaced because they have no signal."""
    kv_completions: Count | None = None
    """That fit one engine's KV cache at once; none: all."""

    @property
    def gpus_of_engine(self) -> int:
        return max(1, self.gpus_each)

    @property
    def units(self) -> str:
        """Name of what is split."""
        return "GPUs" if self.gpus_each else "processes"

    @property
    def gpus(self) -> int:
        """GPUs of the run that was measured; without GPUs its generators and ranks."""
        return self.generators * self.gpus_of_engine + self.ranks

    def learner_tokens(self, length: float) -> float:
        """Return the tokens that the learner runs in a step of completions of this mean length."""
        prompts = self.prompt_tokens * (1 if self.shares_prompts else self.group_size)
        return self.prompts_per_step * (self.group_size * length + prompts)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError, which names the file and the error in it."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); `asyncgrpo tune CONFIG` writes a profile"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a profile: {error}; `asyncgrpo tune CONFIG` writes one") from error
    if profile.format != FORMAT:
        raise ConfigError(f"{path} has format {profile.format}, this asyncgrpo reads {FORMAT}; measure it again")
    return profile
