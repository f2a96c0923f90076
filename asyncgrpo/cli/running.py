"""What `demo`, `train` and `serve` share: claim the run folder, show the run while it goes on, and sum it up."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from asyncgrpo.config import Config
from asyncgrpo.config_help import sizes_in_words
from asyncgrpo.config_loading import to_yaml
from asyncgrpo.errors import ConfigError

if TYPE_CHECKING:  # importing the cluster imports ray
    from asyncgrpo.cluster.chaos import Plan
    from asyncgrpo.cluster.run import Outcome


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
    from asyncgrpo.cluster.folder import RunFolder
    from asyncgrpo.cluster.run import Run
    from asyncgrpo.learner.checkpoints import read_state
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.events import read_events
    from asyncgrpo.recording.screen import watch
    from asyncgrpo.recording.summary import summary

    check_run(config)
    sizes = sizes_in_words(config, algorithm)
    console.print(sizes, highlight=False)
    folder = RunFolder(Path(config.run.out))
    folder.claim()
    checkpoint, events = folder.checkpoint(), folder.path / "metrics.jsonl"
    if checkpoint is not None:
        done = read_state(checkpoint).step
        if config.run.steps is not None and done >= config.run.steps:
            raise ConfigError(
                f"run.out {config.run.out} holds a run with {done} steps done and run.steps is {config.run.steps}; "
                "raise run.steps to go on, or choose another folder"
            )
        console.print(f"going on from step {done} ({checkpoint})", highlight=False)
    elif folder.status() == "unfinished":
        console.print(f"{config.run.out} has no checkpoint yet: starting again from step 0", highlight=False)
    (folder.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    stop, started = threading.Event(), time.time()
    screen = threading.Thread(
        target=watch, args=(events,), kwargs={"console": console, "stop": stop, "since": started}, daemon=True
    )
    screen.start()
    try:
        outcome = Run(config, folder, sizes, chaos).execute(tell=lambda text: console.print(text, highlight=False))
    finally:
        stop.set()
        screen.join(timeout=10.0)
        folder.release()
    history = list(read_events(events))
    if any(event["event"] == "step" for event in history):
        plot(history, folder.path / "curves.png")
    console.print(summary(history, folder.path), highlight=False, soft_wrap=True)
    return outcome
