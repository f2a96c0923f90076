"""Every planted mistake is found within few seeds, and the product without one passes the same seeds."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.checker import Violation
from tests.simulation.mutants import MUTANTS, SHOWN_UNDER, planted
from tests.simulation.schedules import failure_of
from tests.simulation.world import World

SEEDS = 1000
PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
ROWS = re.findall(r"^\| `(\w+)`.* \| (\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
FOUND_BY = {name: int(seed) for name, seed in ROWS}
"""The seed that found each mutant when the page was written. It is tried first: the product may have changed since."""


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
