"""What a step's event says of each data_source, and the parts of its rewards."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

from asyncgrpo.learner.report import PhaseClock, by_source, parts_of
from asyncgrpo.types import Completion, Group, Rollout, Score
from tests.learner.helpers import changed, make_group


def group(source: str, *rewards: float | None, tokens: int = 4, finish: str = "stop") -> Group:
    made = make_group(0, rewards, [[0] * tokens] * len(rewards))
    for index in range(len(rewards)):
        made = changed(made, index, finish_reason=finish)
    return replace(made, prompt=structs.replace(made.prompt, source=source))


def test_each_source_has_its_own_numbers():
    found = by_source(
        [group("a", 1.0, 0.0), group("b", 0.5, 0.5, tokens=8, finish="length"), group("a", 1.0, 1.0)], 2, 1.0
    )
    assert found["a"] == {
        "groups": 2, "reward_mean": 0.75, "success_share": 0.75, "zero_signal_share": 0.5,
        "completion_length_mean": 4.0, "truncated_share": 0.0,
    }  # fmt: skip
    assert found["b"] == {
        "groups": 1, "reward_mean": 0.5, "success_share": 0.0, "zero_signal_share": 1.0,
        "completion_length_mean": 8.0, "truncated_share": 1.0,
    }  # fmt: skip


def test_what_is_right_is_a_setting():
    groups = [group("a", 0.0, 0.5, 1.0, 2.0)]
    assert [by_source(groups, 4, success)["a"]["success_share"] for success in (0.5, 1.5)] == [0.75, 0.25]


def test_failures_and_the_greedy_completion_do_not_count():
    found = by_source([group("a", None, 1.0, 0.0), group("", None, None)], 2, 1.0)
    assert found["a"]["reward_mean"] == 1.0 and found["a"]["completion_length_mean"] == 4.0
    assert (found["(none)"]["reward_mean"], found["(none)"]["success_share"]) == (None, None)


def test_of_too_many_sources_the_rarest_are_one():
    groups = [group("often", 1.0)] * 3 + [group(f"of {i:02}", 0.0) for i in range(30)]
    found = by_source(groups, 1, 1.0)
    assert len(found) == 16 and found["often"]["groups"] == 3
    assert found["(others)"]["groups"] == 30 - 14 and sum(numbers["groups"] for numbers in found.values()) == 33


def rollouts(*parts: dict[str, float]) -> list[Rollout]:
    nothing = Completion(0, np.empty(0, np.int32), np.empty(0, np.float32), (), "stop")
    return [Rollout(nothing, Score(value=1.0, parts=part)) for part in parts]


def test_a_part_is_over_the_completions_that_have_it():
    parts = parts_of(rollouts({"b": 1.0, "a": 0.0}, {"a": 1.0}, {}))
    assert list(parts.items()) == [("a", [0.0, 1.0]), ("b", [1.0])]


def test_of_too_many_parts_those_are_kept_that_most_completions_have():
    parts = parts_of(rollouts(*[{"format": 0.5, f"of_{i}": 1.0} for i in range(100)]))
    assert len(parts) == 32 and len(parts["format"]) == 100


def test_the_time_of_a_phase_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncgrpo.learner.report.time", SimpleNamespace(monotonic=iter(range(20)).__next__))
    clock = PhaseClock()  # at 0 s, and each call takes a second
    with clock("wait_data"), clock("publish"), clock("checkpoint"):
        pass
    assert {name: spent for name, spent in clock.lap().items() if spent} == {
        "checkpoint": 1, "publish": 2, "wait_data": 2, "other": 2,
    }  # fmt: skip
