"""Problems of a run: alerts that fire in the Prometheus beside it, and the health conditions that its own events show.

A problem has the name of its alert (`ops/prometheus/alerts.yml`) and thus its runbook. The conditions are in
`recording/health.py`.
"""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from asyncgrpo.control.operator import Status
from asyncgrpo.errors import DataError
from asyncgrpo.recording.events import read_tail
from asyncgrpo.recording.health import View, findings

RECENT_BYTES = 2**20
"""Bytes of `metrics.jsonl` that are read from its end: some hundred steps."""
PROMETHEUS_S = 2.0
"""Deadline of a request to Prometheus."""
_SIGNAL = {"LittleSignal", "NoSignal"}
"""Alerts on the same groups over different times: one of them is shown."""
_PACKAGE = Path(__file__).parent.parent
_RUNBOOKS = (_PACKAGE.parent / "docs" / "runbooks", _PACKAGE / "runbooks")
"""Of a checkout, and of an installed package."""


class Problem(Struct, frozen=True, kw_only=True):
    """A condition that needs attention."""

    name: str
    """Name of its alert."""
    text: str
    runbook: str
    """Page with the steps to take."""
    since: float | None = None
    """Unix seconds; None: unknown."""
    told_by: Literal["run", "prometheus"] = "run"


class Problems(Struct, frozen=True):
    """Reply of the admin API."""

    problems: list[Problem]
    """Most urgent first."""


def read_runbook(name: str) -> str:
    """Return a runbook as Markdown. Raises DataError: it does not come with this installation."""
    pages = {page.stem: page for folder in _RUNBOOKS for page in folder.glob("*.md")}
    if name not in pages:
        raise DataError(f"docs/runbooks/{name}.md does not come with this installation; it is in the repository")
    return pages[name].read_text(encoding="utf-8")


def problems(run_dir: Path, status: Status) -> list[Problem]:
    """Return the problems of a run: alerts that fire first, then conditions that no alert shows."""
    prometheus = _prometheus_of(run_dir)
    alerts = [] if prometheus is None else list(_alerts(prometheus, run_dir.name))
    shown = {alert.name for alert in alerts}
    if shown & _SIGNAL:
        shown |= _SIGNAL
    view = View(
        events=read_tail(run_dir / "metrics.jsonl", -RECENT_BYTES).events,
        now=time.time(),
        free_bytes=shutil.disk_usage(run_dir).free,
        **of_status(status),
    )
    return [*alerts, *(one for one in problems_in(view) if one.name not in shown)]


def problems_in(view: View) -> list[Problem]:
    """Return the health conditions that hold, as problems."""
    return [
        Problem(name=condition.name, text=found.text, runbook=condition.runbook, since=found.since)
        for condition, found in findings(view)
    ]


def of_status(status: Status) -> dict[str, Any]:
    """Return the fields of a `View` that the driver's status has."""
    silent_s = {p.name: float("inf") if p.state == "lost" else p.heard_s or 0.0 for p in status.processes}
    return {"state": status.state, "started": status.started, "silent_s": silent_s}


def _prometheus_of(run_dir: Path) -> str | None:
    """Return the URL of the Prometheus that `--observe` started; None: there is none."""
    try:
        return json.loads((run_dir / "observe.json").read_text(encoding="utf-8")).get("prometheus")
    except (OSError, ValueError):
        return None


def _alerts(prometheus: str, run: str) -> Iterator[Problem]:
    """Yield the alerts that fire for a run."""
    try:
        alerts = json.loads(fetch(f"{prometheus.rstrip('/')}/api/v1/alerts", timeout_s=PROMETHEUS_S))["data"]["alerts"]
    except (OSError, ValueError, KeyError) as error:
        text = f"the Prometheus at {prometheus} does not reply: {error}"
        yield Problem(name="PrometheusSilent", text=text, runbook="docs/operate.md")
        return
    for alert in alerts:
        if alert["state"] == "firing" and alert["labels"].get("run") == run:
            name = alert["labels"]["alertname"]
            yield Problem(
                name=name,
                text=alert["annotations"].get("summary", name),
                runbook=f"docs/runbooks/{name}.md",
                since=datetime.fromisoformat(alert["activeAt"]).timestamp(),
                told_by="prometheus",
            )


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, *, token: str | None = None, body: bytes | None = None, timeout_s: float) -> bytes:
    """Return the body of the reply to one request over HTTP.

    It ignores any proxy of the environment: the server is on this machine, or on one beside it.

    Args:
        token: sent as `Authorization: Bearer`.
        body: JSON to be posted; None: the page is read.
    Raises:
        OSError: there was no reply; `urllib.error.HTTPError`, which is one, if the reply is an error.
    """
    request = urllib.request.Request(url, data=body)
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with _direct.open(request, timeout=timeout_s) as reply:
        return reply.read()
