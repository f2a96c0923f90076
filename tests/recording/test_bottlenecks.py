"""Six bottlenecks made on purpose, with the product's services on the virtual clock: the advice is right, and it helps."""

from pathlib import Path

import pytest

from asyncgrpo.recording.advice import Advice
from asyncgrpo.recording.events import read_events
from tests.recording.bottlenecks import CASES, Found, followed, found_in, virtual_events

STEPS = 24
RUNS = Path(__file__).parent / "recorded"


def before_and_after(name: str) -> tuple[Found, Advice, Found]:
    """A run, its most urgent advice, and the run that follows it."""
    case = CASES[name]
    before = found_in(virtual_events(case, STEPS), case)
    advice = before.advice[0]
    assert advice.bottleneck in case.bottlenecks, advice
    after = case.with_setting(followed(advice))
    return before, advice, found_in(virtual_events(after, STEPS), after)


def recorded(name: str) -> tuple[Found, Advice, Found]:
    """As `before_and_after`, of whole runs."""
    case = CASES[name]
    before, after = (found_in(list(read_events(RUNS / f"{name}-{when}.jsonl")), case) for when in ("before", "after"))
    advice = before.advice[0]
    assert advice.bottleneck in case.bottlenecks, advice
    return before, advice, after


@pytest.mark.parametrize("name", ["few", "long", "reward", "learner"])
def test_following_the_advice_makes_steps_as_much_shorter_as_it_says(name):
    before, advice, after = before_and_after(name)
    assert advice.gain > 0.3
    assert 1 - after.step_s / before.step_s == pytest.approx(advice.gain, abs=0.2)


def test_generators_that_are_not_needed_are_given_back_for_nothing():
    before, advice, after = before_and_after("many")
    assert followed(advice) == "generators.count=2"
    assert after.step_s < 1.02 * before.step_s


@pytest.mark.parametrize("look", [before_and_after, recorded])
def test_groups_without_signal_are_trained_no_more(look):
    before, advice, after = look("signal")
    assert followed(advice) == "algorithm.filter_zero_signal=true"
    assert before.signal < 0.4 and after.signal == 1
    assert after.step_s / after.signal < 1.05 * before.step_s / before.signal, "no longer for a group with signal"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("few", "generators.count=5"),
        ("many", "generators.count=2"),
        ("long", "buffer.max_lag=4"),
        ("reward", "reward.workers=4"),
        ("learner", "learner.ranks=2"),
    ],
)
def test_whole_runs_say_the_same(name, setting):
    """Recorded by `python -m benchmarks.bottlenecks --real` of commit 2657806 on two busy cores."""
    before, advice, after = recorded(name)
    assert followed(advice) == setting
    assert after.step_s < (1 - advice.gain + 0.05) * before.step_s
