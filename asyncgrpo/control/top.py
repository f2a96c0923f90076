"""`asyncgrpo top`: one or several runs on a terminal, live, and a key to pause one."""

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from asyncgrpo.control.client import Command, Look, Pause, Resume, RunClient
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import visible
from asyncgrpo.recording.screen import panel

REFRESH_S = 1.0
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
        """Return the page."""
        panels = []
        for look in self.looks:
            notes = [("advice", text, "green") for text in look.advice()]
            notes += [("problems", text, "bold yellow") for text in look.warnings()]
            border = "cyan" if look is self.selected and len(self.looks) > 1 else "dim"
            title = f"{look.name}  step {look.position}"
            panels.append(panel(look.progress, title, look.state, look.rows(), notes, border=border))
        return Group(*panels, self._last_line())

    def _last_line(self) -> Text:
        if self._asked is not None:
            return Text(f"{self._asked[0]} {self.selected.name}? y: yes, any other key: no", style="bold yellow")
        keys = ["q quit", "p pause", "r resume", *(["tab next run"] if len(self.looks) > 1 else [])]
        return Text("  ".join(filter(None, ["   ".join(keys), visible(self._said)])), style="dim")


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

    def refresh() -> None:
        while not stop.wait(REFRESH_S):
            top.refresh()

    looking = threading.Thread(target=refresh, daemon=True)  # a key must not wait for a slow run
    with _keys() as next_key, Live(top.render(), console=console, auto_refresh=False, screen=True) as live:
        looking.start()
        try:
            while top.press(next_key(REFRESH_S / 4)):
                live.update(top.render(), refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key, and returns it or an empty text."""
    is_terminal, descriptor = sys.stdin.isatty(), sys.stdin.fileno()

    def next_key(seconds: float) -> str:
        has_key = select.select([descriptor] if is_terminal else [], [], [], seconds)[0]
        return os.read(descriptor, 1).decode(errors="replace") if has_key else ""

    before = termios.tcgetattr(descriptor) if is_terminal else None
    try:
        if is_terminal:
            tty.setcbreak(descriptor)
        yield next_key
    finally:
        if before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
