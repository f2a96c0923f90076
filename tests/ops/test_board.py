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
from asyncgrpo.metrics import MISSED, token_beside, write_targets

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
    assert panel["fieldConfig"]["defaults"]["unit"] not in ("", "none")
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
    values = {"run": "demo", "__rate_interval": "20s", "__range": "300s"}
    filled = check.fill_in('rate(x{run=~"$run"}[$__rate_interval]) + y[$__range]', values)
    assert filled == 'rate(x{run=~"demo"}[20s]) + y[300s]'


class Watched:
    """A Prometheus that scrapes, with our rules, discovery and token, a process that exports the metrics of all roles."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "runs" / "sim"
        self._token = token_beside(self.run_dir)
        self._processes: list[subprocess.Popen[str]] = []
        self.start_run()
        ours = (OPS / "prometheus" / "nodes.yml").read_text(encoding="utf-8")
        ours = ours.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "refresh_interval: 5s", "refresh_interval: 1s"
        )
        (folder / "prometheus.yml").write_text(ours.replace("../../runs", "runs"))
        shutil.copy(OPS / "prometheus" / "alerts.yml", folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        self._start(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--web.listen-address={address}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            stderr=subprocess.DEVNULL,
        )

    def start_run(self) -> None:
        """Start the process, or another one in its place, on another port."""
        if self._processes:
            self._processes[0].kill()
        run = self._start(sys.executable, str(Path(__file__).with_name("simulated_run.py")), self._token)
        assert run.stdout
        write_targets(self.run_dir, {"learner-0": ("127.0.0.1", int(run.stdout.readline()))})

    def series(self) -> int:
        """How many series of ours there were in the last minutes, whether they go on or not."""
        return len(check.ask(self.url, "series", **{"match[]": '{__name__=~"asyncgrpo_.+"}'}))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, *command: str, **streams: Any) -> "subprocess.Popen[str]":
        environment = os.environ | {"PYTHONPATH": str(OPS.parent)}
        process = subprocess.Popen(command, text=True, env=environment, **{"stdout": subprocess.PIPE, **streams})
        self._processes.append(process)
        return process


@pytest.fixture
def watched(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    watched = Watched(tmp_path)
    try:
        yield watched
    finally:
        watched.end()


def wait_for(url: str, query: str, deadline_s: float = 60) -> None:
    """Wait until the query has a result."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            result = check.ask(url, "query", query=query)["result"]
        except OSError:
            result = []
        if result:
            return
        time.sleep(0.5)
    raise AssertionError(f"{query} has no result within {deadline_s} s")


def wait_for_steps(url: str, count: int) -> None:
    wait_for(url, f"count_over_time(asyncgrpo_learner_step[5m]) >= {count}")


@pytest.mark.slow
def test_every_panel_shows_something_and_each_line_once_also_after_a_restart(watched: Watched, capsys, monkeypatch):
    wait_for_steps(watched.url, 5)
    before = watched.series()
    watched.start_run()
    wait_for_steps(watched.url, 9)
    assert watched.series() == before > 100, "a process that starts again goes on with the series of the one before"
    assert check.check(watched.url, run="sim", last_s=60, rate_s=10) == []
    assert check.ask(watched.url, "label/run/values") == ["sim"]
    monkeypatch.setattr(sys, "argv", ["check.py", watched.url, "--run", "sim", "--last", "60", "--rate", "10"])
    assert check.main() == 0
    assert "show something" in capsys.readouterr().out
    write_targets(watched.run_dir, MISSED)
    wait_for(watched.url, 'up{run="sim", role="driver"} == 0')


@pytest.mark.slow
def test_check_names_the_panels_that_are_empty_or_refused_or_show_a_line_twice(watched, monkeypatch, tmp_path, capsys):
    wait_for_steps(watched.url, 3)
    assert len(check.check(watched.url, run="no-such-run", last_s=60)) > 30
    asked = {
        "bad": ("x", "rate("),
        "gone": ("y", "asyncgrpo_gone_total"),
        "twice": ("{{role}}", "asyncgrpo_groups_total"),
        "hollow": ("z", "0 * asyncgrpo_learner_step / 0"),
    }
    bad = {"panels": [{"title": t, "targets": [{"legendFormat": name, "expr": e}]} for t, (name, e) in asked.items()]}
    monkeypatch.setattr(check, "BOARD", tmp_path / "bad.json")
    check.BOARD.write_text(json.dumps(bad))
    monkeypatch.setattr(sys, "argv", ["check.py", watched.url])
    assert check.main() == 1
    said = capsys.readouterr().out
    assert "bad / x: refused: " in said and "gone / y: empty: Prometheus has never seen asyncgrpo_gone_total" in said
    assert "twice / {{role}}: several lines named 'learner'" in said and "hollow / z: empty: no finite point" in said
