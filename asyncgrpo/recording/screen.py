"""The live screen of a run, drawn from its events alone, and the panel that it shares with `top`.

`watch` follows a `metrics.jsonl` and shows it: as a live panel on a terminal, or as one line per step if the output is a file
or a pipe.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncgrpo.logs import visible
from asyncgrpo.recording.events import Follower
from asyncgrpo.recording.progress import Curve, Progress
from asyncgrpo.recording.text import figures, line_of, number, position

# -- the panel of a run ------------------------------------------------------------------------------------------------

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille cell, by row from the top, then column."""
_PLOT_HEIGHT = 5
_SIDE_BY_SIDE = 160
"""Columns from which the figures have room beside the curve."""
_COLOURS = {"training": "green", "done": "green", "drained": "green", "starting": "cyan"}
_COLOURS |= {"paused": "yellow", "draining": "yellow", "failed": "red", "no reply": "red"}

Note = tuple[str, str, str]
"""Name, text and style of a line below the figures."""


def resample(values: Sequence[float], count: int) -> list[float]:
    """Resample `values` to `count` points: repeat values if there are fewer, average them if there are more."""
    edges = [i * len(values) // count for i in range(count + 1)]
    return [fmean(values[a : max(b, a + 1)]) for a, b in pairwise(edges)]


def line_plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw `values` as `height` lines of `width` characters, scaled from the smallest (bottom) to the largest (top).

    Each character holds 2 by 4 dots. Equal values give a flat line.
    """
    rows, low, high = 4 * height, min(values), max(values)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    levels = [round((point - low) * scale) for point in resample(values, 2 * width)]
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


class _Body:
    """The reward curve beside the figures, or above them if the terminal is narrow."""

    def __init__(self, rewards: Curve, rows: RenderableType) -> None:
        self._rewards, self._rows = rewards, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _SIDE_BY_SIDE:
            yield from (self._curve(options.max_width), self._rows)
            return
        body = Table.grid(expand=True, padding=(0, 2))
        body.add_column(ratio=1)
        body.add_column(ratio=2)
        body.add_row(self._curve(options.max_width // 3 - 2), self._rows)
        yield body

    def _curve(self, width: int) -> Text:
        values, margin = self._rewards.y, 8
        if not values:
            return Text("no step yet" + "\n" * (_PLOT_HEIGHT - 1), style="dim")
        labels = {0: number(max(values)), _PLOT_HEIGHT - 1: number(min(values))}
        lines = line_plot(values, max(4, width - margin), _PLOT_HEIGHT)
        rows = (Text.assemble((f"{labels.get(i, ''):>7}│", "dim"), (line, "green")) for i, line in enumerate(lines))
        return Text("\n", no_wrap=True).join(rows)


def panel(
    progress: Progress,
    title: str,
    state: str,
    rows: Iterable[tuple[str, str]],
    notes: Iterable[Note],
    *,
    border: str = "dim",
    wraps: bool = True,
    done: float | None = None,
) -> Panel:
    """Return a run as a panel: its reward curve, its figures, and notes below them.

    Args:
        wraps: False: longer lines are cut, so that the panel keeps its height.
        done: share of the run that is done, for a progress bar.
    """
    overflow = {"overflow": "fold"} if wraps else {"overflow": "ellipsis", "no_wrap": True}
    tables = []
    for lines in ([(name, text, "") for name, text in rows], notes):
        tables.append(table := Table.grid(padding=(0, 2)))
        table.add_column(style="dim", no_wrap=True, min_width=10)
        table.add_column(**overflow)  # type: ignore[arg-type]
        before = ""
        for name, text, style in lines:
            table.add_row("" if name == before else name, Text(visible(text), style=style))
            before = name
    colour = next((colour for word, colour in _COLOURS.items() if state.startswith(word)), "white")
    heading = Text.assemble((f"{title}  ", "bold cyan"), (state, f"bold {colour}"))
    bar = () if done is None else (ProgressBar(total=1.0, completed=done),)
    body = Group(*bar, _Body(progress.rewards, tables[0]), tables[1])
    return Panel(body, title=heading, title_align="left", border_style=border, padding=(0, 1))


# -- the screen --------------------------------------------------------------------------------------------------------

_NUM_WARNINGS = 3
"""Warnings that fit the 24 lines of a small terminal."""


def render(progress: Progress, now: float | None = None) -> RenderableType:
    """Return the screen of a run. The clock shows `now` (Unix seconds), or the time of the last event if it is None."""
    now = progress.updated if now is None else now
    until = (progress.updated if progress.end else now) or 0.0
    minutes, second = divmod(int(max(0.0, until - (progress.started or 0.0))), 60)
    hour, minute = divmod(minutes, 60)
    state = "paused" if progress.is_paused else "training" if progress.steps else "starting"
    state = progress.end.get("status", "ended") if progress.end else state
    done = "" if progress.share_done is None else f"  {progress.share_done:.0%}"
    return panel(
        progress,
        f"{progress.run or 'run'}  step {position(progress)}",
        f"{state}{done}  {hour}:{minute:02d}:{second:02d}",
        figures(progress),
        _notes(progress, now),
        wraps=False,
        done=progress.share_done,
    )


def _notes(progress: Progress, now: float | None) -> Iterator[Note]:
    if paused := progress.paused.values():
        at, actors = now or 0.0, ", ".join(sorted(progress.paused))
        since_s = at - min(event["since"] for event in paused)
        probe_in_s = max(0.0, min(event["time"] + event["probe_in_s"] for event in paused) - at)
        reason = next(iter(paused))["reason"]
        text = f"paused at {actors} for {since_s:.0f} s, probing again in {probe_in_s:.0f} s: {reason}"
        yield "rewards", text, "bold yellow"
    elif progress.advice and not progress.is_paused:
        yield "advice", progress.advice["sentence"], ""
    yield from (("warnings", warning, "yellow") for warning in progress.warnings[-_NUM_WARNINGS:])


def watch(
    path: Path,
    *,
    console: Console | None = None,
    stop: threading.Event | None = None,
    since: float = 0.0,
    poll_s: float = 0.25,
    clock: Callable[[], float] = time.time,
) -> Progress:
    """Show the run that writes `path` until its `end` event or until `stop` is set.

    Args:
        since: Unix time of this start of the run. Earlier events print no line and show no warning, and an earlier `end`
            does not end the watch.
    Returns:
        The progress of the run at the end.
    """
    console = console or Console()
    stop = stop or threading.Event()
    follower, progress = Follower(path), Progress()
    live = Live(render(Progress(), clock()), console=console, auto_refresh=False) if console.is_terminal else None
    newest = skip_until = since
    drawn = 0.0
    try:
        if live:
            live.start()
            console.show_cursor(True)  # a killed run could not show it again
        while True:
            stopping, came = stop.is_set(), False
            for event in follower.poll():
                came = True
                progress.update(event)
                if event["event"] == "rewound":
                    skip_until = newest  # the follower repeats some; print only what is new
                at = event.get("time", 0.0)
                newest = max(newest, at)
                if at < since:
                    progress.warnings.clear()
                if live is None and at > skip_until and (line := line_of(event, progress)) is not None:
                    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
            if live and (came or clock() >= drawn + 1):
                live.update(render(progress, drawn := clock()), refresh=True)
            if stopping or (progress.end and progress.end["time"] >= since):
                return progress
            stop.wait(poll_s)
    finally:
        if live:
            live.stop()
