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

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncgrpo.logs import visible
from asyncgrpo.recording.events import Follower
from asyncgrpo.recording.progress import Progress
from asyncgrpo.recording.text import figures, line_of, number, position

# -- the panel of a run ------------------------------------------------------------------------------------------------

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 40
_COLOURS = {"training": "green", "done": "green", "drained": "green", "starting": "cyan"}
_COLOURS |= {"paused": "yellow", "draining": "yellow", "failed": "red", "no reply": "red"}

Note = tuple[str, str, str]
"""Name, text and style of a line below the figures."""


def curve_of(values: Sequence[float]) -> str:
    """Draw values as a line of bars between the smallest and the largest; several values in one place are averaged."""
    count, low, high = min(_CURVE_WIDTH, len(values)), min(values), max(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return f"{number(low)} {''.join(_BARS[round((mean - low) * scale)] for mean in means)} {number(high)}"


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
    """Return a run as a panel: its figures with the curve of the reward, and notes below them.

    Args:
        wraps: False: longer lines are cut, so that the panel keeps its height.
        done: share of the run that is done, for a progress bar.
    """
    overflow = {"overflow": "fold"} if wraps else {"overflow": "ellipsis", "no_wrap": True}
    tables = []
    upper = [(name, text, "") for name, text in rows]
    if progress.rewards:
        upper.insert(0, ("curve", curve_of([reward for _, reward in progress.rewards]), "green"))
    for lines in (upper, notes):
        tables.append(table := Table.grid(padding=(0, 2)))
        table.add_column(style="dim", no_wrap=True, min_width=10)
        table.add_column(**overflow)  # type: ignore[arg-type]
        before = ""
        for name, text, style in lines:
            table.add_row("" if name == before else name, Text(visible(text), style=style))
            before = name
    colour = next((colour for word, colour in _COLOURS.items() if state.startswith(word)), "white")
    heading = Text.assemble((f"{title}  ", "bold cyan"), (state, f"bold {colour}"))
    bar = () if done is None else (Padding(ProgressBar(total=1.0, completed=done)),)  # which ends its line
    return Panel(Group(*bar, *tables), title=heading, title_align="left", border_style=border, padding=(0, 1))


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
