"""Parts of a file of events: from a place in it on, or its newest events first. Each costs the same however long the file is."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

Event = dict[str, Any]

LARGEST_BYTES = 4 * 2**20
"""Read at once."""
_BLOCK_BYTES = 2**18
_MARK_BYTES = 2**14
"""More than one event, so that its time is among them: a step that is trained again looks the same but for that."""


class Tail(Struct, frozen=True, kw_only=True):
    """Whole lines of a file of events, and where to go on."""

    events: list[Event]
    next: int
    """Bytes from the beginning of the file; give it as `after` to go on."""
    size: int
    """Bytes of the file. There is more at once while `next` is less."""
    file: str
    """Digest of the bytes before `next`, empty while there is no file. A resume takes events out and changes it."""
    rewound: bool
    """True if what stands before `after` is not what the reader knew. The reader forgets that: `events` begin anew."""


def read_tail(path: Path, after: int = 0, *, file: str | None = None, limit: int = 10_000) -> Tail:
    """Read events after a place in the file, oldest first; none while there is no file.

    A line that is still being written is left for the next call, one that is no event is skipped. After a resume took out
    what the reader knew it reads the last 4 MiB.

    Args:
        after: where to begin, a `Tail.next`; a negative one counts from the end. One that is no beginning of a line begins
            with the next.
        file: `Tail.file` of the call before; None: there was none.
        limit: events, at most. It reads at most 4 MiB as well.
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
    """Bytes of a file of events, and a few before them."""

    begin: int
    """Bytes of the file before the first whole line in it."""
    base: int
    """Bytes of the file before `data`."""
    data: bytes
    size: int
    """Bytes of the file."""
    rewound: bool
    """As in `Tail`."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines, each with the bytes of the file up to its end."""
        end = self.begin
        for line in self.data[self.begin - self.base :].splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield (end := end + len(line)), line

    def mark(self, place: int) -> str:
        """Return a digest of what stands right before a place: events have times, so it is that of no other place."""
        end = place - self.base
        return xxhash.xxh3_64_hexdigest(self.data[max(0, end - _MARK_BYTES) : end])


def read_block(path: Path, after: int, mark: str | None = None) -> Block | None:
    """Read at most 4 MiB of a file; None while there is none.

    Args:
        after: as in `read_tail`.
        mark: what `Block.mark` gave for `after`; None or empty: not known.
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
    if start and data[start - base - 1 : start - base] != b"\n":  # it is in the middle of a line
        cut = data.find(b"\n", start - base) + 1
        block = block._replace(begin=base + cut) if cut else block._replace(data=data[: start - base])
    return block


def newest_first(path: Path) -> Iterator[Event]:
    """Read events from the end of the file on, newest first; none where there is no file. A torn last line is ignored."""
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
            rest = lines.pop(0) if start > 0 else b""  # it may begin in the block before
            for line in reversed(lines):
                if line.endswith(b"\n") and (event := decode(line)) is not None:
                    yield event
            end = start


def decode(line: bytes) -> Event | None:
    """Decode a line; None if it is no event."""
    try:
        event: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
