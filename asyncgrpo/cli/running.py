"""What `demo`, `train` and `serve` share: claim the run folder, show the run while it goes on, and sum it up."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from asyncgrpo.config.explain import sizes_in_words
from asyncgrpo.config.schema import Config

if TYPE_CHECKING:  # importing the cluster imports ray
    from asyncgrpo.cluster.folder import RunFolder
    from asyncgrpo.cluster.run import Outcome
    from asyncgrpo.tools.chaos import Plan


def choose_folder(default: str, explicit: str | None) -> Path:
    """The folder asked for, or the first of `default`, `default-2`, ... without a finished run."""
    from asyncgrpo.cluster.folder import unused

    return Path(explicit) if explicit else unused(Path(default))


def execute(
    config: Config, console: Console, *, algorithm: str | None = None, chaos: "Plan | None" = None
) -> "Outcome":
    """Run `config` in its folder until it is done or asked to stop, with the screen on `console`.

    A folder with an unfinished run is gone on with, from its newest checkpoint.

    Args:
        algorithm: name of the preset that `config` was made with, to be said with its sizes.
        chaos: faults to do to the run on purpose.
    Raises:
        AsyncGRPOError: in one sentence, whatever ended the run.
    """
    from asyncgrpo.cli.preflight import check_run
    from asyncgrpo.cluster.folder import RunFolder, look, record
    from asyncgrpo.cluster.run import Run

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    check_run(config)
    sizes = sizes_in_words(config, algorithm)
    folder = RunFolder(Path(config.run.out))
    folder.claim()
    try:
        standing = look(config, folder)
        for line in (sizes, *standing.lines(config.run.out)):
            say(line)
        record(config, folder, standing)
        with _screen(folder, console):
            outcome = Run(config, folder, sizes, chaos).execute(tell=say)
    finally:
        folder.release()
    say(_last_words(folder))
    return outcome


@contextmanager
def _screen(folder: "RunFolder", console: Console) -> Iterator[None]:
    """Show the run's events while it goes on."""
    from asyncgrpo.recording.screen import watch

    stop = threading.Event()
    arguments = {"console": console, "stop": stop, "since": time.time()}
    screen = threading.Thread(target=watch, args=(folder.path / "metrics.jsonl",), kwargs=arguments, daemon=True)
    screen.start()
    try:
        yield
    finally:
        stop.set()
        screen.join(timeout=10.0)


def _last_words(folder: "RunFolder") -> str:
    """Draw the curves, and sum the run up."""
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.events import read_events
    from asyncgrpo.recording.text import summary

    history = list(read_events(folder.path / "metrics.jsonl"))
    if any(event["event"] == "step" for event in history):
        plot(history, folder.path / "curves.png")
    return summary(history, folder.path)
