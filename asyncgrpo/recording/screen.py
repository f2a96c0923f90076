"""The live screen: one terminal page about a run, drawn from its events alone.

`watch` follows a `metrics.jsonl` and shows it: as a live page on a terminal, or as one line per step if the output is a file
or a pipe. `render` draws the page from the events so far and `now`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncgrpo.logs import visible
from asyncgrpo.recording.progress import RECENT, Following, Progress, lag_line, sync_line
from asyncgrpo.recording.text import (
    curriculum_line,
    line_of,
    number,
    parts_line,
    position,
    sources_line,
    suites_of,
    thousands,
)

# -- character plots ---------------------------------------------------------------------------------------------------

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille cell, by row from the top, then column."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def resample(values: Sequence[float], count: int) -> list[float]:
    """Resample `values` to `count` points: interpolate linearly if there are fewer, average if there are more."""
    n = len(values)
    if n == 1:
        return [values[0]] * count
    if n >= count:
        edges = [i * n // count for i in range(count + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    points = []
    for i in range(count):
        x = i * (n - 1) / (count - 1)
        left = min(int(x), n - 2)
        points.append(values[left] + (x - left) * (values[left + 1] - values[left]))
    return points


def line_plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw `values` as `height` lines of `width` characters, scaled from the smallest (bottom) to the largest (top).

    Each character holds 2 by 4 dots. Fewer than two values, or equal values, give a flat line.
    """
    if not values or width < 1 or height < 1:
        return [" " * max(0, width)] * max(0, height)
    columns, rows = 2 * width, 4 * height
    points = resample(values, columns)
    low, high = min(values), max(values)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    levels = [round((point - low) * scale) for point in points]
    cells = [[0] * width for _ in range(height)]
    previous = levels[0]
    for x, level in enumerate(levels):
        # The dots between two levels are filled in, so that a steep line stays connected.
        start, stop = sorted((level, previous + (level > previous) - (level < previous)))
        for y in range(start, stop + 1):
            row, dot = divmod(rows - 1 - y, 4)
            cells[row][x // 2] |= _DOTS[dot][x % 2]
        previous = level
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def bar(share: float, width: int) -> str:
    """Return a bar that fills `share` (0 to 1) of `width` characters, padded with spaces."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)


# -- the screen --------------------------------------------------------------------------------------------------------

_ACTIVITIES = {"wait_data": "wait for data", "train": "train", "publish": "publish", "checkpoint": "checkpoint"}
_COLOURS = {"wait_data": "yellow", "train": "green", "publish": "cyan", "checkpoint": "magenta"}
# These limits keep the page within the 24 lines of a small terminal.
_NUM_SYNCS = 3
_NUM_WARNINGS = 3
_NUM_SUITES = 4
_PLOT_HEIGHT = 6
_KEEP_EVERY_S = 30.0
"""Shortest interval between two writes of the progress beside the events."""


def render(progress: Progress, now: float | None = None) -> RenderableType:
    """Return the page of a run. The clock shows `now` (Unix seconds), or the time of the last event if it is None."""
    body = Table.grid(expand=True, padding=(0, 1))
    body.add_column(ratio=3)
    body.add_column(ratio=2)
    body.add_row(_reward_panel(progress), _panel("now", _numbers(progress), _generators(progress)))
    body.add_row(
        _panel("learner's time", _time_bars(progress), _under_way(progress)),
        _panel(f"lag, groups of the last {RECENT} steps", _lag_bars(progress), _lags(progress)),
    )
    return Group(_header(progress, now), body, _notes(progress, now))


def _panel(title: str, content: RenderableType, below: str | None = None) -> Panel:
    return Panel(
        content,
        title=title,
        title_align="left",
        subtitle=below,
        subtitle_align="left",
        border_style="dim",
        padding=(0, 1),
    )


def _reward_panel(progress: Progress) -> Panel:
    parts = parts_line(progress.last)
    return _panel("reward", _RewardPlot(progress), None if parts is None else escape(visible(parts)))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


def _header(progress: Progress, now: float | None) -> RenderableType:
    until = progress.updated if now is None or progress.end else now
    elapsed = max(0.0, (until or 0.0) - (progress.started or 0.0))
    share = progress.share_done
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    if progress.end:
        state = Text(progress.end.get("status", "ended"), style="bold green" if _is_done(progress) else "bold red")
    else:
        state = Text("paused" if progress.is_paused else "training" if progress.steps else "starting", style="bold")
    head.add_row(
        Text.assemble((progress.run or "run", "bold cyan"), f"  step {position(progress)}  ", state),
        ProgressBar(total=1.0, completed=share or 0.0) if share is not None else "",
        f"{share:4.0%}  {_clock(elapsed)}" if share is not None else _clock(elapsed),
    )
    return head


def _is_done(progress: Progress) -> bool:
    return bool(progress.end) and (progress.end or {}).get("status") in ("done", "drained")


class _RewardPlot:
    """The reward curve, as wide as its panel."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        curve = self.progress.rewards
        if not (rewards := curve.y):
            yield Text("no step yet" + "\n" * _PLOT_HEIGHT, style="dim")
            return
        margin = 8
        width = max(4, options.max_width - margin)
        lines = line_plot(rewards, width, _PLOT_HEIGHT)
        labels = {0: number(max(rewards)), _PLOT_HEIGHT - 1: number(min(rewards))}
        for row, line in enumerate(lines):
            yield Text.assemble((f"{labels.get(row, ''):>7}│", "dim"), (line, "green"), no_wrap=True)
        first, last = str(int(curve.x[0])), f"step {self.progress.step}"
        yield Text(" " * margin + first + last.rjust(width - len(first)), style="dim", no_wrap=True)


def _numbers(progress: Progress) -> RenderableType:
    last = progress.last
    generated, trained = progress.tokens_per_second()
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    evaluation = progress.last_eval
    table.add_row("reward", Text(number(last.get("reward_mean")), style="bold green"))
    table.add_row("eval", f"{number(evaluation['reward_mean'])} @ {evaluation['step']}" if evaluation else "-")
    for name, text in list(suites_of(evaluation).items() if evaluation else ())[:_NUM_SUITES]:
        table.add_row(f" {name}"[:12], text)
    table.add_row("loss", number(last.get("loss"), 4))
    table.add_row("length", number(last.get("completion_length_mean"), 1))
    gap = next((sync["gap_max"] for sync in reversed(progress.syncs) if sync.get("gap_max") is not None), None)
    gap = last.get("logprob_gap_max") if gap is None else gap
    table.add_row("log-prob gap", "-" if gap is None else f"{gap:.1e}")
    table.add_row("generated", f"{thousands(last.get('tokens_generated') or 0)}  {thousands(generated)}/s")
    table.add_row("trained", f"{thousands(progress.tokens_trained)}  {thousands(trained)}/s")
    return table


def _generators(progress: Progress) -> str | None:
    shares = progress.generator_shares(RECENT)
    return f"sampling {shares.get('generate', 0):.0%}, scoring {shares.get('reward', 0):.0%}" if shares else None


def _time_bars(progress: Progress) -> RenderableType:
    shares = progress.time_shares(RECENT)
    named = {label: (shares.get(activity, 0.0), _COLOURS[activity]) for activity, label in _ACTIVITIES.items()}
    if (rest := sum(share for activity, share in shares.items() if activity not in _ACTIVITIES)) > 0.005:
        named["other"] = (rest, "white")
    return _bars({label: (share, f"{share:.0%}", colour) for label, (share, colour) in named.items()})


def _lag_bars(progress: Progress) -> RenderableType:
    lags = progress.lags(RECENT)
    if not lags:
        return Text("no step yet", style="dim")
    total, most = sum(lags.values()), max(lags)
    # At most five rows, so that the page keeps its height: the oldest lags share the last.
    rows = {str(lag): lags.get(lag, 0) for lag in range(min(most, 3) + 1)}
    if most > 3:
        beyond = sum(groups for lag, groups in lags.items() if lag > 3)
        rows["4" if most == 4 else f"4-{most}"] = beyond
    return _bars({label: (groups / total, str(groups), "blue") for label, groups in rows.items()})


def _lags(progress: Progress) -> str | None:
    lags = progress.lags(RECENT)
    return lag_line(lags, progress.last.get("max_lag")) if lags else None


def _under_way(progress: Progress) -> str | None:
    """Return the groups under way against the wanted number or the slots, and their time ready: means of the last steps."""
    under_way, ready = progress.mean("under_way", RECENT), progress.mean("ready_seconds", RECENT)
    if under_way is None:
        return None
    wanted = progress.mean("wanted", RECENT)
    of = f"{wanted:.0f} wanted" if wanted is not None else f"{progress.mean('slots', RECENT):.0f} slots"
    return f"under way {under_way:.0f} of {of}" + (f", ready {ready:.1f} s" if ready is not None else "")


def _bars(rows: dict[str, tuple[float, str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for label, (share, figure, colour) in rows.items():
        table.add_row(label, Text(bar(share, 18), style=colour), figure)
    return table


def _paused(progress: Progress, now: float | None) -> str:
    """Return the generators whose rewards are paused, and the time of the next probe. `now` is that of `render`."""
    at = progress.updated if now is None else now
    events = progress.paused.values()
    probe_in_s = min(event["time"] + event["probe_in_s"] for event in events) - (at or 0.0)
    since_s = (at or 0.0) - min(event["since"] for event in events)
    reason = next(iter(events))["reason"]
    return (
        f"paused at {', '.join(sorted(progress.paused))} for {since_s:.0f} s, probing again in {max(0.0, probe_in_s):.0f} s"
        f": {reason}"
    )


def _notes(progress: Progress, now: float | None) -> RenderableType:
    """Return the notes: sources, prompts, the last publications, the advice and the last warnings."""
    notes = Table.grid(padding=(0, 2))
    notes.add_column(style="dim", no_wrap=True)
    notes.add_column(no_wrap=True, overflow="ellipsis")
    advice = None if progress.paused or progress.is_paused else progress.advice
    sources = sources_line(progress.last)
    often = curriculum_line(progress.curriculum) if progress.curriculum is not None else None
    num_notes = bool(progress.paused or advice) + (sources is not None) + (often is not None)
    if sources is not None:
        notes.add_row("sources", Text(visible(sources)))
    if often is not None:
        notes.add_row("prompts", Text(visible(often)))
    syncs = list(progress.syncs)
    for i, sync in enumerate(syncs[max(0, len(syncs) + num_notes - _NUM_SYNCS) :]):
        style = "" if sync.get("checksum") == "ok" else "bold red"
        notes.add_row("weights" if i == 0 else "", Text(sync_line(sync), style=style))
    if progress.paused:
        notes.add_row("rewards", Text(_paused(progress, now), style="bold yellow"))
    if advice:
        notes.add_row("advice", Text(visible(advice["sentence"])))
    for i, warning in enumerate(list(progress.warnings)[-_NUM_WARNINGS:]):
        notes.add_row("warnings" if i == 0 else "", Text(visible(warning), style="yellow"))
    return notes


def watch(
    path: Path,
    *,
    console: Console | None = None,
    stop: threading.Event | None = None,
    since: float = 0.0,
    poll_s: float = 0.25,
    clock: Callable[[], float] = time.time,
) -> Progress:
    """Show the run that writes `path` until its `end` event or until `stop` is set, and save its progress beside it.

    Args:
        since: Unix time of this start of the run. Earlier events print no line and show no warning, and an earlier `end`
            does not end the watch.
    Returns:
        The progress of the run at the end.
    """
    console = console or Console()
    stop = stop or threading.Event()
    following = Following(path)
    live = Live(render(Progress(), clock()), console=console, auto_refresh=False) if console.is_terminal else None
    newest = skip_until = since
    drawn, kept_at = 0.0, time.monotonic()
    try:
        if live:
            live.start()
            console.show_cursor(True)  # a killed run could not show it again
        if (following.progress.updated or 0.0) < since:
            following.progress.warnings.clear()
        while True:
            stopping, came = stop.is_set(), False
            for event in following.poll():
                came, progress = True, following.progress
                if event["event"] == "rewound":
                    skip_until = newest  # the follower repeats some; print only what is new
                at = event.get("time", 0.0)
                newest = max(newest, at)
                if at < since:
                    progress.warnings.clear()
                if live is None and at > skip_until and (line := line_of(event, progress)) is not None:
                    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
                if event["event"] == "checkpoint" and time.monotonic() >= kept_at + _KEEP_EVERY_S:
                    following.keep()
                    kept_at = time.monotonic()
            if live and (came or clock() >= drawn + 1):
                live.update(render(following.progress, drawn := clock()), refresh=True)
            end = following.progress.end
            if stopping or (end and end["time"] >= since):
                return following.progress
            stop.wait(poll_s)
    finally:
        if live:
            live.stop()
