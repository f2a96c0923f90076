"""The start of a core without Ray: what is logged when Ray finds no place for a process; restarts are counted by the hour."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo.cluster import processes as module
from asyncgrpo.cluster.processes import Budget, Core
from asyncgrpo.cluster.wiring import Setup
from asyncgrpo.config.load import load_config
from asyncgrpo.errors import AsyncGRPOError, StalledError
from asyncgrpo.liveness import RESTART_WINDOW_S


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Starts a core of two ranks; `looks` says for each look after how many seconds, and which processes live then."""

    def begin(looks: list[tuple[float, set[str]]]) -> None:
        now_s, alive = [0.0], set[str]()
        methods = SimpleNamespace(remote=lambda *arguments: None)
        actor = SimpleNamespace(remote=lambda *arguments: SimpleNamespace(start=methods))
        ray = SimpleNamespace(remote=lambda kind: SimpleNamespace(options=lambda **options: actor))
        placement: Any = SimpleNamespace(
            here=lambda: {}, learner=lambda rank: {}, waits=lambda name, seconds: f"{name} waits since {seconds:.0f} s"
        )
        watch: Any = SimpleNamespace(has_heard=lambda name, incarnation: name in alive)

        def results(references: dict[str, object], while_waiting: Any) -> list[object]:
            for now_s[0], alive_now in looks:
                alive.update(alive_now)
                while_waiting()
            raise TimeoutError

        monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(module, "results", results)
        monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
        settings = ["model.path=m", "data.train=t", "learner.ranks=2", "cluster.stall_timeout_s=200"]
        setup = Setup(load_config(None, settings), Path("run"), 1, None, None, "", 1)
        Core(setup, placement, watch).start(lambda: None)

    return begin


def test_a_rank_that_ray_finds_no_place_for_is_said_once(start, caplog):
    with pytest.raises(TimeoutError):
        start([(5.0, {"buffer", "learner-0"}), (59.0, set()), (61.0, set()), (90.0, set()), (91.0, {"learner-1"})])
    assert [record.getMessage() for record in caplog.records] == ["learner-1 waits since 61 s"]


def test_a_rank_without_a_place_ends_the_run_after_its_limit_for_a_stall(start):
    looks = [(5.0, {"buffer", "learner-0"}), (61.0, set()), (201.0, set())]
    with pytest.raises(StalledError, match=r"learner-1 waits since 201 s \(cluster\.stall_timeout_s\)"):
        start(looks)


def test_a_budget_is_spent_within_an_hour_and_comes_back():
    now = [0.0]
    budget = Budget("generator-0", 2, clock=lambda: now[0])
    assert [budget.spent, budget.spend("a"), budget.spend("b"), budget.spent] == [0.0, 1, 2, 1.0]
    with pytest.raises(AsyncGRPOError, match=r"generator-0 ended 3 times within an hour \(2 .*the last time: c"):
        budget.spend("c")
    now[0] = RESTART_WINDOW_S + 1.0
    assert budget.spend("d") == 3
    assert Budget("generator-0", 0).spent == 0.0, "nothing to spend: the first end ends the run"
