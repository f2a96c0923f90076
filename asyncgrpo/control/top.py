"""`asyncgrpo top`: one or several runs on a terminal, live, and a key to pause one."""

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncgrpo.control.client import Look, RunClient
from asyncgrpo.control.operator import Command, Pause, Resume
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import visible
from asyncgrpo.recording.screen import line_plot
from asyncgrpo.recording.text import number

if TYPE_CHECKING:
    from collections.abc import Callable

REFRESH_S = 1.0
_PLOT_HEIGHT = 5
_SIDE_BY_SIDE = 110
"""Columns from which the figures have room beside the curve."""
_COLOURS = {"training": "green", "paused": "yellow", "draining": "yellow", "starting": "cyan", "no reply": "red"}
_COMMANDS: dict[str, tuple[str, Command]] = {"p": ("pause", Pause()), "r": ("resume", Resume())}


class Top:
    """The page, and what its keys do. It depends on no terminal."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.looks = [Look(run) for run in runs]
        self._selected = 0
        self._asked: tuple[str, Command] | None = None
        self._said = ""

    @property
    def selected(self) -> Look:
        """The run that keys are for."""
        return self.looks[self._selected]

    def refresh(self) -> None:
        """Look at every run."""
        for look in self.looks:
            look.refresh()

    def press(self, key: str) -> bool:
        """Take a key in. Returns whether to go on."""
        if self._asked is not None:
            name, command = self._asked
            self._asked, self._said = None, self._carry_out(command) if key == "y" else f"{name}: left as it is"
        elif key in _COMMANDS:
            self._asked = _COMMANDS[key]
        elif key == "\t":
            self._selected = (self._selected + 1) % len(self.looks)
        return key != "q"

    def _carry_out(self, command: Command) -> str:
        try:
            return RunClient(self.selected.run_dir).send(command)
        except AsyncGRPOError as error:
            return str(error)

    def render(self) -> RenderableType:
        """The page."""
        panels = [_panel(look, is_selected=look is self.selected and len(self.looks) > 1) for look in self.looks]
        return Group(*panels, self._last_line())

    def _last_line(self) -> Text:
        if self._asked is not None:
            return Text(f"{self._asked[0]} {self.selected.name}? y: yes, any other key: no", style="bold yellow")
        keys = ["q quit", "p pause", "r resume", *(["tab next run"] if len(self.looks) > 1 else [])]
        return Text("  ".join(filter(None, ["   ".join(keys), visible(self._said)])), style="dim")


def _panel(look: Look, *, is_selected: bool) -> Panel:
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(overflow="fold")
    for name, text in look.rows():
        figures.add_row(name, Text(visible(text)))
    title = Text.assemble(
        (look.name, "bold cyan"), f"  step {look.position}  ", (look.state, f"bold {_COLOURS.get(look.state, 'white')}")
    )
    return Panel(
        Group(_Body(_Reward(look.progress.rewards.y), figures), _notes(look)),
        title=title,
        title_align="left",
        border_style="cyan" if is_selected else "dim",
        padding=(0, 1),
    )


def _notes(look: Look) -> RenderableType:
    notes = Table.grid(padding=(0, 2))
    notes.add_column(style="dim", no_wrap=True)
    notes.add_column(overflow="fold")
    for name, lines, style in (("advice", look.advice(), "green"), ("problems", look.warnings(), "bold yellow")):
        for i, line in enumerate(lines):
            notes.add_row("" if i else name, Text(visible(line), style=style))
    return notes


class _Body:
    """The curve beside the figures, or above them where the terminal is narrow."""

    def __init__(self, curve: RenderableType, figures: RenderableType) -> None:
        self._curve, self._figures = curve, figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _SIDE_BY_SIDE:
            yield from (self._curve, self._figures)
            return
        body = Table.grid(expand=True, padding=(0, 2))
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(self._curve, self._figures)
        yield body


class _Reward:
    """The reward curve, as wide as there is room."""

    def __init__(self, rewards: Sequence[float]) -> None:
        self._rewards = rewards

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rewards = self._rewards
        if not rewards:
            yield Text("no step yet" + "\n" * (_PLOT_HEIGHT - 1), style="dim")
            return
        margin = 8
        labels = {0: number(max(rewards)), _PLOT_HEIGHT - 1: number(min(rewards))}
        for row, line in enumerate(line_plot(rewards, max(4, options.max_width - margin), _PLOT_HEIGHT)):
            yield Text.assemble((f"{labels.get(row, ''):>7}│", "dim"), (line, "green"), no_wrap=True)


# -- on a terminal -----------------------------------------------------------------------------------------------------


def watch(runs: Sequence[Path], console: Console | None = None) -> None:
    """Show the runs until `q` or Ctrl-C. Where the output is not a terminal they are printed once."""
    console = console or Console()
    top = Top(runs)
    top.refresh()
    if not console.is_terminal:
        console.print(top.render())
        return
    stop = threading.Event()
    looking = threading.Thread(target=_look_on, args=(top, stop), daemon=True)  # a key must not wait for a slow run
    with _keys() as next_key, Live(top.render(), console=console, auto_refresh=False, screen=True) as live:
        looking.start()
        try:
            while top.press(next_key(REFRESH_S / 4)):
                live.update(top.render(), refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


def _look_on(top: Top, stop: threading.Event) -> None:
    while not stop.wait(REFRESH_S):
        top.refresh()


@contextlib.contextmanager
def _keys() -> "Iterator[Callable[[float], str]]":
    """A function that waits so many seconds for a key, and returns it or an empty text."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def next_key(seconds: float) -> str:
        return (
            os.read(descriptor, 1).decode(errors="replace") if select.select([descriptor], [], [], seconds)[0] else ""
        )

    try:
        tty.setcbreak(descriptor)
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
