"""What a person is told of a run's curves."""

from asyncgrpo.learner.record import ENOUGH, LITTLE, WINDOW, TrainingWatch


def step(share: float) -> dict:
    return {
        "event": "step",
        "zero_signal_groups": round(100 * (1 - share)),
        "lags": {"0": 60, "1": 40},
        "reward_mean": 0.99,
    }


def evaluation(step: int, reward: float | None) -> dict:
    return {"event": "eval", "step": step, "reward_mean": reward}


def told(watch: TrainingWatch, events: list[dict]) -> list[tuple[int, str]]:
    """When something was said, and about what."""
    seen = [(number, watch.see(event)) for number, event in enumerate(events)]
    return [(number, warning[0]) for number, warning in seen if warning is not None]


def test_little_signal_is_said_once_and_again_after_it_was_enough():
    watch = TrainingWatch()
    assert told(watch, [step(0.05)] * (WINDOW - 1)) == [], "not before the window is full"
    assert told(watch, [step(0.05)] * 3 * WINDOW) == [(0, "signal")]
    between = (LITTLE + ENOUGH) / 2
    assert told(watch, [step(between)] * WINDOW + [step(0.0)] * WINDOW) == [], "it was never enough in between"
    assert told(watch, [step(0.9)] * WINDOW) == []
    assert [about for _, about in told(watch, [step(0.0)] * WINDOW)] == ["signal"]


def test_the_warning_names_the_share_and_the_way_out():
    watch = TrainingWatch()
    *_, last = [watch.see(step(0.04)) for _ in range(WINDOW)]
    assert last is not None and "only 4%" in last[1] and "algorithm.filter_zero_signal=true" in last[1]


def test_an_evaluation_that_fell_twice_in_a_row_is_said_once():
    watch = TrainingWatch()
    rising = [evaluation(n, value) for n, value in enumerate((0.1, 0.5, 1.0))]
    assert told(watch, [*rising, evaluation(3, 0.9), evaluation(4, 1.0)]) == [], "one may be chance"
    assert told(watch, [evaluation(5, 0.9), evaluation(6, 0.9), evaluation(7, 0.9)]) == [(1, "evaluation")]
    assert told(watch, [evaluation(8, 1.0), evaluation(9, 0.8), evaluation(10, 0.8)]) == [(2, "evaluation")]


def test_small_dips_and_evaluations_without_a_score_say_nothing():
    watch = TrainingWatch()
    assert told(watch, [evaluation(n, value) for n, value in enumerate((0.1, 1.0, 0.97, 0.96, None, 0.98))]) == []
