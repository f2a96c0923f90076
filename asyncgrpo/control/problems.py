"""What is wrong with a run, from its own events and files: for those who have no Prometheus, and for who looks right now.

A problem has the name of the alert that tells the same over time (`ops/prometheus/alerts.yml`), and so its runbook. Where a
Prometheus is at hand its firing alerts come first.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from asyncgrpo.control.fetch import fetch
from asyncgrpo.control.operator import Status
from asyncgrpo.errors import DataError
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import RECENT, Progress, counts_in_words, sync_line
from asyncgrpo.recording.tail import read_tail

RECENT_BYTES = 2**20
"""Of `metrics.jsonl`, from its end: some hundred steps."""
SILENT_S = 15.0
"""Without a heartbeat, of which there is one a second."""
NO_STEP_S = 600.0
RESTARTS, RESTARTS_S = 3, 1800.0
PAUSED_S = 3600.0
CHECKPOINT_S = 7200.0
WARNING_S = 3600.0
"""How long a warning of the learner or the buffer counts."""
FREE_BYTES = 5e9
PROMETHEUS_S = 2.0


_SIGNAL = {"LittleSignal", "NoSignal"}
"""Both count groups without signal, over other steps and so with other figures: one of them is shown."""
_PACKAGE = Path(__file__).parent.parent
_RUNBOOKS = (_PACKAGE.parent / "docs" / "runbooks", _PACKAGE / "runbooks")
"""Of a checkout, and of an installed package."""


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that a person should see to."""

    name: str
    """Of the alert that says the same."""
    text: str
    runbook: str
    """What to do: a page of `docs/runbooks/`."""
    since: float | None = None
    """Unix seconds; None: not known."""
    told_by: Literal["run", "prometheus"] = "run"


class Problems(Struct, frozen=True):
    """The reply to whoever asks what is wrong."""

    problems: list[Problem]
    """Most urgent first."""


def problem(name: str, text: str, since: float | None = None) -> Problem:
    """A problem that the run's own files tell."""
    return Problem(name=name, text=text, runbook=runbook(name), since=since)


def runbook(name: str) -> str:
    """The page that says what to do about an alert."""
    return f"docs/runbooks/{name}.md"


def read_runbook(name: str) -> str:
    """The text of a runbook, as Markdown. Raises DataError: it does not come with this installation."""
    pages = {page.stem: page for folder in _RUNBOOKS for page in folder.glob("*.md")}
    if name not in pages:
        raise DataError(f"{runbook(name)} does not come with this installation; it is in the repository")
    return pages[name].read_text(encoding="utf-8")


def problems(run_dir: Path, status: Status) -> list[Problem]:
    """What is wrong now, most urgent first: alerts that fire where `--observe` started a Prometheus, then what the run says."""
    prometheus = _prometheus_of(run_dir)
    events = read_tail(run_dir / "metrics.jsonl", -RECENT_BYTES).events
    found = [] if prometheus is None else list(_alerts(prometheus, run_dir.name))
    told = {alert.name for alert in found}
    if told & _SIGNAL:
        told |= _SIGNAL
    own = problems_in(events, status, now=time.time(), free_bytes=shutil.disk_usage(run_dir).free)
    return [*found, *(one for one in own if one.name not in told)]


def problems_in(events: Sequence[Event], status: Status, *, now: float, free_bytes: float) -> list[Problem]:
    """What is wrong with a run whose newest events are `events`, most urgent first."""
    progress = Progress.of(events)
    return [
        *_of_processes(events, status, now),
        *_of_progress(events, progress, status, now),
        *_of_rewards(progress),
        *_of_weights(progress, now),
        *_of_data(events, progress, now),
        *_of_disk(events, status, now, free_bytes),
    ]


def _of_processes(events: Iterable[Event], status: Status, now: float) -> Iterator[Problem]:
    gone = [p.name for p in status.processes if p.state == "lost" or (p.heard_s or 0.0) > SILENT_S]
    if gone:
        yield problem("TargetDown", f"{', '.join(gone)} gave no sign of life for {SILENT_S:.0f} s")
    restarts = Counter(e["actor"] for e in events if e["event"] == "restart" and e["time"] > now - RESTARTS_S)
    for actor, count in restarts.items():
        if count > RESTARTS:
            yield problem(
                "ActorsRestarting", f"{actor} was started again {count} times in {RESTARTS_S / 60:.0f} minutes"
            )


def _of_progress(events: Iterable[Event], progress: Progress, status: Status, now: float) -> Iterator[Problem]:
    if status.state == "paused":
        asked = [e["time"] for e in events if e["event"] == "command" and e["command"] == "pause" and not e["refused"]]
        if asked and now - asked[-1] > PAUSED_S:
            yield problem("RunPaused", f"paused for {(now - asked[-1]) / 3600:.1f} hours", asked[-1])
    if status.state not in ("training", "starting"):
        return
    moved = max((e["time"] for e in events if e["event"] in ("step", "start")), default=status.started)
    if now - moved > NO_STEP_S:
        yield problem("NoProgress", f"no optimizer step for {(now - moved) / 60:.0f} minutes", moved)
    if status.state == "starting":  # the status says what it waits for
        return
    stall = next((e for e in reversed(list(events)) if e["event"] in ("stall", "step", "start")), None)
    if stall is not None and stall["event"] == "stall":
        text = f"the learner has waited for {stall['what']} for {now - stall['time'] + stall['seconds']:.0f} s"
        yield problem("Waiting", text, stall["time"] - stall["seconds"])


def _of_rewards(progress: Progress) -> Iterator[Problem]:
    if progress.paused:
        one = next(iter(progress.paused.values()))
        text = f"every reward call fails at {', '.join(sorted(progress.paused))}: {one['reason']}"
        yield problem("RewardsPaused", text, one.get("since"))
    steps = progress.steps[-RECENT:]
    failures = sum((Counter(step.get("failures") or {}) for step in steps), Counter[str]())
    completions = sum(step.get("completions") or 0 for step in steps)
    if completions and failures.total() > 0.05 * completions:
        share = failures.total() / completions
        yield problem("RewardFailures", f"{share:.0%} of the completions have no score: {counts_in_words(failures)}")


def _of_weights(progress: Progress, now: float) -> Iterator[Problem]:
    checked = next((sync for sync in reversed(progress.syncs) if "gap_limit" in sync), None)
    if checked is not None and checked.get("differing"):
        yield problem(
            "WeightsDiffer",
            f"engines do not compute with the weights they were sent: {sync_line(checked)}",
            checked["time"],
        )
    for sync in reversed(progress.syncs):
        if sync["time"] > now - 600 and (sync["checksum"] != "ok" or sync.get("left_out")):
            yield problem(
                "WeightSyncFailing", f"a publication did not reach every generator: {sync_line(sync)}", sync["time"]
            )
            return


def _of_data(events: Iterable[Event], progress: Progress, now: float) -> Iterator[Problem]:
    steps = progress.steps[-RECENT:]
    trained = sum(progress.lags(RECENT).values())
    has_signal = True
    if len(steps) == RECENT and trained:
        without = sum(step.get("zero_signal_groups") or 0 for step in steps)
        if not (has_signal := without <= 0.95 * trained):
            yield problem("NoSignal", f"{without} of the last {trained} groups had one reward for all completions")
        dropped = sum((Counter(step.get("dropped") or {}) for step in steps), Counter[str]())
        if dropped.total() > 0.2 * (trained + dropped.total()):
            yield problem(
                "GroupsDropped",
                f"{dropped.total()} groups dropped beside {trained} trained: {counts_in_words(dropped)}",
            )
    if (gap := progress.mean("logprob_gap_mean", RECENT)) is not None and gap > 0.1:
        yield problem("LogprobGap", f"engine and learner differ by {gap:.2f} nats a token")
    warnings = [_of_warning(e) for e in events if e["event"] == "warning" and e["time"] > now - WARNING_S]
    newest = {warning.name: warning for warning in warnings if has_signal or warning.name not in _SIGNAL}
    yield from list(newest.values())[-2:]


def _of_warning(warning: Event) -> Problem:
    pages = {"evaluation": "stability", "entropy": "small-tasks", "steps": "small-tasks"}  # no alert says these
    if (page := pages.get(warning["about"])) is not None:
        name = warning["about"].capitalize()
        return Problem(name=name, text=warning["text"], runbook=f"docs/{page}.md", since=warning["time"])
    return problem("LittleSignal", warning["text"], warning["time"])


def _of_disk(events: Iterable[Event], status: Status, now: float, free_bytes: float) -> Iterator[Problem]:
    saved = max((e["time"] for e in events if e["event"] in ("checkpoint", "start")), default=None)
    if saved is not None and now - saved > CHECKPOINT_S and status.state == "training":
        yield problem("CheckpointTooOld", f"nothing was saved for {(now - saved) / 3600:.1f} hours", saved)
    if free_bytes < FREE_BYTES:
        yield problem("DiskAlmostFull", f"the disk of the run folder has {free_bytes / 1e9:.1f} GB left")


def _prometheus_of(run_dir: Path) -> str | None:
    """The URL of the Prometheus that `--observe` started beside the run, while it lives."""
    try:
        return json.loads((run_dir / "observe.json").read_text(encoding="utf-8")).get("prometheus")
    except (OSError, ValueError):
        return None


def _alerts(prometheus: str, run: str) -> Iterator[Problem]:
    """The alerts that fire for a run."""
    try:
        alerts = json.loads(fetch(f"{prometheus.rstrip('/')}/api/v1/alerts", timeout_s=PROMETHEUS_S))["data"]["alerts"]
    except (OSError, ValueError, KeyError) as error:
        text = f"the Prometheus at {prometheus} does not reply: {error}"
        yield Problem(name="PrometheusSilent", text=text, runbook="docs/operate.md")
        return
    for alert in alerts:
        if alert["state"] == "firing" and alert["labels"].get("run") == run:
            yield _of_alert(alert)


def _of_alert(alert: dict[str, Any]) -> Problem:
    name = alert["labels"]["alertname"]
    text = alert["annotations"].get("summary", name)
    since = datetime.fromisoformat(alert["activeAt"]).timestamp()
    return Problem(name=name, text=text, runbook=runbook(name), since=since, told_by="prometheus")
