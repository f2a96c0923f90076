"""The driver's own part of a run: what it makes before it starts a process, and what it waits for when it gives up."""

import json
import shutil
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo.cluster import run as run_module
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.run import Run
from asyncgrpo.cluster.wiring import Setup, compatibility_key_of, steps_at_most
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import ClusterConfig, Config, DataConfig, ModelConfig
from asyncgrpo.errors import AsyncGRPOError, CheckpointError, ProcessLost
from asyncgrpo.liveness import FAILED_STARTS
from asyncgrpo.metrics import targets_path
from asyncgrpo.recording.events import read_events
from asyncgrpo.types import Sampling
from asyncgrpo.wire.sockets import Server
from tests import scrape


class Core:
    """`statuses` has the status at each look: None, how it ended, or what went wrong; the last one stays."""

    def __init__(self, *statuses: str | AsyncGRPOError | None, can_save: bool = True) -> None:
        self.statuses, self.can_save = list(statuses), can_save
        self.asked: list[tuple[str, bool]] = []

    def drain(self, reason: str, *, is_failure: bool) -> None:
        self.asked.append((reason, is_failure))

    def status(self) -> str | None:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, AsyncGRPOError):
            raise status
        return status


def give_up(core: Core, folder: Path, *, is_held: bool = True) -> list[bool]:
    """Returns for each look at the generators whether one might be started again."""
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), cluster=ClusterConfig(stall_timeout_s=0.7))
    looks: list[bool] = []
    run: Any = Run(config, SimpleNamespace(path=folder, is_held=is_held), "")  # type: ignore[arg-type]
    run._fleet = SimpleNamespace(reconcile=lambda *, may_restart: looks.append(may_restart))
    run._watch = SimpleNamespace(listen=lambda: None)
    run._save_last_steps(core, "generator-1 ended too often")
    return looks


def test_neither_its_end_nor_its_silence_holds_up_the_end_of_the_run(tmp_path: Path, caplog):
    core = Core(None, None, ProcessLost("learner-0: its process died"))
    assert give_up(core, tmp_path) == [False, False], "no generator starts meanwhile"
    assert core.asked == [("generator-1 ended too often", True)]
    assert "no last checkpoint: learner-0: its process died" in caplog.text
    give_up(Core(None), tmp_path)
    assert "no last checkpoint: the learner did not end within 1 s" in caplog.text
    assert give_up(Core(None, can_save=False), tmp_path) == [], "no learner lives"
    assert give_up(core := Core(None), tmp_path, is_held=False) == core.asked == [], "its folder is gone"


@pytest.mark.parametrize("how", ["removed", "moved", "made again"])
def test_a_run_whose_folder_is_gone_ends_with_its_name(tmp_path: Path, how: str):
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    run: Any = Run(Config(model=ModelConfig(path="m"), data=DataConfig(train="t")), folder, "")
    looks: list[str] = []

    def start(while_starting: Any) -> None:
        while_starting()
        (folder.path / "config.yaml").touch()
        (folder.path / ".lock").unlink()
        while_starting()
        folder.path.rename(tmp_path / "moved")
        if how == "removed":
            shutil.rmtree(tmp_path / "moved")
        if how == "made again":
            RunFolder(folder.path).claim()
        while_starting()

    def look(*_: Any, **__: Any) -> None:
        looks.append("look")

    run._watch, run._fleet = SimpleNamespace(listen=look), SimpleNamespace(reconcile=look)
    run._teachers, run._steering = SimpleNamespace(reconcile=look, processes=tuple), SimpleNamespace(reconcile=look)
    with pytest.raises(CheckpointError, match=rf"run.out {folder.path} was removed or moved while the run was active"):
        run._train(SimpleNamespace(start=start, is_training=False))
    assert len(looks) == 8, "before that, and without its lock alone, it looked at every process"


@pytest.mark.parametrize(
    ("trained", "is_error", "restarts"),
    [
        ([False] * FAILED_STARTS, False, FAILED_STARTS - 1),
        ([False] * (FAILED_STARTS - 1) + [True] + [False] * FAILED_STARTS, False, 2 * FAILED_STARTS - 1),
        ([False], True, 0),  # the next one would meet the same error
        ([True] + [False] * FAILED_STARTS, True, FAILED_STARTS),
    ],
)
def test_a_core_is_replaced_until_several_in_a_row_have_not_trained_a_step(
    tmp_path: Path, monkeypatch, trained: list[bool], is_error: bool, restarts: int
):
    cores = iter(trained)

    def lose(run: Run, core: Any) -> str:
        core.steps_done = int(next(cores))
        loss = ProcessLost("learner-0: its process died")
        loss.is_error = is_error
        raise loss

    calls: list[str] = []
    core = lambda *_: SimpleNamespace(first_step=0, steps_done=None, end=lambda: calls.append("end"))  # noqa: E731
    monkeypatch.setattr(run_module, "Core", core)
    monkeypatch.setattr(run_module, "STACKS_S", 0.0)
    monkeypatch.setattr(Run, "_train", lose)
    config = load_config(None, ["model.path=m", "data.train=t", "generators.restarts=99"])
    run: Any = Run(config, RunFolder(tmp_path), "")
    run._placement, run._watch = None, SimpleNamespace(dump_stacks=lambda reason: calls.append("stacks"))
    run._fleet = SimpleNamespace(leave=lambda: None, is_up=True)
    run._steering = SimpleNamespace(config=config)
    with pytest.raises(ProcessLost, match="learner-0: its process died"):
        run._run_cores(Setup(config, tmp_path, 1, None, None, "", 1))
    lost = [event for event in read_events(tmp_path / "metrics.jsonl") if event["event"] == "restart"]
    assert [(event["actor"], event["count"]) for event in lost] == [("learner-0", n + 1) for n in range(restarts)]
    assert calls == ["end"] * restarts + ["stacks", "end"], "a process that is killed writes no stacks"


def give_it_up(run: Run) -> str:
    saved = run._folder.path / "step_000004"  # by the learner
    saved.mkdir()
    (saved / "state.json").write_text('{"step": 4, "lineage": 1, "prompts": {}}')
    run._folder.checkpoint = lambda: saved
    raise AsyncGRPOError("generator-1 ended too often")


def ask_twice(run: Run) -> str:
    run._asked_to_stop = 2
    raise KeyboardInterrupt


FAILS = pytest.raises(AsyncGRPOError, match=r"too often; checkpoint of step 4 written; the same command goes on")


@pytest.mark.parametrize(
    ("how", "ends"),
    [(give_it_up, FAILS), (lambda run: "done", nullcontext()), (ask_twice, suppress(KeyboardInterrupt))],
)
def test_a_run_that_gives_up_is_still_listed_so_that_monitoring_misses_it(tmp_path: Path, monkeypatch, how, ends):
    def listed(run: Run) -> str:
        run._export_from("learner-0", ("127.0.0.1", 4711))
        return how(run)

    monkeypatch.setattr(run_module, "ray_session", lambda config: nullcontext())
    monkeypatch.setattr(run_module, "decide_device", lambda config: config)
    monkeypatch.setattr(run_module, "uses_cuda", lambda config: False)
    monkeypatch.setattr(run_module, "check_bind_reaches", lambda *_: None)
    monkeypatch.setattr(run_module, "Placement", lambda *_, **__: SimpleNamespace(addresses=[], close=lambda: None))
    monkeypatch.setattr(Run, "_start_services", listed)
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"))
    folder = SimpleNamespace(path=tmp_path / "run", checkpoint=lambda: None)
    with ends:
        Run(config, folder, "").execute()  # type: ignore[arg-type]
    assert targets_path(tmp_path / "run").exists() == (how is give_it_up)
    if how is give_it_up:
        (entry,) = json.loads(targets_path(tmp_path / "run").read_text())
        assert (entry["targets"], entry["labels"]["role"]) == (["127.0.0.1:0"], "driver")


def test_a_closed_terminal_drains_the_run_however_often_it_is_told_unless_nohup_ignores_it(tmp_path: Path):
    run: Any = Run(Config(model=ModelConfig(path="m"), data=DataConfig(train="t")), RunFolder(tmp_path), "")
    on_signals, before = run_module._on_signals, signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signals(run._stop, run._ask_to_stop):
            signal.raise_signal(signal.SIGHUP)
        assert run._asked_to_stop == 0, "nohup"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with on_signals(run._stop, run._ask_to_stop):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert run._asked_to_stop == 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_signals_at_once_as_of_timeout_are_one_and_a_later_one_ends_the_run(tmp_path: Path, monkeypatch):
    run: Any = Run(Config(model=ModelConfig(path="m"), data=DataConfig(train="t")), RunFolder(tmp_path), "")
    now_s = [100.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now_s[0])
    with run_module._on_signals(run._stop, run._ask_to_stop):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert run._asked_to_stop == 1
        now_s[0] += 0.3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_full_disk_is_reported_once_until_it_has_space_again(tmp_path: Path, monkeypatch):
    run: Any = Run(Config(model=ModelConfig(path="m"), data=DataConfig(train="t")), RunFolder(tmp_path), "")
    told: list[str] = []
    run._report = told.append
    for free in (2**30, 0, 2**20, 0, 2**30, 2**20, 0):
        monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        run._report_full_disk()
    assert told == [f"the disk of {tmp_path} is full: events, groups and checkpoints wait for space"] * 2


class NoFurther(Exception):
    pass


def setup_on(bind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    told = []

    def core(setup: Setup, *_: object) -> None:
        told.append(setup)
        raise NoFurther

    monkeypatch.setattr(run_module, "Core", core)
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), cluster=ClusterConfig(bind=bind))
    with pytest.raises(NoFurther):
        run: Any = Run(config, RunFolder(folder), "")
        run._placement = SimpleNamespace()
        run._start_services()
    return told[0]


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_every_run_has_keys_a_metric_of_its_disk_and_metrics_leave_loopback_with_a_token_only(
    bind, tmp_path, monkeypatch
):
    usage = SimpleNamespace(free=123_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage if path == tmp_path else None)
    monkeypatch.setattr(run_module, "host_of", lambda config: "127.0.0.1")
    setup, again = (setup_on(bind, tmp_path, monkeypatch) for _ in range(2))
    assert setup.keys != again.keys, "each start makes its own"
    assert (setup.metrics_token is None) == (bind == "127.0.0.1")
    Server(bind, setup.keys).close()
    usage.free = 7
    assert "asyncgrpo_disk_free_bytes 7.0\n" in scrape.exposition("driver"), "as it is at each scrape"


def test_the_number_of_steps_follows_from_the_prompts_that_are_left():
    """20 prompts in 2 epochs; 12 were done in 3 steps of 4, before `prompts_per_step` was 8."""
    prompts = SimpleNamespace(prompts=range(20), num_done=12)
    for settings, expected in ((), 7), (["run.epochs=1"], 4), (["run.steps=5"], 5), (["run.epochs=null"], None):
        needed = ["model.path=m", "data.train=t", "run.epochs=2", "buffer.prompts_per_step=8", *settings]
        assert steps_at_most(load_config(None, needed), prompts, 3) == expected  # type: ignore[arg-type]


def test_groups_of_another_size_score_or_teacher_are_not_trained_and_those_of_the_same_at_another_url_are():
    def key(*settings: str) -> dict[str, str]:
        needed = ["model.path=m", "data.train=t", "algorithm.kl_coef=1", *settings]
        return compatibility_key_of(load_config(None, needed, is_complete=False), Sampling(), "prompts")

    here = key("teacher.url=http://a:1", "teacher.path=t")
    assert here == key("teacher.url=http://b:2", "teacher.path=t")
    same = ("teacher.url=http://a:1", "teacher.path=t")
    more = ("teacher.path=u", "teacher.top_k=8", "algorithm.group_size=4", "reward.code.score=all")
    others = [key(), *(key(*same, one) for one in more)]
    assert here not in others and key()["teacher"] == ""
