"""Six bottlenecks made on purpose, and what the advice makes of the events of their runs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from asyncgrpo.config.load import load_config
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import pace_of


@dataclass(frozen=True)
class Case:
    """A run with a bottleneck: what the advice may call it, and the settings of the run."""

    bottlenecks: tuple[str, ...]
    generators: int = 2
    in_flight: int = 8
    max_lag: int = 4

    @property
    def settings(self) -> list[str]:
        return [
            *("model.path=m", "data.train=t", "buffer.prompts_per_step=8", "algorithm.group_size=4"),
            *("learner.ranks=1", "reward.workers=1", "algorithm.filter_zero_signal=false"),
            f"generators.count={self.generators}",
            f"generators.groups_in_flight={self.in_flight}",
            f"buffer.max_lag={self.max_lag}",
        ]


CASES = {
    "few": Case(("generators",), generators=1, in_flight=4),
    "many": Case(("generators",), generators=4),
    "long": Case(("lengths", "bound"), in_flight=16, max_lag=1),
    "reward": Case(("reward",), generators=1),
    "learner": Case(("learner",), generators=1),
    "signal": Case(("signal",)),
}


@dataclass(frozen=True)
class Found:
    """What the events of a run show."""

    step_s: float
    signal: float
    """The share of the groups with signal."""
    advice: tuple[Advice, ...]


def followed(advice: Advice) -> str:
    """Return the setting that the advice asks for: of its command, or else the first of its sentence."""
    if found := re.fullmatch(r"scale generators (\d+)", advice.command):
        return f"generators.count={found[1]}"
    found = re.search(r"\b\w+(?:\.\w+)+=\w+", advice.command or advice.sentence)
    assert found, f"nothing to follow: {advice}"
    return found[0]


def found_in(happened: Sequence[Event], case: Case) -> Found:
    config = load_config("quickstart", case.settings)
    pace, advice = pace_of(happened, config), advise(happened, config)
    assert pace is not None and advice, "the run was too short"
    return Found(pace.step_s, 1 - pace.no_signal, advice)
