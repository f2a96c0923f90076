"""Every planted mistake is found within few seeds, and the product without one passes the same seeds."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.simulation.checker import Violation
from tests.simulation.mutants import FOUND_BY, MUTANTS, SHOWN_UNDER, planted
from tests.simulation.schedules import failure_of
from tests.simulation.world import World

SEEDS = 600


def find(seeds: Iterable[int], settings: dict[str, Any]) -> tuple[int, Exception] | None:
    for seed in seeds:
        failure = failure_of(World(seed, **settings))
        if failure is not None:
            return seed, failure
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_mistake_is_found(name: str):
    with planted(name):
        found = find([FOUND_BY[name], *range(SEEDS)], SHOWN_UNDER.get(name, {}))
    assert found is not None, f"{name} lives through {SEEDS} seeds"
    assert isinstance(found[1], Violation | AssertionError), (
        f"{name} is not the mistake that it was meant to be: {found}"
    )
