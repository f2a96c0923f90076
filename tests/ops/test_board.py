"""The Grafana boards: generated, whole, and asking only for what we export or record."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from asyncgrpo.host import reserved_port
from asyncgrpo.metrics import MISSED, token_beside, write_targets
from tests import scrape
from tests.runs import wait_until

OPS = Path(__file__).parents[2] / "ops"


sys.path.insert(0, str(OPS / "grafana"))
try:
    import build
    import check
finally:
    sys.path.pop(0)

BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((OPS / "grafana" / "boards").glob("*.json"))
}
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
RECORDED = {
    rule["record"]
    for file in ("recording.yml", "alerts.yml")
    for group in yaml.safe_load((OPS / "prometheus" / file).read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"asyncgrpo[_:][\w:]+", expression))


def test_boards_are_what_build_py_says():
    assert build.wrong() == []
    assert {path.stem for path in build.texts()} == set(BOARDS)


@each_board
def test_no_two_panels_overlap_and_none_leaves_the_grid(board):
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(place["w"]) for y in range(place["h"])):
            key = (place["x"] + cell[0], place["y"] + cell[1])
            assert key not in taken, f"{panel['title']} lies on {taken[key]}"
            taken[key] = panel["title"]


@each_board
def test_board_leads_to_the_others_and_to_the_page_of_the_run(board):
    others, page = board["links"]
    assert set(others["tags"]) <= set(board["tags"]) and others["includeVars"] and others["keepTime"]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert page["url"] == "${page}" and variables == {"datasource", "run", "page"}
    links = [link["url"] for panel in board["panels"] for link in panel.get("links", []) if link["url"] != "${page}"]
    assert {re.match(r"/d/([\w-]+)\?", link)[1] for link in links} <= {other["uid"] for other in BOARDS.values()}


@pytest.mark.parametrize("panel", PANELS)
def test_panel_says_what_it_shows_and_asks_for_metrics_that_we_export_of_the_chosen_run(panel):
    shows, _, do = panel["description"].partition("\n\n**What to do:** ")
    assert panel["title"] and shows.endswith(".") and len(do) > 15 and do.endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] not in ("", "none")
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for expression in (target["expr"] for target in panel["targets"]):
        assert metric_names(expression) <= scrape.names() | RECORDED
        ours = len(re.findall(r"asyncgrpo[_:]|ALERTS\{|up\{", expression))
        assert ours == expression.count('run=~"$run"') > 0
        # A label that a restart changes, such as a port, must be aggregated away: one line for each legend.
        assert re.search(r"\b(sum|max|min|avg|count|topk|scalar|vector)\b", expression), expression


def test_boards_show_every_metric_that_we_export():
    shown = {name for panel in PANELS for target in panel.values[0]["targets"] for name in metric_names(target["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scrape.names()}
    same_number_as_the_published_version = "asyncgrpo_learner_step"
    of_alerts = {"asyncgrpo_paused", "asyncgrpo_restarts_spent_ratio"}
    assert exported - families <= {same_number_as_the_published_version} | of_alerts


class Watched:
    """A Prometheus that scrapes, with our rules, discovery and token, a process that exports the metrics of all roles."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "runs" / "sim"
        self._token = token_beside(self.run_dir)
        self._processes: list[subprocess.Popen[str]] = []
        self.start_run()
        ours = (OPS / "prometheus" / "nodes.yml").read_text(encoding="utf-8")
        ours = re.sub(r"(scrape|refresh|evaluation)_interval: \d+s", r"\1_interval: 1s", ours)
        (folder / "prometheus.yml").write_text(ours.replace("../../runs", "runs"))
        for rules in ("alerts.yml", "recording.yml"):
            shutil.copy(OPS / "prometheus" / rules, folder)
        self._reserved = reserved_port()
        address = f"127.0.0.1:{self._reserved.getsockname()[1]}"
        self.url = f"http://{address}"
        options = [f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
        self._start("prometheus", *options, f"--storage.tsdb.path={folder / 'tsdb'}", stderr=subprocess.DEVNULL)

    def start_run(self) -> None:
        if self._processes:
            self._processes[0].kill()
        run = self._start(sys.executable, str(Path(__file__).with_name("simulated_run.py")), self._token)
        assert run.stdout
        address = ("127.0.0.1", int(run.stdout.readline()))
        write_targets(self.run_dir, {"learner-0": address, "generator-0": address})

    def series(self) -> int:
        """How many series of ours there were in the last minutes, whether they go on or not."""
        return len(check.ask(self.url, "series", **{"match[]": '{__name__=~"asyncgrpo_.+"}'}))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._reserved.close()

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
    yield watched
    watched.end()


def wait_for(url: str, query: str) -> None:
    def has_result() -> bool:
        with suppress(OSError, RuntimeError):  # it is not ready
            return bool(check.ask(url, "query", query=query)["result"])
        return False

    wait_until(has_result, query, 60.0)


def wait_for_steps(url: str, count: int) -> None:
    wait_for(url, f"count_over_time(asyncgrpo_learner_step[5m]) >= {count}")


@pytest.mark.parametrize(("body", "said"), [("Service Unavailable", "Service Unavailable"), ('{"error": "no"}', "no")])
def test_a_refusal_is_one_sentence_also_while_prometheus_starts(monkeypatch, capsys, body, said):
    def refuse(url: str, timeout: float) -> None:
        raise HTTPError(url, 503, "Service Unavailable", Message(), io.BytesIO(body.encode()))

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(sys, "argv", ["check.py", "http://here"])
    assert check.main() == 1
    assert capsys.readouterr().err == f"http://here: {said}\n"


@pytest.mark.slow
def test_every_panel_shows_something_and_each_line_once_also_after_a_restart(watched, capsys, monkeypatch, tmp_path):
    wait_for_steps(watched.url, 5)
    before = watched.series()
    watched.start_run()
    wait_for_steps(watched.url, 9)
    wait_for(watched.url, "asyncgrpo:places_filled:share10m")  # it looks at every 15th second of the clock
    assert watched.series() == before > 100, "a process that starts again goes on with the series of the one before"
    assert check.check(watched.url, run="sim", last_s=60, rate_s=10) == []
    assert check.ask(watched.url, "label/run/values") == ["sim"]
    monkeypatch.setattr(sys, "argv", ["check.py", watched.url, "--run", "sim", "--last", "60", "--rate", "10"])
    assert check.main() == 0
    assert "show something" in capsys.readouterr().out
    assert len(check.check(watched.url, run="no-such-run", last_s=60)) > 30
    names_the_panels_that_are_empty_or_refused_or_show_a_line_twice(watched, monkeypatch, tmp_path, capsys)
    write_targets(watched.run_dir, MISSED)
    wait_for(watched.url, 'up{run="sim", role="driver"} == 0')


def names_the_panels_that_are_empty_or_refused_or_show_a_line_twice(watched, monkeypatch, tmp_path, capsys) -> None:
    asked = {
        "bad": ("x", "rate("),
        "gone": ("y", "asyncgrpo_gone_total"),
        "twice": ("{{role}}", "asyncgrpo_groups_total"),
        "hollow": ("z", "0 * max(asyncgrpo_learner_step) / 0"),
    }
    targets = {title: {"legendFormat": name, "expr": asked_for} for title, (name, asked_for) in asked.items()}
    bad = {"title": "b", "panels": [{"title": title, "targets": [target]} for title, target in targets.items()]}
    monkeypatch.setattr(check, "BOARDS", tmp_path / "bad")
    check.BOARDS.mkdir()
    (check.BOARDS / "bad.json").write_text(json.dumps(bad))
    monkeypatch.setattr(sys, "argv", ["check.py", watched.url])
    assert check.main() == 1
    said = capsys.readouterr().out
    assert "bad / x: refused: " in said and "gone / y: empty: Prometheus has never seen asyncgrpo_gone_total" in said
    assert "twice / {{role}}: several lines named '" in said and "hollow / z: empty: no finite point" in said
