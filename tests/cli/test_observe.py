"""`--observe`: Prometheus and Grafana beside a run, from what the package ships, and gone with it."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from asyncgrpo import metrics
from asyncgrpo.cli import observe

HAS_PROMETHEUS = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
ANSWERS = """\
import http.server, json, os, sys
address = next(a.partition("=")[2] for a in sys.argv if a.startswith("--web.listen-address="))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer((address.partition(":")[0], int(address.partition(":")[2])), Ready).serve_forever()
"""
NOTES = """\
import json, os, sys, time
open(sys.argv[0] + ".told", "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))
time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / 'a "run"'
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "grafana" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, name: str, source: str) -> Path:
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return program


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)["data"]


def test_without_a_prometheus_it_says_how_to_get_one_and_goes_on(run_dir: Path, programs: Path):
    reported: list[str] = []
    with observe.observed(run_dir, reported.append, with_token=False):
        assert not (run_dir / observe.FILE).exists()
    assert reported == [observe.NOT_HERE]


def test_a_prometheus_that_does_not_start_harms_no_run(run_dir: Path, programs: Path):
    install(programs, "prometheus", "import sys; print('no such flag', file=sys.stderr); sys.exit(1)")
    reported: list[str] = []
    with observe.observed(run_dir, reported.append, with_token=False):
        assert not (run_dir / observe.FILE).exists()
    (sentence,) = reported
    assert "does not start" in sentence and "prometheus.log" in sentence
    assert "no such flag" in (run_dir / "observe" / "prometheus.log").read_text()


@HAS_PROMETHEUS
@pytest.mark.parametrize("with_token", [False, True])
def test_it_scrapes_this_run_with_our_rules_and_ends_with_it(run_dir: Path, with_token: bool):
    token = metrics.token_beside(run_dir) if with_token else None
    port = metrics.serve("driver", token=token)
    metrics.write_targets(run_dir, {"driver": ("127.0.0.1", port)})
    metrics.write_targets(run_dir.with_name("another"), {"driver": ("127.0.0.1", port)})
    before = {child.pid for child in psutil.Process().children()}
    with observe.observed(run_dir, print, with_token=with_token):
        url = json.loads((run_dir / observe.FILE).read_text())["prometheus"]
        rules = {group["name"] for group in ask(url, "rules")["groups"]}
        assert {"asyncgrpo", "asyncgrpo-rates", "asyncgrpo-ratio"} <= rules
        deadline = time.monotonic() + 60
        while not (up := ask(url, "query?query=up==1")["result"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [series["metric"]["run"] for series in up] == [run_dir.name]
    assert not (run_dir / observe.FILE).exists()
    assert {child.pid for child in psutil.Process().children()} == before
    assert stat.S_IMODE((run_dir / "observe").stat().st_mode) == 0o700 and any((run_dir / "observe" / "tsdb").iterdir())


@pytest.mark.parametrize(("name", "arguments"), [("grafana", ["server"]), ("grafana-server", [])])
def test_grafana_gets_the_boards_and_the_address_of_prometheus(run_dir, programs, name, arguments):
    install(programs, "prometheus", ANSWERS)
    program = install(programs, name, NOTES)
    (programs.parent / "conf").mkdir()
    (programs.parent / "conf" / "defaults.ini").touch()
    told = program.with_name(f"{name}.told")
    with observe.observed(run_dir, print, with_token=False):
        addresses = json.loads((run_dir / observe.FILE).read_text())
        deadline = time.monotonic() + 30
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
    given, environment = json.loads(told.read_text())
    assert given == [*arguments, "--homepath", str(programs.parent)]
    assert addresses["grafana"] == f"http://127.0.0.1:{environment['GF_SERVER_HTTP_PORT']}"
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()
    provisioning = Path(environment["GF_PATHS_PROVISIONING"])
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == addresses["prometheus"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "boards.yaml").read_text())["providers"]
    assert len(list(Path(provider["options"]["path"]).glob("*.json"))) == 7


def test_a_driver_that_is_killed_takes_it_along(run_dir: Path, programs: Path):
    install(programs, "prometheus", ANSWERS)
    waits = f"""
import time
from pathlib import Path
from asyncgrpo.cli.observe import observed
with observed(Path({str(run_dir)!r}), print, with_token=False):
    time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", waits], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 60
    while not (run_dir / observe.FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = psutil.Process(driver.pid).children()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
