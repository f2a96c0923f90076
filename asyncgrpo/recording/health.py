"""Health conditions of a run: one table, read by `status`, the page, `top`, the advice, the autopilot and the alerts.

A condition measures the newest events of a run against two limits. Above `limit` it is shown, and the Prometheus alert of the
same name fires. Above `stops_tuning` the advice and the autopilot wait until it is over. `ops/prometheus/alerts.yml` measures the
same over time; `tests/ops/test_prometheus.py` compares its limits with these.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import FEWEST, is_command
from asyncgrpo.recording.progress import RECENT, Progress, counts_in_words, seconds_of, sync_line

SHOWN_S = 3600.0
"""Age up to which a warning of the learner or the buffer is shown."""
RESTARTS_WITHIN_S = 1800.0
SYNCS_WITHIN_S = 600.0
STALL_EVENTS_S = 45.0
"""Age of a report of a wait, of which there is one every 30 s, from which the wait is over."""
STARTING_S = 600.0
"""Time to the first steps that does not count as a stall: engines load."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment."""

    events: Sequence[Event]
    """The newest, in order; a few hundred are enough."""
    now: float
    """Unix time."""
    state: str = ""
    """Of the driver's status; empty: unknown, and derived from the events."""
    started: float = float("inf")
    """Unix time of the start of the driver; infinite: unknown."""
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the last heartbeat of each process."""
    free_bytes: float = float("inf")
    """On the disk of the run folder."""

    @cached_property
    def progress(self) -> Progress:
        return Progress.of(self.events)

    @property
    def is_running(self) -> bool:
        """True if steps are due: the run is neither paused nor over."""
        return not self.progress.end and not self.progress.is_paused and self.state in ("", "starting", "training")

    @property
    def steps(self) -> list[Event]:
        return self.progress.steps[-RECENT:]

    def newest(self, *kinds: str, within_s: float = float("inf")) -> Iterator[Event]:
        """Yield the events of some kinds, newest first."""
        return (e for e in reversed(self.events) if e["event"] in kinds and e.get("time", 0.0) > self.now - within_s)


class Finding(NamedTuple):
    """A condition that holds."""

    text: str
    since: float | None = None
    """Unix time; None: unknown."""


@dataclass(frozen=True)
class Condition:
    """One row of the table."""

    name: str
    """Of the alert and of the page in `docs/runbooks/`."""
    limit: float
    find: Callable[[View, float], Finding | None]
    """Return what was found above a limit."""
    stops_tuning: float | None = None
    """None: tuning goes on."""
    page: str = ""
    """Where to read what to do; empty: the runbook of that name."""


class Problem(Struct, frozen=True, kw_only=True):
    """A condition that holds, and its page."""

    name: str
    """Name of its alert."""
    text: str
    runbook: str
    """Page with the steps to take."""
    since: float | None = None
    """Unix seconds; None: unknown."""


def problems_in(view: View) -> list[Problem]:
    """Return all conditions that hold, the most urgent first."""
    return list(_problems(view, lambda condition: condition.limit))


def stops_tuning(view: View) -> Problem | None:
    """Return the condition that must be over before tuning makes sense; None: there is none."""
    return next(_problems(view, lambda condition: condition.stops_tuning), None)


def _problems(view: View, limit: Callable[[Condition], float | None]) -> Iterator[Problem]:
    for c in CONDITIONS:
        if (above := limit(c)) is not None and (one := c.find(view, above)) is not None:
            page = c.page or f"docs/runbooks/{c.name}.md"
            yield Problem(name=c.name, text=one.text, since=one.since, runbook=page)


def limit_of(name: str) -> float:
    return next(c.limit for c in CONDITIONS if c.name == name)


# -- processes ---------------------------------------------------------------------------------------------------------


def _silent_processes(view: View, limit_s: float) -> Finding | None:
    silent = [name for name, seconds in view.silent_s.items() if seconds > limit_s]
    return Finding(f"no heartbeat from {', '.join(silent)} for {limit_s:.0f} s") if silent else None


def _restarts(view: View, limit: float) -> Finding | None:
    restarts = [(e["actor"], e["reason"]) for e in view.newest("restart", within_s=RESTARTS_WITHIN_S)]
    for actor, count in Counter(actor for actor, _ in restarts).most_common(1):
        if count > limit:
            minutes, reason = RESTARTS_WITHIN_S / 60, dict(reversed(restarts))[actor]
            return Finding(f"{actor} was restarted {count} times in {minutes:.0f} minutes ({reason})")
    return None


# -- progress ----------------------------------------------------------------------------------------------------------


def _no_step(view: View, limit_s: float) -> Finding | None:
    """A step is late only after three times the usual one, so that large models are no stall."""
    if not view.is_running:
        return None
    moves = (e["time"] for e in view.newest("step", "start", "command") if e["event"] != "command" or is_command(e))
    since = next(moves, view.started)
    since = max(since, view.started) if view.started < view.now else since  # an earlier start made that step
    usual_s = median(map(seconds_of, view.steps)) if len(view.steps) >= FEWEST else None
    late_s = max(limit_s, STARTING_S) if usual_s is None else max(limit_s, 3 * usual_s)
    if view.now - since <= late_s:
        return None
    usual = f", where one takes {usual_s:.1f} s" if usual_s is not None else ""
    what = f"; the learner waits for {stall['what']}" if (stall := _stall(view)) is not None else ""
    return Finding(f"no optimizer step for {view.now - since:.0f} s{usual}{what}", since)


def _stall(view: View) -> Event | None:
    """Return the newest report of the wait that goes on; None: the learner does not wait, or not for long yet."""
    last = next(view.newest("stall", "step", "start", within_s=STALL_EVENTS_S), {"event": ""})
    return last if last["event"] == "stall" else None


def _waits(view: View, limit_s: float) -> Finding | None:
    if not view.is_running or view.state == "starting" or (stall := _stall(view)) is None:
        return None
    since = stall["time"] - stall["seconds"]
    if (waited_s := view.now - since) <= limit_s:
        return None
    return Finding(f"the learner has waited for {stall['what']} for {waited_s:.0f} s", since)


def _paused(view: View, limit_s: float) -> Finding | None:
    asked = next((e["time"] for e in view.newest("command") if e["command"] == "pause" and not e["refused"]), None)
    if view.state != "paused" or asked is None or view.now - asked <= limit_s:
        return None
    return Finding(f"paused for {(view.now - asked) / 3600:.1f} hours", asked)


def _old_checkpoint(view: View, limit_s: float) -> Finding | None:
    saved = next((e["time"] for e in view.newest("checkpoint", "start")), None)
    if saved is None or view.state != "training" or view.now - saved <= limit_s:
        return None
    return Finding(f"no checkpoint for {(view.now - saved) / 3600:.1f} hours", saved)


def _full_disk(view: View, limit_bytes: float) -> Finding | None:
    free = view.free_bytes
    return Finding(f"{free / 1e9:.1f} GB are free on the disk of the run folder") if free < limit_bytes else None


# -- rewards -----------------------------------------------------------------------------------------------------------


def _paused_rewards(view: View, limit: float) -> Finding | None:
    paused = view.progress.paused
    if len(paused) <= limit:
        return None
    first = next(iter(paused.values()))
    return Finding(f"every reward call fails at {', '.join(sorted(paused))}: {first['reason']}", first.get("since"))


def _failed_rewards(view: View, limit: float) -> Finding | None:
    failures = _counted(view.steps, "failures")
    share = failures.total() / max(1, sum(step.get("completions") or 0 for step in view.steps))
    return (
        Finding(f"{share:.0%} of the completions have no score: {counts_in_words(failures)}") if share > limit else None
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def _differing_weights(view: View, limit: float) -> Finding | None:
    checked = next((sync for sync in reversed(view.progress.syncs) if "gap_limit" in sync), None)
    if checked is None or len(checked.get("differing") or ()) <= limit:
        return None
    return Finding(f"engines do not compute with the weights that they received: {sync_line(checked)}", checked["time"])


def _missed_weights(view: View, limit: float) -> Finding | None:
    """Count bad publications among the last five; the newest counts twice, since no later one has repaired it."""
    syncs = [s for s in view.progress.syncs if s["time"] > view.now - SYNCS_WITHIN_S][-5:]
    bad = [sync for sync in syncs if sync.get("left_out")]
    if not bad or len(bad) + (bad[-1] is syncs[-1]) <= limit:
        return None
    return Finding(f"a publication did not reach every generator: {sync_line(bad[-1])}", bad[-1]["time"])


# -- groups ------------------------------------------------------------------------------------------------------------


def _no_signal(view: View, limit: float) -> Finding | None:
    filtered = _counted(view.steps, "filtered").total()
    without = filtered + sum(step.get("zero_signal_groups") or 0 for step in view.steps)
    groups = filtered + _trained(view)
    if len(view.steps) < RECENT or without <= limit * groups:
        return None
    return Finding(f"{without} of the last {groups} groups have one reward for all completions")


def _little_signal(view: View, limit: float) -> Finding | None:
    return None if _no_signal(view, limit_of("NoSignal")) else _no_signal(view, limit)


def _dropped(view: View, limit: float) -> Finding | None:
    dropped, trained = _counted(view.steps, "dropped"), _trained(view)
    if len(view.steps) < RECENT or dropped.total() <= limit * (trained + dropped.total()):
        return None
    return Finding(f"{dropped.total()} groups dropped, {trained} trained: {counts_in_words(dropped)}")


def _logprob_gap(view: View, limit: float) -> Finding | None:
    gap = view.progress.recent.mean("logprob_gap_mean")
    return Finding(f"engine and learner differ by {gap:.2f} nats a token") if gap is not None and gap > limit else None


def _warned(about: str) -> Callable[[View, float], Finding | None]:
    """Find the newest warning of the learner about its curves (`learner/record.py`), which no alert repeats."""

    def find(view: View, _: float) -> Finding | None:
        warnings = view.newest("warning", within_s=SHOWN_S)
        return next((Finding(w["text"], w["time"]) for w in warnings if w["about"] == about), None)

    return find


def _counted(steps: Sequence[Event], field_name: str) -> Counter[str]:
    return sum((Counter(step.get(field_name) or {}) for step in steps), Counter[str]())


def _trained(view: View) -> int:
    return sum(view.progress.recent.lags.values())


CONDITIONS = (
    Condition("TargetDown", 15.0, _silent_processes),  # seconds without a heartbeat, of which there is one a second
    Condition("ActorsRestarting", 3, _restarts, stops_tuning=3),  # restarts in half an hour
    Condition("RunPaused", 3600.0, _paused),  # seconds
    Condition("NoProgress", 600.0, _no_step, stops_tuning=60.0),  # seconds since the last step
    Condition("Waiting", 60.0, _waits),  # seconds
    Condition("RewardsPaused", 0, _paused_rewards, stops_tuning=0),  # generators
    Condition("RewardFailures", 0.05, _failed_rewards, stops_tuning=0.2),  # share of completions
    Condition("WeightsDiffer", 0, _differing_weights, stops_tuning=0),  # generators
    Condition("WeightSyncFailing", 0, _missed_weights, stops_tuning=1),  # of five publications
    Condition("NoSignal", 0.95, _no_signal),  # share of groups
    Condition("LittleSignal", 0.75, _little_signal),  # share of groups
    Condition("GroupsDropped", 0.2, _dropped),  # share of groups
    Condition("LogprobGap", 0.1, _logprob_gap),  # nats
    Condition("Evaluation", 0, _warned("evaluation"), page="docs/stability.md"),
    Condition("Entropy", 0, _warned("entropy"), page="docs/small-tasks.md"),
    Condition("Steps", 0, _warned("steps"), page="docs/small-tasks.md"),
    Condition("CheckpointTooOld", 7200.0, _old_checkpoint),  # seconds
    Condition("DiskAlmostFull", 5e9, _full_disk),  # bytes that are free
)
