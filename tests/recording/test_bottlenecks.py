"""Six bottlenecks made on purpose: the advice is right, and it helped the run that followed it.

Recorded by `python -m benchmarks.bottlenecks --real` of commit 2657806 on two busy cores.
"""

from pathlib import Path

import pytest

from asyncgrpo.recording.events import read_events
from tests.recording.bottlenecks import CASES, followed, found_in

RUNS = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("few", "generators.count=5"),
        ("many", "generators.count=2"),
        ("long", "buffer.max_lag=4"),
        ("reward", "reward.workers=4"),
        ("learner", "learner.ranks=2"),
        ("signal", "algorithm.filter_zero_signal=true"),
    ],
)
def test_the_advice_is_right_and_helped(name, setting):
    before, after = (
        found_in(list(read_events(RUNS / f"{name}-{when}.jsonl")), CASES[name]) for when in ("before", "after")
    )
    advice = before.advice[0]
    assert advice.bottleneck in CASES[name].bottlenecks and followed(advice) == setting
    if name == "signal":
        assert before.signal < 0.2 and after.signal == 1
        assert after.step_s / after.signal < 1.05 * before.step_s / before.signal, "no longer for a group with signal"
    else:
        assert after.step_s < (1 - advice.gain + 0.05) * before.step_s
