"""What a person is told of a run's curves."""

import json
from pathlib import Path

from asyncgrpo.learner.record import ENOUGH, LITTLE, WINDOW, TrainingWatch


def step(share: float) -> dict:
    without = round(100 * (1 - share))
    return {"event": "step", "zero_signal_groups": without, "lags": {"0": 60, "1": 40}, "reward_mean": 0.99}


def evaluation(step: int, reward: float | None, chance: float = 0.0) -> dict:
    suites = {"wide": {"numbers": {}}}
    if reward is not None:
        suites["eval"] = {"numbers": {"reward": [reward, reward - chance, reward + chance]}}
        suites["wide"] = {"numbers": {"reward": [reward, reward - 2 * chance, reward + 2 * chance]}}
    return {"event": "eval", "step": step, "reward_mean": reward, "suites": suites}


def told(watch: TrainingWatch, events: list[dict]) -> list[tuple[int, str]]:
    """When something was said, and about what."""
    seen = [(number, watch.see(event)) for number, event in enumerate(events)]
    return [(number, warning[0]) for number, warning in seen if warning is not None]


def test_little_signal_is_said_once_and_again_after_it_was_enough():
    watch = TrainingWatch()
    assert told(watch, [step(0.05)] * (WINDOW - 1)) == [], "not before the window is full"
    _, text = watch.see(step(0.05))
    assert "only 5%" in text and "algorithm.filter_zero_signal=true" in text
    assert told(watch, [step(0.05)] * 3 * WINDOW) == []
    between = (LITTLE + ENOUGH) / 2
    assert told(watch, [step(between)] * WINDOW + [step(0.0)] * WINDOW) == [], "it was never enough in between"
    assert told(watch, [step(0.9)] * WINDOW) == []
    assert [about for _, about in told(watch, [step(0.0)] * WINDOW)] == ["signal"]


def test_an_evaluation_that_fell_twice_in_a_row_is_said_once():
    dips = [evaluation(n, value) for n, value in enumerate((0.1, 1.0, 0.97, 0.96, None, 0.98))]
    assert told(TrainingWatch(), dips) == [], "small ones, and one without a score"
    for chance, said in ((0.02, []), (0.005, [(2, "evaluation")])):
        below = [evaluation(n, value, chance) for n, value in enumerate((0.75, 0.74, 0.74))]
        assert told(TrainingWatch(), below) == said, "the first one may be the best by chance"
    watch = TrainingWatch()
    rising = [evaluation(n, value) for n, value in enumerate((0.1, 0.5, 1.0))]
    assert told(watch, [*rising, evaluation(3, 0.9), evaluation(4, 1.0)]) == [], "one may be chance"
    assert told(watch, [evaluation(5, 0.9), evaluation(6, 0.9), evaluation(7, 0.9)]) == [(1, "evaluation")]
    assert told(watch, [evaluation(8, 1.0), evaluation(9, 0.8), evaluation(10, 0.8)]) == [(2, "evaluation")]


# -- small tasks, as they were recorded (docs/small-tasks.md) ----------------------------------------------------------

RECORDED: dict[str, dict[str, list]] = json.loads((Path(__file__).parent / "recorded_small_tasks.json").read_text())


def recorded(name: str) -> list[dict]:
    """The steps of a training of `benchmarks/small_tasks.py` at 2657806: 48 groups of 16 completions each."""
    columns = RECORDED[name]
    steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{"event": "step", "lags": {"2": 48}, "diagnostics": {"kl_k3": step.pop("kl_k3")}, **step} for step in steps]


def warnings_of(name: str) -> list[tuple[int, str, str]]:
    watch = TrainingWatch()
    seen = [(number, watch.see(event)) for number, event in enumerate(recorded(name), 1)]
    return [(number, *warning) for number, warning in seen if warning is not None]


def test_a_reward_that_never_leaves_0_is_said_as_soon_as_the_window_is_full():
    ((step, about, text),) = warnings_of("sort, exact")
    assert (step, about) == (WINDOW, "signal")
    assert "no completion of the last 20 steps has earned more than another (all have 0)" in text
    assert "reward parts of a right answer" in text and "algorithm.group_size" in text


def test_a_policy_that_has_settled_halfway_is_said_once_with_what_to_turn():
    found = [(step, text) for step, about, text in warnings_of("reverse, parts") if about == "entropy"]
    ((step, text),) = found
    assert 40 <= step <= 81 and "settled at a mean reward of 0.6" in text and "where the best completion has 1:" in text
    assert "smaller learner.lr" in text and "asyncgrpo samples RUN --worst" in text


def test_updates_that_are_too_large_are_said_before_anything_else():
    (step, about, text), *_ = warnings_of("count, fast")
    assert (step, about) == (WINDOW, "steps") and "lower learner.lr or buffer.max_lag" in text


def test_a_task_that_is_learnt_says_no_more_than_that_its_prompts_are_solved():
    assert [about for _, about, _ in warnings_of("copy, parts")] == ["signal"]


def test_a_student_that_becomes_as_certain_as_its_teacher_is_no_warning_where_no_reward_is_trained():
    taught = {"zero_signal_groups": 0, "reward_mean": 0.0, "reward_max": 0.0}
    steps = [step(1.0) | taught | {"entropy": 4.0 if n < WINDOW else 0.01} for n in range(4 * WINDOW)]
    assert told(TrainingWatch(), steps) == []
