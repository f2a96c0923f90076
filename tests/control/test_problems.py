"""What a run's own events say is wrong: each problem from the events that mean it, and none from a healthy run."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncgrpo.control.api import of_status, read_runbook
from asyncgrpo.control.client import ProcessStatus, Status
from asyncgrpo.errors import DataError
from asyncgrpo.recording.health import CONDITIONS, Problem, View, problems_in
from tests.control.operators import FakeOperator, step

NOW = 10_000.0


def status(**fields: Any) -> Status:
    return msgspec.structs.replace(FakeOperator(Path("demo")).status(), **{"started": NOW - 5000} | fields)


def events(*more: dict[str, Any], last: float = NOW - 5, **fields: Any) -> list[dict[str, Any]]:
    steps = [{"event": "step", "time": last - 12 + n, **step(n, **fields)} for n in range(1, 13)]
    return [{"event": "start", "time": last - 20, "run": "demo", "step": 0}, *steps, *more]


def names(of: list[dict[str, Any]], now: Status | None = None, free: float = 1e12) -> list[str]:
    return [problem.name for problem in found(of, now, free)]


def found(of: list[dict[str, Any]], now: Status | None = None, free: float = 1e12) -> list[Problem]:
    return problems_in(View(events=of, now=NOW, free_bytes=free, **of_status(now or status())))


def at(kind: str, seconds_ago: float = 2.0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": NOW - seconds_ago, **fields}


SILENT = status(processes=(ProcessStatus(name="buffer", state="working", heard_s=40.0),))
RESTART = at("restart", 60.0, actor="generator-0", reason="it ended")
BAD_SYNC = at("sync", version="1.9", engines=1, ms=3.0, checksum="ok", left_out=["generator-1"])
OTHER = at("sync", version="1.9", engines=1, ms=3.0, checksum="ok", gap_mean=0.2, gap_limit=0.01, differing=["g"])
PAUSED = at("rewards_paused", actor="generator-0", reason="the judge is down", probe_in_s=4.0)


@pytest.mark.parametrize(
    ("of", "now", "free", "name"),
    [
        (events(), SILENT, 1e12, "TargetDown"),
        (events(*[RESTART] * 4), None, 1e12, "ActorsRestarting"),
        (events(last=NOW - 700), None, 1e12, "NoProgress"),
        (events(at("stall", what="a batch", seconds=90.0)), None, 1e12, "Waiting"),
        (events(PAUSED), None, 1e12, "RewardsPaused"),
        (events(failures={"timeout": 9}), None, 1e12, "RewardFailures"),
        (events(BAD_SYNC), None, 1e12, "WeightSyncFailing"),
        (events(OTHER), None, 1e12, "WeightsDiffer"),
        (events(zero_signal_groups=8), None, 1e12, "NoSignal"),
        (events(filtered={"all_equal_low": 200}), None, 1e12, "NoSignal"),
        (events(dropped={"stale": 4}), None, 1e12, "GroupsDropped"),
        (events(logprob_gap_mean=0.4), None, 1e12, "LogprobGap"),
        (events(zero_signal_groups=7), None, 1e12, "LittleSignal"),
        (events(at("warning", about="evaluation", text="it falls")), None, 1e12, "Evaluation"),
        (events(at("warning", about="entropy", text="it has settled")), None, 1e12, "Entropy"),
        (events(), None, 1e9, "DiskAlmostFull"),
    ],
)
def test_each_is_told_by_the_name_of_its_alert(of, now, free, name):
    assert names(of, now, free) == [name]


def test_a_run_that_starts_waits_without_a_problem_for_ten_minutes():
    stall = at("stall", what="generators to start (0 of 2 have)", seconds=90.0)
    start = [{"event": "start", "time": NOW - 100, "run": "demo", "step": 0}]
    assert names([*start, stall], status(state="starting")) == []
    assert names([*start, stall], status(state="training")) == ["Waiting"]
    start[0]["time"] = NOW - 700
    assert names([*start, stall], status(state="starting")) == ["NoProgress"]
    assert names(events(last=NOW - 700), status(state="starting", started=NOW - 100)) == [], "it was killed before"


def test_a_run_that_saves_nothing_is_told():
    early = {"event": "start", "time": NOW - 8000, "run": "demo", "step": 0}
    assert names([early, *events()[1:]]) == ["CheckpointTooOld"]
    assert names([early, *events()[1:], at("checkpoint", step=4, path="p", seconds=1.0)]) == []


def test_a_paused_run_makes_no_progress_and_that_is_no_problem_unless_it_was_forgotten():
    assert names(events(last=NOW - 4000), status(state="paused")) == []
    paused = at("command", 4000.0, by="person", command="pause", reply="paused", refused=False)
    assert names(events(paused, last=NOW - 4000), status(state="paused")) == ["RunPaused"]


def test_every_problem_has_its_page():
    named = [condition.name for condition in CONDITIONS if not condition.page]
    assert [name for name in named if not read_runbook(name).startswith(f"# {name}\n")] == []
    with pytest.raises(DataError, match="does not come with this installation"):
        read_runbook("../security")


def test_what_is_over_is_no_problem():
    assert names(events()) == []
    resumed = at("rewards_resumed", 1.0, actor="generator-0", seconds=3.0)
    later = {"event": "step", "time": NOW - 1, **step(13)}
    assert names(events(PAUSED, resumed)) == []
    assert names(events(at("stall", what="a batch", seconds=90.0), later)) == []
    assert names(events(at("stall", 300.0, what="a batch", seconds=30.0), last=NOW - 330)) == [], "a long step since"
    assert names(events(*[at("restart", 3000.0, actor="generator-0", reason="x")] * 9)) == []
