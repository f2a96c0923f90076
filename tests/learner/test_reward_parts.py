"""The parts of rewards in a step's event."""

import numpy as np

from asyncgrpo.learner.report import parts_of
from asyncgrpo.types import Completion, Rollout, Score


def rollouts(*parts: dict[str, float]) -> list[Rollout]:
    nothing = Completion(0, np.empty(0, np.int32), np.empty(0, np.float32), (), "stop")
    return [Rollout(nothing, Score(value=1.0, parts=part)) for part in parts]


def test_a_part_is_over_the_completions_that_have_it():
    parts = parts_of(rollouts({"b": 1.0, "a": 0.0}, {"a": 1.0}, {}))
    assert list(parts.items()) == [("a", [0.0, 1.0]), ("b", [1.0])]


def test_of_too_many_parts_those_are_kept_that_most_completions_have():
    parts = parts_of(rollouts(*[{"format": 0.5, f"of_{i}": 1.0} for i in range(100)]))
    assert len(parts) == 32 and len(parts["format"]) == 100
