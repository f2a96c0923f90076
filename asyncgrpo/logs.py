"""Logging setup: one line per event, with time, role and rank.

Every record goes to `<folder>/logs/<role>-<rank>.log`, warnings and worse also to stderr. A line looks like
`2026-11-20T17:15:03.250Z INFO learner-0 asyncgrpo.learner.learner: step 17 done`. Full files are rotated to
`<role>-<rank>.log.1` and `.log.2`; the oldest is deleted.

A line may quote external text, such as a completion or a file name. Its control characters are escaped, so that a log
cannot control the terminal.
"""

import contextlib
import logging
import logging.handlers
import re
import sys
import time
from pathlib import Path

LARGEST_BYTES = 64 * 2**20
"""Largest size of one log file."""
OLDER_FILES = 2
"""Rotated files kept per process."""

_OURS = "asyncgrpo setup"
# Every character but tabs, line ends and printable ones: control characters, lone surrogates, text direction marks.
_INVISIBLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def say_warnings() -> None:
    """Print warnings as `warning: ...` to stderr in a process that has not called `setup`."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))


def visible(text: str) -> str:
    """Escape control characters in `text`, for example as `\\x1b`, because they could control the terminal."""
    return _INVISIBLE.sub(lambda match: _escaped(ord(match[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Format(logging.Formatter):
    """Formats records with UTC times in milliseconds. Continuation lines of a record are indented."""

    converter = staticmethod(time.gmtime)

    def __init__(self, who: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {who} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record)).rstrip("\n").replace("\n", "\n    ")


class _File(logging.handlers.RotatingFileHandler):
    """Reports a full disk once, in place of logging's traceback for each record."""

    _has_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a wrong logging call
            super().handleError(record)
        elif not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(OSError):  # stderr may be a file on the same disk
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it retries the failed writes
            super().close()


def setup(role: str, rank: int | None, folder: Path) -> Path:
    """Set up the logging of this process. A second call replaces the first.

    Args:
        role: `driver`, `buffer`, `generator` or `learner`.
        rank: number of this process in its role; None: it is the only one.
    Returns:
        The log file, to which records are appended.
    """
    who = role if rank is None else f"{role}-{rank}"
    path = folder / "logs" / f"{who}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, maxBytes=LARGEST_BYTES, backupCount=OLDER_FILES, encoding="utf-8")
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setLevel(logging.WARNING)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name == _OURS]:
        root.removeHandler(old)
        old.close()
    for handler in (file, stderr):
        handler.name = _OURS
        handler.setFormatter(_Format(who))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncgrpo").setLevel(logging.INFO)
    return path
