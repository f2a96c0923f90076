"""Six bottlenecks made on purpose: the advice is right, and it helped the run that followed it.

Recorded by `python -m benchmarks.bottlenecks --real` of commit 2657806 on two busy cores.
"""

from pathlib import Path
from typing import Any

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.recording.advice import Advice, advise
from asyncgrpo.recording.events import read_events
from asyncgrpo.recording.pace import Pace, pace_of

RUNS = Path(__file__).parent / "recorded"


def found_in(name: str, settings: dict[str, Any]) -> tuple[Pace, Advice]:
    """Return the pace of a recorded run, and the first piece of its advice."""
    values = {"generators.count": 2, "generators.groups_in_flight": 8, "buffer.max_lag": 4, **settings}
    same = ["model.path=m", "data.train=t", "buffer.prompts_per_step=8", "algorithm.group_size=4", "reward.workers=1"]
    same += ["learner.ranks=1", "algorithm.filter_zero_signal=false"]
    config = load_config("quickstart", [*same, *(f"{key}={value}" for key, value in values.items())])
    events = list(read_events(RUNS / f"{name}.jsonl"))
    pace = pace_of(events, config)
    assert pace is not None
    return pace, advise(events, config)[0]


@pytest.mark.parametrize(
    ("name", "settings", "bottlenecks", "followed"),
    [
        ("few", {"generators.count": 1, "generators.groups_in_flight": 4}, ["generators"], "scale generators 5"),
        ("many", {"generators.count": 4}, ["generators"], "scale generators 2"),
        ("long", {"generators.groups_in_flight": 16, "buffer.max_lag": 1}, ["lengths", "bound"], "buffer.max_lag=4"),
        ("reward", {"generators.count": 1}, ["reward"], "reward.workers=4"),
        ("learner", {"generators.count": 1}, ["learner"], "learner.ranks=2"),
        ("signal", {}, ["signal"], "algorithm.filter_zero_signal=true"),
    ],
)
def test_the_advice_is_right_and_helped(name, settings, bottlenecks, followed):
    before, advice = found_in(f"{name}-before", settings)
    after, _ = found_in(f"{name}-after", settings)
    assert advice.bottleneck in bottlenecks and followed in f"{advice.command} {advice.sentence}"
    if name == "signal":
        assert before.no_signal > 0.8 and after.no_signal == 0
        assert after.step_s < 1.05 * before.step_s / (1 - before.no_signal), "no longer for a group with signal"
    else:
        assert after.step_s < (1 - advice.gain + 0.05) * before.step_s
