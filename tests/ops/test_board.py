"""The Grafana board: generated, whole, and asking only for what we export."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo import metrics
from asyncgrpo.metrics import token_beside, write_targets

OPS = Path(__file__).parents[2] / "ops"


sys.path.insert(0, str(OPS / "grafana"))
try:
    import build
    import check
finally:
    sys.path.pop(0)

BOARD: dict[str, Any] = json.loads((OPS / "grafana" / "overview.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"asyncgrpo_\w+", expression))


def test_board_is_what_build_py_says():
    assert (OPS / "grafana" / "overview.json").read_text(encoding="utf-8") == build.text()


def test_board_has_no_trace_of_the_grafana_it_was_made_in():
    assert BOARD["id"] is None and BOARD["uid"] == "asyncgrpo-overview" and BOARD["schemaVersion"] == 41
    text = json.dumps(BOARD)
    assert "__inputs" not in text and "pluginVersion" not in text
    sources = {panel["datasource"]["uid"] for panel in PANELS}
    sources |= {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert sources == {"${datasource}"}


def test_panel_ids_are_unique():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_no_two_panels_overlap_and_none_leaves_the_grid():
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(place["w"]) for y in range(place["h"])):
            key = (place["x"] + cell[0], place["y"] + cell[1])
            assert key not in taken, f"{panel['title']} lies on {taken[key]}"
            taken[key] = panel["title"]


def test_eight_numbers_come_first():
    first = [panel["type"] for panel in BOARD["panels"][:10]]
    assert first == ["row", *["stat"] * 8, "row"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panel_says_what_it_shows_in_which_unit_and_what_to_do(panel):
    assert panel["title"] and len(panel["description"]) > 15
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panel_asks_for_metrics_that_we_export_of_the_chosen_run(panel):
    exported = metrics.names()
    for target in panel["targets"]:
        asked = metric_names(target["expr"])
        assert asked and asked <= exported
        assert target["expr"].count("asyncgrpo_") == target["expr"].count('run=~"$run"')


def test_board_shows_every_metric_that_we_export():
    shown = {name for panel in PANELS for target in panel["targets"] for name in metric_names(target["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics.names()}
    assert exported - families <= {"asyncgrpo_learner_step"}  # the same number as the published version


def test_check_fills_in_grafanas_variables():
    filled = check.fill_in('rate(x{run=~"$run"}[$__rate_interval]) + y[$__range]', "demo", 300, 20)
    assert filled == 'rate(x{run=~"demo"}[20s]) + y[300s]'


@pytest.fixture
def prometheus(tmp_path):
    """URL of a Prometheus that scrapes, with our rules, discovery and token, a process that exports our metrics."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    token = token_beside(tmp_path / "runs" / "sim")
    run = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("simulated_run.py"), token],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(OPS.parent)},
    )
    assert run.stdout
    write_targets(tmp_path / "runs" / "sim", {"learner-0": ("127.0.0.1", int(run.stdout.readline()))})
    ours = (OPS / "prometheus" / "nodes.yml").read_text(encoding="utf-8")
    ours = ours.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("../../runs", "runs")
    (tmp_path / "prometheus.yml").write_text(ours)
    shutil.copy(OPS / "prometheus" / "alerts.yml", tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--web.listen-address={address}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        for process in (server, run):
            process.kill()
            process.wait()


def wait_for_steps(url: str, count: int, deadline_s: float = 60) -> None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            result = check.ask(url, "query", query=f"count_over_time(asyncgrpo_learner_step[5m]) >= {count}")["result"]
        except OSError:
            result = []
        if result:
            return
        time.sleep(0.5)
    raise AssertionError(f"Prometheus has not scraped {count} times within {deadline_s} s")


@pytest.mark.slow
def test_every_panel_of_a_healthy_run_shows_something(prometheus: str, capsys, monkeypatch):
    wait_for_steps(prometheus, 5)
    assert check.check(prometheus, run="sim", last_s=60, rate_s=10) == []
    assert check.ask(prometheus, "label/run/values") == ["sim"]
    monkeypatch.setattr(sys, "argv", ["check.py", prometheus, "--run", "sim", "--last", "60", "--rate", "10"])
    assert check.main() == 0
    assert "show something" in capsys.readouterr().out


@pytest.mark.slow
def test_check_names_the_panels_that_are_empty_or_refused(prometheus, monkeypatch, tmp_path, capsys):
    wait_for_steps(prometheus, 3)
    assert len(check.check(prometheus, run="no-such-run", last_s=60)) > 30
    bad = {"panels": [{"title": "bad", "targets": [{"legendFormat": "x", "expr": "rate("}]}]}
    bad["panels"].append({"title": "gone", "targets": [{"legendFormat": "y", "expr": "asyncgrpo_gone_total"}]})
    monkeypatch.setattr(check, "BOARD", tmp_path / "bad.json")
    check.BOARD.write_text(json.dumps(bad))
    monkeypatch.setattr(sys, "argv", ["check.py", prometheus])
    assert check.main() == 1
    said = capsys.readouterr().out
    assert "bad / x: refused: " in said and "gone / y: empty: Prometheus has never seen asyncgrpo_gone_total" in said
