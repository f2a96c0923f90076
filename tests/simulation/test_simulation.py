"""No seed breaks a promise of the rollout plane; and the simulation itself is a function of its seed."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.schedules import _short, failure_of, report
from tests.simulation.world import POLICIES, WITH_AUTO, World, without_faults


def run_seeds(first: int, count: int) -> list[World]:
    worlds = []
    for seed in range(first, first + count):
        world = World(seed)
        failure = failure_of(world)
        assert failure is None, report(world, failure)
        worlds.append(world)
    return worlds


def test_no_promise_is_broken_in_200_seeds_and_every_kind_of_fault_was_among_them():
    worlds = run_seeds(0, 200)
    struck = set().union(*(world.fault_counts for world in worlds))
    assert struck >= {
        "drop", "copy", "cut", "corrupt", "freeze", "generator_crash", "engine_failure", "generator_twice",
        "learner_crash", "buffer_crash", "driver_crash", "drain", "clock_jump", "weights_cut", "power_cut", "disk_full",
        "disk_error", "disk_killed", "bit_flip", "generator_lived_on", "answer_aborts", "answer_hangs", "killer_prompt",
        "reward_outage", "person_pause", "person_bound", "person_window", "person_leave", "person_checkpoint",
    }  # fmt: skip
    assert {world.config.buffer.durability for world in worlds} == {"memory", "written", "fsync_interval", "fsync_each"}
    assert sum(world.checker.promises.num_recovered for world in worlds) > 120, "groups came back from the journal"
    assert sum(world.checker.counts["given_away"] for world in worlds) > 10, "others went on with leases of silent ones"
    bounds = sum((world.checker.counts for world in worlds if world.max_lag == "auto"), Counter())
    assert sum(world.checker.counts["bound_asked_for"] for world in worlds) > 5
    assert bounds["bound_raised"] > 5 and bounds["bound_lowered"] > 20, bounds
    for max_lag in (0, 1, 4):
        some = [world for world in worlds if world.max_lag == max_lag and not world.checker.counts["bound_asked_for"]]
        lags = {lag for world in some if world.policy != "train" for lag in world.checker.lags}
        assert max(lags) == max_lag, f"max_lag {max_lag} was never reached, only {lags}"
        assert {world.policy for world in some} == set(POLICIES)


@pytest.mark.slow
def test_no_promise_is_broken_in_200_more_seeds():
    run_seeds(200, 200)


@pytest.mark.parametrize(
    ("max_lag", "policy"), [*itertools.product((0, 1, 4), POLICIES), *(("auto", policy) for policy in WITH_AUTO)]
)
def test_without_faults_every_prompt_is_trained_in_one_life(max_lag: int | str, policy: str):
    world = without_faults(3 if max_lag == "auto" else max_lag, max_lag=max_lag, policy=policy)
    assert failure_of(world) is None
    poisoned = sum(prompt.info["poison"] for prompt in world._prompts) * world.config.run.epochs
    outcomes = world._buffer.outcomes
    filtered, given_up = outcomes["filtered_zero_signal"], outcomes["dropped_always_stale"]
    assert given_up == 0 or policy == "drop"
    assert world.checker.counts["trained"] == world.num_prompts - poisoned - filtered - given_up
    assert world._lineage == 1


@pytest.mark.parametrize("seed", [17, 27, 45])
def test_a_seed_is_one_run_event_for_event(seed: int):
    def told(world: World) -> list[object]:
        assert failure_of(world) is None
        return [(at_s, what, [_short(d) for d in details]) for at_s, what, details in world.events]

    first, again = told(World(seed)), told(World(seed))
    assert first and first == again


def test_no_wait_of_the_rollout_plane_reads_a_clock_that_can_be_set():
    """Clock jumps in the simulation go forward only, as a monotonic clock's do; nothing may read another."""
    package = Path(__file__).parents[2] / "asyncgrpo"
    of_buffer = ("buffer/buffer", "buffer/admission", "buffer/group_health", "buffer/service", "buffer/evaluation")
    for name in (*of_buffer, "generators/service", "learner/ranks"):
        text = (package / f"{name}.py").read_text()
        assert "time.time(" not in text and "datetime" not in text, f"{name} reads the wall clock"
