"""A run as text, for a file or a pipe: one tidy line for each event that a person wants in a log."""

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import Progress, counts_in_words, mean_lag, short_version

_WARNINGS = frozenset(
    {"restart", "drain", "stall", "fault", "warning"}
    | {"reward_failed", "rewards_paused", "rewards_resumed", "lease_failed"}
)


def line_of(event: Event, progress: Progress) -> str | None:
    """One line for an event that a person wants in a log, or None. `progress` has taken the event in already."""
    kind = event["event"]
    if kind == "start":
        return f"start {event.get('run', '')} at step {event.get('step')}"
    if kind == "step":
        return _step_line(event, progress)
    if kind == "eval":
        line = f"eval {event['step']:>3}  reward {number(event.get('reward_mean'))}  answers {event.get('answers')}"
        return line + (f"  failures: {counts_in_words(failures)}" if (failures := event.get("failures")) else "")
    if kind == "checkpoint":
        return f"checkpoint at step {event.get('step')}  {event.get('path')}  {event.get('seconds') or 0:.1f} s"
    if kind == "recovered":
        return f"recovered from: {event['fault']} {event['actor']}  {event['seconds']:.1f} s"
    is_bad_sync = kind == "sync" and (event.get("checksum") != "ok" or event.get("left_out"))
    if kind in _WARNINGS or is_bad_sync:
        return f"warning: {progress.warnings[-1]}"
    if kind == "end":
        return f"end   {event.get('status')} at step {event.get('step')}"
    return None


def _step_line(step: Event, progress: Progress) -> str:
    lags = {int(lag): groups for lag, groups in (step.get("lags") or {}).items()}
    generated, trained = progress.tokens_per_second()
    seconds = step.get("seconds") or {}
    waited = seconds.get("wait_data", 0.0) / total if (total := sum(seconds.values())) > 0 else 0.0
    width = len(str(progress.total_steps or 0))
    of = f"/{progress.total_steps}" if progress.total_steps else ""
    line = (
        f"step {step['step']:>{max(3, width)}}{of}  reward {number(step.get('reward_mean'))}"
        f"  lag {mean_lag(lags):.1f} (max {max(lags, default=0)})  loss {number(step.get('loss'), 4)}"
        f"  tok/s {thousands(generated)} gen {thousands(trained)} train  wait {waited:3.0%}"
    )
    if progress.syncs:
        sync = progress.syncs[-1]
        line += f"  sync {short_version(str(sync['version']))} {sync.get('ms') or 0:.0f} ms {sync.get('checksum')}"
    if failures := step.get("failures"):
        line += f"  failures {sum(failures.values())}"
    return line


def position(progress: Progress) -> str:
    """Steps done of all, "17/60", or "17" where their number is not known."""
    return f"{progress.step}/{progress.total_steps}" if progress.total_steps else f"{progress.step}"


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many digits after the point, a large one with four in all; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.4g}"


def thousands(value: float) -> str:
    """Three significant digits: "870", "1.7k", "29.4k", "3.1M"."""
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"
