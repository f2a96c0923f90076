"""Restarts are counted by the hour."""

import pytest

from asyncgrpo.cluster.core import Budget
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.liveness import RESTART_WINDOW_S


def test_a_budget_is_spent_within_an_hour_and_comes_back():
    now = [0.0]
    budget = Budget("generator-0", 2, clock=lambda: now[0])
    assert [budget.spend("a"), budget.spend("b")] == [1, 2]
    with pytest.raises(AsyncGRPOError, match=r"generator-0 ended 3 times within an hour \(2 .*the last time: c"):
        budget.spend("c")
    now[0] = RESTART_WINDOW_S + 1.0
    assert budget.spend("d") == 3


def test_a_budget_tells_which_share_of_it_is_spent_as_the_hour_passes():
    now = [0.0]
    budget = Budget("generator-0", 4, clock=lambda: now[0])
    assert budget.spent == 0.0
    budget.spend("a")
    now[0] = RESTART_WINDOW_S / 2
    assert [budget.spend("b"), budget.spent] == [2, 0.5]
    now[0] = RESTART_WINDOW_S + 1.0
    assert budget.spent == 0.25
    assert Budget("generator-0", 0).spent == 0.0, "nothing to spend: the first end ends the run"
