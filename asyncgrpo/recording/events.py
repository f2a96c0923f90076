"""`metrics.jsonl`: what happened in a run, one JSON object a line, in order.

It is the source of the live screen, the curves, the summary and the outside loggers. A line is whole on disk as soon
as `write` returns; a line torn by a crash is cut off when the file is opened again; and a step that is trained again
after a resume replaces the one that was lost, so no curve shows a step twice.

Every event has `event` (its kind) and `time` (Unix seconds); `event_kinds.py` has the fields of each kind.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.recording.event_kinds import KINDS

log = logging.getLogger(__name__)

Event = dict[str, Any]

_OF_A_STEP = frozenset({"step", "eval", "checkpoint"})


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers, paths as text."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise NotImplementedError(f"an event cannot hold a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def as_written(event: Event) -> Event:
    """The event as `read_events` will give it: plain values, null for numbers that are not finite."""
    return msgspec.json.decode(_encoder.encode(event))


class EventLog:
    """Appends events to a file.

    Several processes may, each with its own EventLog. `resume_at` is for a moment when only one does.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open for appending, and cut off what a crash left of a last line."""
        self.path = Path(path)
        self._clock = clock
        self._unwritten = b""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            _cut_torn_line(file)

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event and return it. Numbers that are not finite are written as null.

        The file is opened anew each time: another process may have replaced it in `resume_at`. What a full disk refuses
        is kept and goes before the next event.
        """
        kind = KINDS.get(event)
        assert kind is not None, f"unknown event {event!r}"
        assert not (missing := kind.needed - fields.keys()), f"event {event!r} lacks {sorted(missing)}"
        assert not (extra := fields.keys() - kind.fields.keys()), f"event {event!r} has undeclared {sorted(extra)}"
        record = {"event": event, "time": self._clock(), **fields}
        self._unwritten += _encoder.encode(record) + b"\n"
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                if file.write(self._unwritten) < len(self._unwritten):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten = b""
        except OSError as error:
            log.warning("%s cannot be written (%s): its events wait", self.path, error.strerror)
        return record

    def resume_at(self, step: int) -> int:
        """Forget what later steps left: `step`, `eval` and `checkpoint` events beyond `step`.

        The file is replaced in one move, so a crash leaves either the old or the new one.

        Returns:
            Events dropped.
        """
        events = list(read_events(self.path))
        kept = [event for event in events if not (event["event"] in _OF_A_STEP and event.get("step", 0) > step)]
        if dropped := len(events) - len(kept):
            temporary = self.path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                file.writelines(_encoder.encode(event) + b"\n" for event in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            log.info("resumed at step %d: dropped %d events of later steps from %s", step, dropped, self.path)
        return dropped


def _cut_torn_line(file: Any) -> None:
    size = file.seek(0, os.SEEK_END)
    end = size
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        log.warning("cut a torn last line of %d bytes from %s", size - end, file.name)
        file.truncate(end)


def read_events(path: Path) -> Iterator[Event]:
    """Every event of the file, oldest first.

    A torn last line is no event. Another line that is none is skipped with a warning.
    """
    with open(path, "rb") as file:
        yield from _decode(file, Path(path))


def _decode(lines: Any, path: Path) -> Iterator[Event]:
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            event = None
        if isinstance(event, dict) and "event" in event:
            yield event
        else:
            log.warning("skipped a line of %s that is no event: %.80r", path, line)


class Follower:
    """Reads a file of events while it is written, for the live screen."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: Any = None
        self._rest = b""

    def poll(self) -> list[Event]:
        """Events since the last call; none while the file does not exist.

        When the file has been replaced by a resume, an event `{"event": "rewound"}` (never in a file) comes first and
        then every event from the start: a reader forgets what it knew.
        """
        events: list[Event] = []
        if self._file is not None and self._replaced():
            self.close()
            events.append({"event": "rewound"})
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115  kept open so that its inode cannot be reused
            except FileNotFoundError:
                return events
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        events += _decode((line + b"\n" for line in lines), self.path)
        return events

    def _replaced(self) -> bool:
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return False
        ours = os.fstat(self._file.fileno())
        return (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev) or now.st_size < self._file.tell()

    def close(self) -> None:
        """Let go of the file; a later poll begins anew."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""


def follow(path: Path) -> Follower:
    """A poller of the events of `path`, which need not exist yet."""
    return Follower(path)
