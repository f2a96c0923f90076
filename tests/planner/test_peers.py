"""Other systems' schedules, on lengths whose times are worked out by hand."""

import numpy as np
import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.compare import compare
from asyncgrpo.planner.peers import PEERS, Gpus, best_split, drained, lengths_of, one_step_off, split
from asyncgrpo.planner.presets import preset_profile
from tests.planner.profiles import long_tail, profile

GENERATE_S = 100 * (0.02 + 0.001 * 16)  # 32 completions of 100 tokens, 16 in each of two engines
TRAIN_S = 1.0 + 0.001 * 3200 / 2
PUBLISH_S = 0.5
GPUS = Gpus(generators=2, ranks=2)


def same(steps: int = 10) -> np.ndarray:
    return lengths_of(profile(), steps)


def test_taking_turns_is_a_sum():
    assert split(profile(), GPUS, same()).step_s == pytest.approx(GENERATE_S + TRAIN_S + PUBLISH_S)


def test_one_step_off_waits_for_the_slower_side():
    assert one_step_off(profile(), GPUS, same()).step_s == pytest.approx(max(GENERATE_S, TRAIN_S) + PUBLISH_S)
    quick = Gpus(generators=8, ranks=2)
    assert one_step_off(profile(), quick, same()).step_s == pytest.approx(TRAIN_S + PUBLISH_S)


def test_draining_waits_for_what_runs_before_weights_change():
    task = profile(groups_in_flight=8)
    found = drained(task, GPUS, same(20))
    assert max(GENERATE_S, TRAIN_S) + PUBLISH_S <= 1e-9 + found.step_s <= GENERATE_S + TRAIN_S + PUBLISH_S
    assert 0 < found.lag_mean <= 2


def test_what_does_not_fit_the_cache_waits():
    half = profile(kv_completions=8)
    assert split(half, GPUS, same()).step_s == pytest.approx(2 * 100 * (0.02 + 0.001 * 8) + TRAIN_S + PUBLISH_S)


def test_the_best_split_is_the_best_of_all():
    task = profile(lengths=long_tail())
    lengths = lengths_of(task, 8)
    found, outcome = best_split(task, one_step_off, 8, lengths)
    steps = {n: one_step_off(task, Gpus(n, 8 - n), lengths).step_s for n in range(1, 8)}
    assert outcome.step_s == steps[found.generators] == min(steps.values())


def test_all_schedules_train_the_same_lengths_and_ours_is_no_slower_than_turns():
    rows = {row["policy"]: row for row in compare(profile(lengths=long_tail()), 4, ("asyncgrpo", *PEERS))}
    assert rows["asyncgrpo"]["s/step"] <= rows["split"]["s/step"]
    assert max(row["times"] for row in rows.values()) == pytest.approx(
        rows["split"]["s/step"] / rows["asyncgrpo"]["s/step"], rel=0.3
    )
    assert min(row["times"] for row in rows.values()) == 1.0


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"--preset 8b: .*expected 7b-long-tail"):
        preset_profile("8b")
