"""Names, roles and the few moving parts of the metrics module."""

import importlib.util
import json
import re
import shutil
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from asyncgrpo import metrics
from asyncgrpo.metrics import targets_path, write_targets
from asyncgrpo.rewards.base import IN_ENVIRONMENT
from tests.scrape import exposition

DECLARED = {
    name: value for name, value in vars(metrics).items() if isinstance(value, (Counter, Gauge, Histogram, Info))
}
for _gauges in (metrics.STEP_GAUGES, metrics.PART_GAUGES, metrics.SOURCE_GAUGES):
    DECLARED |= {gauge.describe()[0].name.removeprefix("asyncgrpo_"): gauge for gauge in _gauges.values()}


def value(name: str, module: ModuleType = metrics, **labels: str) -> float:
    for family in text_string_to_metric_families(exposition(*metrics.ROLES, module=module)):
        for sample in family.samples:
            if sample.name == f"asyncgrpo_{name}" and sample.labels == labels:
                return sample.value
    raise AssertionError(f"{name}{labels} is not exported")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("role", metrics.ROLES)
def test_promtool_finds_nothing_to_mend(role):
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(role), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_metric_is_exported_by_its_name_with_a_sentence_of_help_by_its_own_roles_only():
    exported = {role: {f.name for f in metrics.registry(role).collect()} for role in metrics.ROLES}
    for name, metric in DECLARED.items():
        is_counter = isinstance(metric, Counter)
        (family,) = {family.name for family in metric.collect()}
        assert family == f"asyncgrpo_{name.removesuffix('_total') if is_counter else name.removesuffix('_info')}"
        assert name.endswith("_total") == is_counter and re.fullmatch(r"[A-Z1].{10,}\.", metric._documentation), name
        assert any(family in names for names in exported.values()), name
    shared = exported["buffer"] & exported["generator"] & exported["learner"] & exported["driver"]
    assert exported["rank"] == shared | {"asyncgrpo_devices"}, "a rank above 0 would export zeros"
    of_all = ("build", "waiting_seconds", "resident_bytes", "open_files", "processes")
    assert shared == {f"asyncgrpo_{name}" for name in of_all}
    assert "_created" not in exposition(*metrics.ROLES)
    for role, others in (("learner", "buffer"), ("generator", "learner"), ("buffer", "generator")):
        assert exported[role] & exported[others] <= shared | {"asyncgrpo_devices"}


def just_imported() -> ModuleType:
    """The module as a new process has it: other tests have moved the metrics of this one."""
    spec = importlib.util.find_spec("asyncgrpo.metrics")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_label_values_start_at_zero_before_anything_happens():
    """A series that begins at 1 has no rate, so that its alert would wait for the second."""
    metrics.actor_restarts_total.labels(actor="buffer").inc()
    new = just_imported()
    assert value("rejected_frames_total", new, reason="vocabulary") == 0
    assert value("weight_sync_total", new, outcome="degraded") == 0
    assert value("reward_failures_total", new, failure=IN_ENVIRONMENT) == 0
    assert value("actor_restarts_total", new, actor="buffer") == 0


def test_an_endpoint_serves_the_metrics_of_its_role_and_with_a_token_only_those_that_send_it():
    def asked(port: int, **headers: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as completion:
                text = completion.read().decode()
                assert "asyncgrpo_actor_restarts_total" in text and "asyncgrpo_loss" not in text
                return completion.status
        except urllib.error.HTTPError as error:
            assert b"asyncgrpo" not in error.read()
            return error.code

    assert asked(metrics.serve("driver")) == 200
    port = metrics.serve("driver", token="7f3c")
    wrong = ["Bearer 7f3", "Bearer ", "7f3c", "Basic 7f3c", "Bearer \xff"]
    assert asked(port) == 401 and [asked(port, Authorization=text) for text in wrong] == [401] * len(wrong)
    assert asked(port, Authorization="Bearer 7f3c") == 200


def test_the_runs_of_a_folder_share_a_token_that_only_we_can_read(tmp_path: Path):
    token = metrics.token_beside(tmp_path / "run")
    assert len(token) >= 32 and metrics.token_beside(tmp_path / "other") == token
    assert metrics.token_beside(tmp_path / "elsewhere" / "run") != token
    path = tmp_path / "prometheus" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [*path.parent.iterdir()] == [path]


def test_a_step_event_moves_the_learners_metrics():
    metrics.serve("learner")
    assert value("last_step_timestamp_seconds") > 1e9, "one that has not stepped yet counts from its start"
    before = value("tokens_trained_total"), value("learner_seconds_total", activity="optimizer")
    without_signal, observed = value("zero_signal_groups_total"), value("step_seconds_count")
    metrics.STEP_GAUGES["kl_reference"].set(0.25)
    numbers = {"step": 17, "reward_mean": 0.5, "lr": 1e-3, "importance_capped": 0.125, "kl_reference": None}
    counts = {"tokens_trained": 640, "zero_signal_groups": 3, "seconds": {"optimizer": 2.0, "wait_data": 1.0}}
    metrics.observe_step(numbers | counts)
    assert (value("learner_step"), value("reward_mean"), value("learning_rate")) == (17, 0.5, 1e-3)
    assert (value("importance_capped_ratio"), value("kl_reference")) == (0.125, 0.25)
    assert value("tokens_trained_total") - before[0] == 640
    assert value("learner_seconds_total", activity="optimizer") - before[1] == 2.0
    assert value("step_seconds_count") - observed == 1
    assert value("zero_signal_groups_total") - without_signal == 3


def test_each_part_of_the_reward_and_each_source_has_a_series_and_there_are_few_of_them(monkeypatch):
    monkeypatch.setattr(metrics, "_reward_parts", set())
    monkeypatch.setattr(metrics, "_sources", set())
    numbers = {"reward_mean": 0.5, "success_share": 0.25, "zero_signal_share": 0.75, "completion_length_mean": 9.0}
    parts = {"reward_parts": {"format": 0.5}, "reward_parts_std": {"format": 0.1}}
    metrics.observe_step(parts | {"sources": {"gsm8k": numbers}})
    assert value("reward_part_mean", part="format") == 0.5 and value("reward_part_std", part="format") == 0.1
    assert value("source_reward_mean", source="gsm8k") == 0.5 and value("source_success_ratio", source="gsm8k") == 0.25
    assert value("source_zero_signal_ratio", source="gsm8k") == 0.75
    for step in range(50):
        one = f"of step {step}"
        sources = {"gsm8k": numbers | {"reward_mean": None}, one: numbers}
        metrics.observe_step({"reward_parts": {"format": 0.75, one: 1.0}, "sources": sources})
    series = exposition("learner")
    assert series.count("asyncgrpo_reward_part_mean{") == metrics.MAX_REWARD_PARTS
    assert series.count("asyncgrpo_source_reward_mean{") == metrics.MAX_SOURCES
    assert value("reward_part_mean", part="format") == 0.75 and value("source_reward_mean", source="gsm8k") == 0.5
    for gauge in (*metrics.PART_GAUGES.values(), *metrics.SOURCE_GAUGES.values()):
        gauge.clear()


def test_a_wait_shows_its_age_while_it_lasts_also_in_another_thread_and_zero_afterwards(monkeypatch):
    now, seen = [100.0], list[float]()
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])

    def age() -> float:
        return value("waiting_seconds", what="checkpoint")

    with pytest.raises(ValueError), metrics.waiting("checkpoint"):
        now[0] += 30
        assert age() == 30
        with metrics.waiting("checkpoint"):
            now[0] += 5
            assert age() == 35
        thread = threading.Thread(target=lambda: seen.append(age()))
        thread.start()
        thread.join()
        assert age() == 35 == seen[0]
        raise ValueError
    assert age() == 0


def test_every_wait_that_is_exported_is_measured_somewhere():
    sources = (path.read_text() for path in Path(metrics.__file__).parent.rglob("*.py"))
    measured = {what for text in sources for what in re.findall(r'metrics\.waiting\("(\w+)"\)', text)}
    assert measured == set(metrics.WAITS)


def test_every_process_exports_its_memory_and_open_files_and_those_of_what_it_started():
    children, own_files = value("processes", of="below"), value("open_files", of="self")
    assert value("resident_bytes", of="self") > 1e6 and own_files > 0
    child = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    try:
        assert value("processes", of="below") == children + 1
        assert value("open_files", of="self") > own_files and value("resident_bytes", of="below") > 1e5
    finally:
        child.kill()
        child.communicate()
    assert value("processes", of="below") == children


def test_the_median_of_equal_times_is_read_to_a_quarter():
    """As Prometheus does it: the middle of the bucket that they fall into."""
    bounds = [0.0, *metrics.SECONDS]
    for seconds in (0.0012, 0.004, 0.04, 0.17, 0.65, 2.6, 14, 45, 250, 1300):
        upper = next(bound for bound in bounds if bound >= seconds)
        lower = bounds[bounds.index(upper) - 1]
        assert abs((lower + upper) / 2 / seconds - 1) <= 0.25


def test_the_targets_of_a_run(tmp_path):
    write_targets(tmp_path / "other", {"learner-0": ("127.0.0.1", 1)})
    write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 1)})
    write_targets(tmp_path / "demo", {"generator-1": ("127.0.0.1", 9001), "buffer": ("::1", 9002)})
    path, other = (tmp_path / "prometheus" / f"{name}.json" for name in ("demo", "other"))
    assert sorted(path.parent.iterdir()) == [path, other]
    buffer, generator = json.loads(path.read_text())
    assert (buffer["targets"], generator["targets"]) == (["[::1]:9002"], ["127.0.0.1:9001"])
    assert generator["labels"] == {"run": "demo", "role": "generator", "rank": "1", "instance": "generator-1"}
    write_targets(tmp_path / "demo", {})
    write_targets(tmp_path / "demo", {})
    assert not targets_path(tmp_path / "demo").exists() and other.exists(), "a run that ended has none"


def test_a_run_goes_on_where_its_targets_cannot_be_written(tmp_path, caplog):
    (tmp_path / "prometheus").write_text("no folder")
    write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 1)})
    assert "prometheus/demo.json cannot be written" in caplog.text
