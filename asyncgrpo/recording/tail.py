"""Reads part of an event file: from an offset on, or the newest events first. The cost does not grow with the file."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

Event = dict[str, Any]

LARGEST_BYTES = 4 * 2**20
"""Largest number of bytes read at once."""
_BLOCK_BYTES = 2**18
_MARK_BYTES = 2**14
"""Longer than one event, so that a mark covers an event's time: a retrained step may otherwise look the same."""


class Tail(Struct, frozen=True, kw_only=True):
    """Whole lines of an event file, and the offset of the next read."""

    events: list[Event]
    next: int
    """Byte offset of the next read; pass it as `after`."""
    size: int
    """Size of the file, bytes. More events can be read at once while `next` is smaller."""
    file: str
    """Digest of the bytes before `next`; empty if the file does not exist. A resume removes events and changes it."""
    rewound: bool
    """True if the bytes before `after` are not those of the previous read. The reader discards its state: `events` restart."""


def read_tail(path: Path, after: int = 0, *, file: str | None = None, limit: int = 10_000) -> Tail:
    """Read events from an offset on, oldest first; none if the file does not exist.

    An incomplete last line is left for the next call; invalid lines are skipped. If a resume has removed events that were
    already read, the last 4 MiB are read.

    Args:
        after: start offset, a `Tail.next`; a negative one counts from the end. An offset within a line means the next line.
        file: `Tail.file` of the previous call; None: this is the first call.
        limit: largest number of events. At most 4 MiB are read as well.
    """
    block = read_block(path, after, file)
    if block is None:
        return Tail(events=[], next=0, size=0, file="", rewound=bool(file))
    events: list[Event] = []
    end = block.begin
    for end_of_line, line in block.lines():
        if len(events) >= limit:
            break
        end = end_of_line
        if (event := decode(line)) is not None:
            events.append(event)
    return Tail(events=events, next=end, size=block.size, file=block.mark(end), rewound=block.rewound)


class Block(NamedTuple):
    """Bytes of an event file, and a few before them."""

    begin: int
    """Offset of the first whole line."""
    base: int
    """Offset of `data`."""
    data: bytes
    size: int
    """Size of the file, bytes."""
    rewound: bool
    """See `Tail.rewound`."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines, each with the offset of its end."""
        end = self.begin
        for line in self.data[self.begin - self.base :].splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield (end := end + len(line)), line

    def mark(self, place: int) -> str:
        """Return a digest of the bytes right before an offset. Events have times, so it is unique to the offset."""
        end = place - self.base
        return xxhash.xxh3_64_hexdigest(self.data[max(0, end - _MARK_BYTES) : end])


def read_block(path: Path, after: int, mark: str | None = None) -> Block | None:
    """Read at most 4 MiB of a file; None if it does not exist.

    Args:
        after: see `read_tail`.
        mark: result of `Block.mark` for `after`; None or empty: unknown.
    """
    try:
        with open(path, "rb") as file:
            size, rewound = os.fstat(file.fileno()).st_size, False
            while True:
                start = min(after, size) if after >= 0 else max(0, size + after)
                file.seek(base := max(0, start - _MARK_BYTES))
                data = file.read(min(size - base, start - base + LARGEST_BYTES))
                block = Block(start, base, data, size, rewound)
                if not mark or (after <= size and mark == block.mark(start)):
                    break
                after, mark, rewound = -LARGEST_BYTES, None, True
    except FileNotFoundError:
        return None
    if start and data[start - base - 1 : start - base] != b"\n":  # within a line
        cut = data.find(b"\n", start - base) + 1
        block = block._replace(begin=base + cut) if cut else block._replace(data=data[: start - base])
    return block


def newest_first(path: Path) -> Iterator[Event]:
    """Yield events from the end of the file, newest first; none if it does not exist. A torn last line is ignored."""
    try:
        opened = open(path, "rb")  # noqa: SIM115  closed below
    except FileNotFoundError:
        return
    with opened:
        end, rest = opened.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            opened.seek(start)
            lines = (opened.read(end - start) + rest).splitlines(keepends=True)
            rest = lines.pop(0) if start > 0 else b""  # it may begin in the previous block
            for line in reversed(lines):
                if line.endswith(b"\n") and (event := decode(line)) is not None:
                    yield event
            end = start


def decode(line: bytes) -> Event | None:
    """Decode a line; return None if it is not an event."""
    try:
        event: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
