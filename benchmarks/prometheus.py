"""A real Prometheus beside a trial: our configuration and our alerts as shipped, and its targets in the trial's folder."""

import itertools
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measuring import ROOT

OURS = ROOT / "ops" / "prometheus"
EVALUATION_S = 5.0
"""Of `prometheus.yml`, as shipped."""

Firing = dict[str, list[tuple[float, float]]]
"""Unix times from which and until which each alert fired."""


class Prometheus:
    """Scrapes the runs of one folder, for the length of a `with` block."""

    def __init__(self, runs: Path, tsdb: Path) -> None:
        """
        Args:
            runs: folder that has run folders.
            tsdb: where its data stay, with its configuration and its log.
        """
        tsdb.mkdir(parents=True, exist_ok=True)
        self._configuration = tsdb.absolute() / "prometheus.yml"
        self._configuration.write_text(configuration(runs))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._tsdb = tsdb
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        command = ["prometheus", f"--config.file={self._configuration}", f"--storage.tsdb.path={self._tsdb}"]
        with open(self._tsdb / "prometheus.log", "ab") as log:
            self._process = subprocess.Popen([*command, f"--web.listen-address={self._address}"], stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def ask(self, path: str, **params: Any) -> Any:
        """The `data` of a reply of its API. Raises OSError while nobody replies."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(params, doseq=True)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def fired(self, run: str, since: float, until: float | None = None) -> Firing:
        """Every alert of a run that fired between two Unix times, and when."""
        asked = {"start": since, "end": until or time.time(), "step": EVALUATION_S}
        query = f'count by (alertname) (ALERTS{{alertstate="firing", run="{run}"}})'
        lines = self.ask("query_range", query=query, **asked)["result"]
        return {line["metric"]["alertname"]: spans([at for at, _ in line["values"]]) for line in lines}


def configuration(runs: Path) -> str:
    """`prometheus.yml` for the runs of another folder."""
    ours = yaml.safe_load((OURS / "prometheus.yml").read_text(encoding="utf-8"))
    ours["rule_files"] = [str(OURS / name) for name in ours["rule_files"]]
    for job in ours["scrape_configs"]:
        for places in job["file_sd_configs"]:
            places["files"] = [str(runs.absolute() / "prometheus" / Path(name).name) for name in places["files"]]
    return yaml.safe_dump(ours)


def spans(times: Iterable[float]) -> list[tuple[float, float]]:
    """The spans that points in time, an evaluation apart, make up."""
    found: list[tuple[float, float]] = []
    for at in times:
        if found and at - found[-1][1] <= EVALUATION_S:
            found[-1] = found[-1][0], at
        else:
            found.append((at, at))
    return found


def opposed() -> list[tuple[str, str]]:
    """The pairs of alerts that advise opposite things."""
    return [(pair["one"], pair["other"]) for pair in yaml.safe_load((OURS / "opposed.yml").read_text(encoding="utf-8"))]


def contradictions(firing: Firing) -> list[str]:
    """The pairs that were true at once, each as `One + Other`."""
    return [
        f"{one} + {other}"
        for one, other in opposed()
        if any(
            max(a[0], b[0]) <= min(a[1], b[1]) for a, b in itertools.product(firing.get(one, []), firing.get(other, []))
        )
    ]
