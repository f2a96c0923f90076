"""From a profile to a ranked list of splits: closed form for all, the product on the virtual clock for the best."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from asyncgrpo.config.load import recorded
from asyncgrpo.config.memory import Card
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.placement import changed, problems
from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.model import Prediction, Split, knee_groups, predict
from asyncgrpo.planner.profile import Profile
from asyncgrpo.planner.simulate import simulate

SIMULATED = 10
"""Splits that are simulated."""
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Bounds that are tried."""
NEARLY = 0.02
"""A bound or a split that costs no more of a step than this counts as equally good."""
FACTORS = [2 ** (power / 8) for power in range(-16, 17)]
"""Lengths for which a split is checked, over the profile's."""


@dataclass(frozen=True)
class Option:
    """One split."""

    split: Split
    expected: Prediction
    """By the closed form."""
    simulated: Prediction | None
    fits: bool
    """Whether each side fits its GPUs, where the model's size is known."""

    @property
    def best(self) -> Prediction:
        """What is known best of it."""
        return self.simulated or self.expected

    @property
    def flags(self) -> list[str]:
        """Its settings."""
        split = self.split
        return [
            f"generators.count={split.generators}",
            f"learner.ranks={split.ranks}",
            f"generators.groups_in_flight={split.groups_in_flight}",
            f"buffer.max_lag={split.max_lag}",
        ]


@dataclass(frozen=True)
class Plan:
    """The splits, best first, and how far the best one holds."""

    gpus: int
    profile: Profile
    options: tuple[Option, ...]
    shortest: float
    """Mean length, tokens, down to which it stays as good."""
    longest: float
    beyond: Split | None
    """The best one for lengths just above; none: it holds as far as was looked."""


def make_plan(
    profile: Profile,
    gpus: int | None = None,
    max_lag: int | None = None,
    *,
    simulated: int = SIMULATED,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """The splits of so many GPUs, best first.

    Args:
        gpus: to share; none: as many as the profile's run had.
        max_lag: the bound; none: the smallest that costs no more than `NEARLY` of a step.
        simulated: splits that are simulated, the best by the closed form.
        tell: called as each is done.
    Raises:
        ConfigError: there are too few GPUs.
    """
    gpus = gpus or profile.gpus
    options = [
        Option(split, predict(profile, split), None, fits(profile, split)) for split in splits(profile, gpus, max_lag)
    ]
    options.sort(key=lambda option: (not option.fits, option.expected.step_s))
    head = []
    for number, option in enumerate(options[:simulated]):
        head.append(replace(option, simulated=simulate(profile, option.split)))
        tell(number + 1, min(simulated, len(options)))
    head.sort(key=lambda option: (not option.fits, option.best.step_s))
    ranked = (*head, *options[simulated:])
    return Plan(gpus, profile, ranked, *validity(profile, gpus, ranked[0].split))


def splits(profile: Profile, gpus: int, max_lag: int | None = None) -> list[Split]:
    """All ways to share so many GPUs. Raises ConfigError where one side would get none."""
    each = profile.gpus_of_engine
    if gpus < each + 1:
        raise ConfigError(
            f"{gpus} {profile.units} are too few: an engine takes {each}, and the learner at least one more"
        )
    in_flight = groups_in_flight(profile)
    counts = range(1, (gpus - 1) // each + 1)
    found = [Split(count, gpus - count * each, in_flight, 0, profile.admission, profile.policy) for count in counts]
    return [replace(split, max_lag=best_max_lag(profile, split) if max_lag is None else max_lag) for split in found]


def groups_in_flight(profile: Profile) -> int:
    """Those that hold an engine at its knee, if the decode curve is known there; else as many as the profile's run had."""
    return knee_groups(profile) if profile.decode.is_near(profile.decode.knee) else profile.groups_in_flight


def best_max_lag(profile: Profile, split: Split) -> int:
    """The smallest bound with a step at most `NEARLY` longer than that of the largest."""
    steps = {lag: predict(profile, replace(split, max_lag=lag)).step_s for lag in LAGS}
    return next(lag for lag in LAGS if steps[lag] <= (1 + NEARLY) * min(steps.values()))


def fits(profile: Profile, split: Split) -> bool:
    """True if learner and engines fit their GPUs, or the model's size is not known."""
    if not (profile.config and profile.gpus_each):
        return True
    config = recorded(profile.config, "the profile")
    size = size_at(config.model.path)
    if size is None:
        return True
    placed = {
        "generators.count": split.generators,
        "generators.groups_in_flight": split.groups_in_flight,
        "learner.ranks": split.ranks,
        "cluster.share_gpu": False,
    }
    return not problems(size, changed(config, placed), Card.of(config))


def validity(profile: Profile, gpus: int, split: Split) -> tuple[float, float, Split | None]:
    """From which mean length to which `split` stays as good as it is, and the best split above.

    By the closed form, which may find it somewhat worse than the best already here, where the simulation chose it.
    """
    mean = profile.lengths.mean

    def excess(factor: float) -> tuple[float, Split]:
        """Its step over that of the best split, and that split, with lengths times `factor`."""
        longer = msgspec.structs.replace(profile, lengths=profile.lengths.times(factor))
        steps = {other: predict(longer, other).step_s for other in splits(longer, gpus, split.max_lag)}
        best = min(steps, key=lambda other: steps[other])
        return predict(longer, split).step_s / steps[best], best

    allowed = (1 + 2 * NEARLY) * excess(1.0)[0]
    below, above = math.nan, mean * FACTORS[-1]
    for factor in FACTORS:
        found, best = excess(factor)
        if found <= allowed and math.isnan(below):
            below = factor * mean
        if found > allowed and factor > 1:
            return below, factor * mean, best
    return below, above, None
