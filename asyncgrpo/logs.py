"""Logging setup: one line an event, with time, role and rank.

Everything goes to `<folder>/logs/<role>-<rank>.log`; warnings and worse also to stderr, where a person may be looking.
Lines look like `2026-11-20T17:15:03.250Z INFO learner-0 asyncgrpo.learner.learner: step 17 done`.
"""

import logging
import sys
import time
from pathlib import Path

_OURS = "asyncgrpo setup"


class _Format(logging.Formatter):
    """UTC with milliseconds. Further lines of a message or traceback are indented, so that only events start a line."""

    converter = staticmethod(time.gmtime)

    def __init__(self, who: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {who} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n").replace("\n", "\n    ")


def setup(
    role: str, rank: int | str | None = None, folder: Path | None = None, level: int = logging.INFO
) -> Path | None:
    """Send this process's log records where they belong. Calling it again replaces what the last call set up.

    Args:
        role: `driver`, `buffer`, `generator` or `learner`.
        rank: which of several; none: the only one.
        folder: run folder; none: no file, and stderr has everything from `level` up.
        level: of our own loggers; other packages are heard from WARNING up.
    Returns:
        The log file, appended to, or None.
    """
    who = role if rank is None else f"{role}-{rank}"
    handlers: list[logging.Handler] = [stderr := logging.StreamHandler(sys.stderr)]
    path = None
    if folder is not None:
        path = folder / "logs" / f"{who}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
        stderr.setLevel(logging.WARNING)

    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name == _OURS]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.name = _OURS
        handler.setFormatter(_Format(who))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncgrpo").setLevel(level)
    return path
