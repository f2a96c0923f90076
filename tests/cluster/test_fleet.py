"""The processes of a run without Ray: which generators the fleet ends, tells and starts again, and the start of a core."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo import liveness
from asyncgrpo.cluster import processes as module
from asyncgrpo.cluster.processes import Budget, Core, Fleet
from asyncgrpo.cluster.wiring import GeneratorActor, Setup
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config, DataConfig, GeneratorConfig, ModelConfig
from asyncgrpo.control.client import ProcessState, ProcessStatus
from asyncgrpo.errors import AsyncGRPOError, ConfigError, ProcessLost, StalledError
from asyncgrpo.liveness import RESTART_WINDOW_S
from asyncgrpo.wire.supervision import EndpointsChanged

ENDPOINTS = EndpointsChanged(buffer_endpoint="b", weights_endpoint="w")


class Ray:
    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.started: list[object] = []
        self.endpoints: list[EndpointsChanged] = []
        self.classes: list[type] = []
        self.kill = self.killed.append

    def remote(self, kind: type) -> Any:
        self.classes.append(kind)
        methods = {"run": SimpleNamespace(remote=lambda *_: object()), "start": SimpleNamespace(remote=self._start)}
        actor = SimpleNamespace(remote=lambda *_: SimpleNamespace(**methods))
        return SimpleNamespace(options=lambda **_: actor)

    def _start(self, *given: Any) -> object:
        self.started.append(object())
        self.endpoints += given[:1]
        return self.started[-1]


class Watch:
    """Reports for how long each generator is silent, in seconds, as a test says."""

    def __init__(self) -> None:
        self.silent_s: dict[str, float] = {}
        self.missed: dict[str, str] = {}
        self.loading: set[str] = set()
        self.works_for: dict[str, str] = {}
        """The buffer of each generator that has sent a heartbeat."""
        self.sent: list[tuple[str, EndpointsChanged]] = []

    def unhealthy_reason(self, name: str, incarnation: str, *, silent_s: float, still_s: float) -> str | None:
        age = self.silent_s.get(f"{name} {incarnation}", 0.0)
        return f"no heartbeat for {age:.0f} s" if age > silent_s else None

    def missing(self) -> dict[str, str]:
        return self.missed

    def send(self, name: str, message: EndpointsChanged) -> None:
        if name in self.works_for:
            self.sent.append((name, message))

    def has_begun(self, name: str, incarnation: str) -> bool:
        return name not in self.loading

    def heartbeat(self, name: str, incarnation: str) -> SimpleNamespace:
        return SimpleNamespace(buffer_endpoint=self.works_for.get(name, ""))

    def status(self, name: str, incarnation: str, *, restarts: int, is_leaving: bool) -> ProcessStatus:
        state: ProcessState = "working" if incarnation and self.has_begun(name, incarnation) else "starting"
        return ProcessStatus(name=name, state="leaving" if is_leaving else state, restarts=restarts)

    def forget(self, name: str) -> None:
        """Nothing to do: a test names the incarnation."""


@pytest.fixture
def plane(monkeypatch):
    """A fleet of two generators, its watch, its core, and the events that it has written."""
    monkeypatch.setattr(module, "ray", Ray())
    monkeypatch.setattr(module, "ended_of", lambda references: [])
    monkeypatch.setattr(liveness, "BACKOFF_S", (0.0,) * liveness.FAILED_STARTS)
    config = Config(
        model=ModelConfig(path="m"), data=DataConfig(train="t"), generators=GeneratorConfig(count=2, restarts=1)
    )
    setup = Setup(config, Path("run"), 1, None, None, "", config.generators.count)
    lost: list[tuple[str, str]] = []
    core = SimpleNamespace(lost=lost, generator_lost=lambda name, incarnation: lost.append((name, incarnation)))
    watch, written = Watch(), list[dict]()
    events = SimpleNamespace(write=lambda event, **fields: written.append({"event": event, **fields}))
    placement = SimpleNamespace(
        generator=lambda index: {},
        release_generator=lambda index: None,
        waits=lambda name, seconds: f"{name} waits since {seconds:.0f} s for 1 GPU",
    )
    on_address = lambda name, address: None  # noqa: E731
    fleet = Fleet(setup, placement, watch, events, count=2, on_address=on_address)  # type: ignore[arg-type]
    fleet.work_for(core, ENDPOINTS)  # type: ignore[arg-type]
    fleet.reconcile()
    return fleet, watch, core, written


def test_one_that_speaks_and_is_missed_by_another_process_for_long_is_replaced(plane, monkeypatch):
    fleet, watch, core, written = plane
    now_s = [time.monotonic()]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])

    def passes(seconds: float, missed: dict[str, str]) -> None:
        now_s[0] += seconds
        watch.missed = missed
        fleet.reconcile()

    both = {"generator-0-1.0": "learner-0", "generator-1-1.0": "buffer"}
    passes(0.0, both)
    passes(100.0, both)
    passes(1.0, {"generator-0-1.0": "learner-0"})
    assert core.lost == [], "the limit of the configuration is 120 s"
    passes(20.0, both)
    assert core.lost == [("generator-0", "1.0")]
    assert written[-1]["reason"] == "learner-0 has had no contact with it for 121 s"
    passes(100.0, both)
    assert core.lost == [("generator-0", "1.0")], "the other was in touch in between"


def test_a_restart_is_an_event_once_something_has_started(plane):
    fleet, watch, core, written = plane
    assert written == []
    watch.silent_s = {"generator-1 1.0": 500.0}
    fleet.reconcile(may_restart=False)
    assert core.lost == [("generator-1", "1.0")] and written == []
    watch.silent_s = {"generator-0 1.0": 500.0}
    fleet.leave()
    fleet.reconcile()
    assert written == [], "there is no core to work for"
    fleet.work_for(core, ENDPOINTS)
    fleet.reconcile()
    assert written == [{"event": "restart", "actor": "generator-0", "reason": "no heartbeat for 500 s", "count": 1}]


def test_one_that_may_not_start_again_is_no_restart_and_nothing_starts_while_the_run_ends(plane):
    fleet, watch, _, written = plane
    watch.silent_s = {"generator-0 1.0": 500.0, "generator-0 1.1": 500.0}
    fleet.reconcile()
    with pytest.raises(AsyncGRPOError, match="generator-0 ended 2 times within an hour"):
        fleet.reconcile()
    watch.silent_s |= {"generator-1 1.0": 500.0}
    fleet.reconcile(may_restart=False)
    assert [event["actor"] for event in written] == ["generator-0"] and not fleet._running


def test_one_that_ray_finds_no_place_for_is_said_once_and_the_others_go_on(plane, monkeypatch, caplog):
    fleet, watch, core, _ = plane
    watch.silent_s = {"generator-1 1.0": 500.0}  # its node is lost, and what replaces it has no place
    now_s, ray = [time.monotonic()], module.ray
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module, "ended_of", lambda references: [one for one in references if one is ray.started[0]])
    monkeypatch.setattr(module, "result", lambda reference, name: ("127.0.0.1", 1))
    fleet.reconcile()
    assert len(ray.started) == 3 and "waits since" not in caplog.text
    for _ in range(3):
        now_s[0] += module.NO_PLACE_S
        fleet.reconcile()
    assert caplog.text.count("waits since") == 1 and "generator-1 waits since 60 s for 1 GPU" in caplog.text
    assert len(ray.started) == 3 and core.lost == [("generator-1", "1.0")], "it is not given up"


def test_one_that_cannot_start_ends_by_its_own_reason(plane, monkeypatch):
    fleet, _, core, written = plane
    _, failed = module.ray.started
    why = "model.path: /models/a does not exist on the node 10.0.0.7"

    def result(reference: object, name: str) -> None:
        raise ConfigError(why)

    monkeypatch.setattr(module, "ended_of", lambda references: [one for one in references if one is failed])
    monkeypatch.setattr(module, "result", result)
    fleet.reconcile()
    assert core.lost == [("generator-1", "1.0")] and written[-1]["reason"] == why


def test_a_run_may_lose_a_generator_that_serves_or_whose_start_may_fail_once_more(plane):
    fleet, watch, _, _ = plane
    watch.loading, fleet._budgets[1] = {"generator-1"}, Budget("generator-1", 9)
    for start, may_lose in enumerate([True, True, False]):
        assert fleet.may_lose("generator-0") and fleet.may_lose("generator-1") == may_lose
        watch.silent_s = {f"generator-1 1.{start}": 500.0}
        with nullcontext() if may_lose else pytest.raises(AsyncGRPOError, match="before its engine served"):
            fleet.reconcile()


def test_ends_of_an_engine_that_has_served_are_no_failed_starts(plane):
    fleet, watch, _, written = plane
    fleet._budgets[0] = Budget("generator-0", 9)
    for start in range(liveness.FAILED_STARTS + 1):
        watch.silent_s = {f"generator-0 1.{start}": 500.0}
        fleet.reconcile()
    assert len(written) == liveness.FAILED_STARTS + 1
    assert module.ray.classes == [GeneratorActor], "Ray keeps each class that it makes"


def states(fleet: Fleet) -> dict[str, str]:
    return {process.name: process.state for process in fleet.processes()}


def test_one_that_is_too_many_leaves_when_it_ends_by_itself_and_costs_no_restart(plane):
    fleet, watch, core, written = plane
    fleet.scale(1)
    fleet.reconcile()
    assert fleet.leaving == ("generator-1-1.0",) and module.ray.killed == [], "it finishes what it holds"
    assert states(fleet) == {"generator-0": "working", "generator-1": "leaving"} and not fleet.is_whole
    watch.silent_s = {"generator-1 1.0": 500.0}
    fleet.reconcile()
    assert core.lost == [("generator-1", "1.0")] and written == [] and fleet.leaving == ()
    assert states(fleet) == {"generator-0": "working"}
    fleet.scale(2)
    assert states(fleet)["generator-1"] == "starting"
    fleet.reconcile()
    assert fleet._running[1].incarnation == "1.1", "no incarnation has two lives"
    assert written == [] and fleet.leaving == ()
    watch.silent_s = {"generator-1 1.1": 500.0}
    fleet.reconcile()
    assert [(e["actor"], e["count"]) for e in written] == [("generator-1", 1)], "from here on it is wanted"


@pytest.mark.parametrize("is_over", [True, False])
def test_one_that_exits_restarts_unless_it_ends_with_the_run(plane, monkeypatch, is_over):
    """A generator with a small engine is gone before the learner's ranks are. The run may go on with another core."""
    fleet, _, core, written = plane
    monkeypatch.setattr(module, "ended_of", list)
    monkeypatch.setattr(module, "result", lambda reference, name: ("host", 1))
    core.is_over = lambda: is_over
    fleet.reconcile()  # takes the results of their starts
    fleet.reconcile()
    restarts = [("generator-0", "it exited"), ("generator-1", "it exited")]
    assert [(one["actor"], one["reason"]) for one in written] == ([] if is_over else restarts)
    if is_over:
        fleet.reconcile()
        assert len(core.lost) == 2 and not fleet.is_up and len(module.ray.started) == 2
        fleet.leave()
        monkeypatch.setattr(module, "ended_of", lambda references: [])
        fleet.work_for(core, ENDPOINTS)
        fleet.reconcile()
        assert len(module.ray.started) == 4 and written == []


def test_one_that_leaves_and_is_wanted_again_still_ends_and_one_whose_engine_loads_is_gone_at_once(plane):
    fleet, watch, _, written = plane
    fleet.scale(1)
    fleet.scale(2)
    assert fleet.leaving == ("generator-1-1.0",), "it has no part in publications any more"
    watch.loading = {"generator-1"}
    fleet.scale(1)
    fleet.reconcile()
    assert states(fleet) == {"generator-0": "working"} and written == []


def test_generators_start_beside_the_first_core_and_are_told_where_it_is(plane):
    fleet, watch, core, _ = plane
    beside = Fleet(fleet._setup, fleet._placement, watch, fleet._events, count=2, on_address=fleet._on_address)
    ray = module.ray
    del ray.endpoints[:]
    beside.reconcile()
    assert [endpoints.buffer_endpoint for endpoints in ray.endpoints] == ["", ""], "there is no core yet"
    beside.work_for(core, ENDPOINTS)
    beside.reconcile()
    assert watch.sent == [], "none has sent a heartbeat, so none can be told"
    watch.works_for = {"generator-0": "", "generator-1": "b"}
    beside.reconcile()
    assert watch.sent == [("generator-0", ENDPOINTS)]
    beside.leave()
    watch.silent_s = {"generator-0 1.0": 500.0}
    beside.reconcile()
    beside.work_for(core, EndpointsChanged(buffer_endpoint="new", weights_endpoint="w"))
    beside.reconcile()
    assert ray.endpoints[-1].buffer_endpoint == "new", "one that starts then is not told of the lost core"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Starts a core of two ranks; `looks` says for each look after how many seconds, and which processes live then."""

    def begin(looks: list[tuple[float, set[str]]]) -> None:
        now_s, alive = [0.0], set[str]()
        placement: Any = SimpleNamespace(
            here=lambda: {},
            learner=lambda rank: {},
            require_this_node=lambda: None,
            waits=lambda name, seconds: f"{name} waits since {seconds:.0f} s",
        )
        watch: Any = SimpleNamespace(heartbeat=lambda name, incarnation: SimpleNamespace(pid=name in alive))

        def results(references: dict[str, object], while_waiting: Any) -> list[object]:
            for now_s[0], alive_now in looks:
                alive.update(alive_now)
                while_waiting()
            raise TimeoutError

        monkeypatch.setattr(module, "ray", Ray())
        monkeypatch.setattr(module, "results", results)
        monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
        settings = ["model.path=m", "data.train=t", "learner.ranks=2", "cluster.stall_timeout_s=200"]
        setup = Setup(load_config(None, settings), Path("run"), 1, None, None, "", 1)
        Core(setup, placement, watch, lambda name, address: None).start(lambda: None)

    return begin


def test_a_rank_that_ray_finds_no_place_for_is_said_once_and_ends_the_run_after_its_limit_for_a_stall(start, caplog):
    found = [(5.0, {"buffer", "learner-0"}), (59.0, set()), (61.0, set()), (90.0, set())]
    with pytest.raises(TimeoutError):
        start([*found, (91.0, {"learner-1"})])
    assert [record.getMessage() for record in caplog.records] == ["learner-1 waits since 61 s"]
    with pytest.raises(StalledError, match=r"learner-1 waits since 201 s \(cluster\.stall_timeout_s\)"):
        start([*found, (201.0, set())])


def test_a_budget_is_spent_within_an_hour_and_comes_back():
    now = [0.0]
    budget = Budget("generator-0", 2, clock=lambda: now[0])
    assert [budget.spent, budget.spend("a"), budget.spend("b"), budget.spent] == [0.0, 1, 2, 1.0]
    with pytest.raises(AsyncGRPOError, match=r"generator-0 ended 3 times within an hour \(2 .*the last time: c"):
        budget.spend("c")
    now[0] = RESTART_WINDOW_S + 1.0
    assert budget.spend("d") == 3
    assert Budget("generator-0", 0).spent == 0.0, "nothing to spend: the first end ends the run"


@pytest.mark.parametrize(("rank_1", "is_error"), [("its process died", False), ("CUDA out of memory", True)])
def test_the_rank_that_was_lost_is_named_and_not_one_that_lost_its_peer(monkeypatch, rank_1: str, is_error: bool):
    reasons = {"learner-0": "[gloo/transport/tcp/pair.cc:553] Connection closed by peer", "learner-1": rank_1}
    ended = ["learner-0"]  # Ray does not know of the other one yet

    def result(reference: str, name: str) -> None:
        loss = ProcessLost(f"{name}: {reasons[reference]}")
        loss.is_error = is_error or name == "learner-0"
        raise loss

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ended[:] = references[:num_returns]
        return ended, []

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(module, "result", result)
    monkeypatch.setattr(module, "ended_of", lambda references: [one for one in references if one in ended])
    core: Any = SimpleNamespace(_training=["learner-0", "learner-1"], _serving="buffer")
    core._cause = lambda: Core._cause(core)
    with pytest.raises(ProcessLost, match=f"^learner-1: {rank_1}$") as loss:
        Core.status(core)
    assert loss.value.is_error is is_error
