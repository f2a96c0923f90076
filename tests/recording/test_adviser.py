"""The adviser follows a run's events and tells what is new; the autopilot goes by it, one generator at a time."""

from pathlib import Path
from typing import get_args

import pytest

from asyncgrpo import metrics
from asyncgrpo.recording.advice import TELL_S, Advice, Adviser, Autopilot, Bottleneck
from asyncgrpo.recording.events import EventLog, read_events
from tests.recording.test_advice import BASE, step
from tests.runs import assert_declared

NOW = 1000.0


class Rig:
    """A run's file of events that `train` appends steps to, and its adviser."""

    def __init__(self, folder: Path) -> None:
        self.at = NOW
        self.events = EventLog(folder / "metrics.jsonl", clock=lambda: self.at)
        self.adviser = Adviser(self.events, BASE)
        self._step = 0
        self.events.write("start", run="r", lineage=1, version="1.0", step=0, sizes="")

    def train(self, **how: object) -> tuple[Advice, ...]:
        for _ in range(10):
            self._step += 1
            self.at += 1.0
            fields = {name: value for name, value in step(self._step, **how).items() if name not in ("event", "time")}
            self.events.write("step", version="1.1", reward_mean=0.0, loss=0.0, **fields)
        return self.adviser.look(self.at)

    def written(self) -> list[dict]:
        events = [event for event in read_events(self.events.path) if event["event"] == "advice"]
        for event in events:
            assert_declared(event)
        return events


def test_what_is_new_is_told_at_most_once_a_minute(tmp_path):
    rig = Rig(tmp_path)
    assert rig.adviser.look(NOW) == () and rig.written() == []
    (advice,) = rig.train(wait=0.5, full=1.0)
    assert [event["sentence"] for event in rig.written()] == [advice.sentence]
    rig.at += TELL_S
    rig.train(wait=0.55, full=1.0)
    assert len(rig.written()) == 1, "the figures differ, and what to do does not"
    many = {"wait": 0.0, "full": 0.1, "there": 3}
    rig.train(**many)
    assert [event["command"] for event in rig.written()][1:] == ["scale generators 2"]
    assert rig.written()[-1]["also"], "the learner's advice stands beside it"
    rig.train(wait=0.5, full=1.0)
    assert len(rig.written()) == 2, "less than a minute ago"
    rig.at += TELL_S
    rig.train(wait=0.5, full=1.0)
    assert [event["bottleneck"] for event in rig.written()] == ["generators"] * 3


def test_the_gain_is_a_metric_of_the_driver(tmp_path):
    rig = Rig(tmp_path)
    rig.train(wait=0.5, full=1.0)

    def gain(bottleneck: str) -> float:
        return metrics.registry("driver").get_sample_value("asyncgrpo_advice_gain_ratio", {"bottleneck": bottleneck})

    assert gain("generators") == pytest.approx(0.5)
    rig.train(wait=0.0, full=0.8, there=1)
    assert gain("generators") == 0 and gain("learner") == pytest.approx(0.2)
    assert all(gain(bottleneck) is not None for bottleneck in get_args(Bottleneck))


def asking(generators: int | None) -> tuple[Advice, ...]:
    return (Advice(bottleneck="generators", sentence="", evidence="", generators=generators),)


class Flight:
    """An autopilot that is asked every 20 s, and the generators that it has made of one at first."""

    def __init__(self, there: int, fewest: int = 1, most: int = 8) -> None:
        self.pilot, self.there, self.now_s = Autopilot(fewest, most), there, 0.0

    def looks(self, count: int, advice: tuple[Advice, ...]) -> list[int]:
        changes = []
        for _ in range(count):
            self.now_s += 20.0
            if (wanted := self.pilot.decide(advice, self.there, self.now_s)) is not None:
                self.there = wanted
                changes.append(wanted)
        return changes


def test_it_waits_for_three_looks_and_goes_by_one():
    flight = Flight(1)
    assert flight.looks(2, asking(4)) == []
    assert flight.looks(1, asking(4)) == [2]
    assert flight.looks(5, asking(4)) == [], "a rest after a change"
    assert flight.looks(1, asking(4)) == [3]
    assert flight.looks(60, asking(4)) == [4], "and no more than it says"


def test_advice_that_changes_begins_anew():
    flight = Flight(2)
    assert flight.looks(2, asking(4)) + flight.looks(1, ()) + flight.looks(2, asking(4)) == []
    other = (Advice(bottleneck="learner", sentence="", evidence=""), *asking(4))
    assert flight.looks(20, other) == [], "the most urgent counts"
    signal = (Advice(bottleneck="signal", sentence="", evidence="", gain=0.5),)
    assert Flight(1).looks(20, signal) == [] and Flight(1).looks(3, (*signal, *asking(4))) == [2], "but for signal"
    for bound, wanted in ((Flight(3, most=3), 6), (Flight(2, fewest=2), 1), (Flight(64, most=64), 80)):
        assert bound.looks(20, asking(wanted)) == [], "it stays within its bounds"


def test_a_number_that_was_too_few_is_not_tried_again_soon():
    flight = Flight(4)
    assert flight.looks(3, asking(3)) == [3]
    assert flight.looks(10, asking(4)) == [4]
    assert flight.looks(100, asking(3)) == []
    flight.now_s += Autopilot.RETRY_S
    assert flight.looks(3, asking(3)) == [3]
