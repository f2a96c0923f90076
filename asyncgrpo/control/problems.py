"""Problems of a run: the health conditions that its own events show.

A problem has the name of its alert (`ops/prometheus/alerts.yml`) and thus its runbook. The conditions are in
`recording/health.py`.
"""

import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncgrpo.control.operator import Status
from asyncgrpo.errors import DataError
from asyncgrpo.recording.events import read_tail
from asyncgrpo.recording.health import View, findings

RECENT_BYTES = 2**20
"""Bytes of `metrics.jsonl` that are read from its end: some hundred steps."""
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
    """Return the problems of a run."""
    view = View(
        events=read_tail(run_dir / "metrics.jsonl", -RECENT_BYTES).events,
        now=time.time(),
        free_bytes=shutil.disk_usage(run_dir).free,
        **of_status(status),
    )
    return problems_in(view)


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
