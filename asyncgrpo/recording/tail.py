"""A part of a file of events, from a place in it to as many as asked for: for readers that come back for more."""

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncgrpo.recording.events import Event

LARGEST_BYTES = 4 * 2**20
"""Read at once."""


class Tail(Struct, frozen=True, kw_only=True):
    """Whole lines of a file of events, and where to go on."""

    events: list[Event]
    next: int
    """Bytes from the beginning of the file; give it as `after` to go on."""
    size: int
    """Bytes of the file. There is more at once while `next` is less."""
    file: str
    """Which file it is, empty while there is none. A resume puts another in its place."""
    rewound: bool
    """The file is another one than the reader knew, so this begins anew, and what the reader knew is to be forgotten."""


def read_tail(path: Path, after: int = 0, *, file: str | None = None, limit: int = 10_000) -> Tail:
    """Events after a place in the file, oldest first; none while there is no file.

    A line that is still being written is left for the next call, one that is no event is skipped.

    Args:
        after: where to begin, a `Tail.next`; a negative one counts from the end. One that is no beginning of a line begins
            with the next.
        file: `Tail.file` of the call before; None: there was none.
        limit: events, at most. It reads at most 4 MiB as well.
    """
    try:
        with open(path, "rb") as opened:
            there = os.fstat(opened.fileno())
            rewound = bool(file) and (file != f"{there.st_ino:x}" or after > there.st_size)
            start = 0 if rewound else min(after if after >= 0 else max(0, there.st_size + after), there.st_size)
            opened.seek(max(0, start - 1))
            read = opened.read(LARGEST_BYTES)
    except FileNotFoundError:
        return Tail(events=[], next=0, size=0, file="", rewound=bool(file))
    if start:  # it may be in the middle of a line
        cut = read.find(b"\n") + 1
        start, read = (start - 1 + cut, read[cut:]) if cut else (start, b"")
    events: list[Event] = []
    for line in read.splitlines(keepends=True):
        if len(events) >= limit or not line.endswith(b"\n"):
            break
        start += len(line)
        if (event := _event(line)) is not None:
            events.append(event)
    return Tail(events=events, next=start, size=there.st_size, file=f"{there.st_ino:x}", rewound=rewound)


def _event(line: bytes) -> Event | None:
    try:
        event: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
