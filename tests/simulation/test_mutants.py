"""Every planted mistake is found within few seeds, and the product without one passes the same seeds."""

import pytest

from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.schedules import failure_of
from tests.simulation.world import World

SEEDS = 1000


def first_failing_seed(limit: int) -> tuple[int, Exception] | None:
    for seed in range(limit):
        failure = failure_of(World(seed))
        if failure is not None:
            return seed, failure
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_mistake_is_found(name: str):
    with planted(name):
        assert first_failing_seed(SEEDS) is not None, f"{name} lives through {SEEDS} seeds"
