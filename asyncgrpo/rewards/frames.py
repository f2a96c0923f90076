"""What the pool and its workers say to each other: msgpack in frames that begin with their length.

The pool sends a `Call` and the worker answers with a `Score`, one at a time. A worker's first frame is a `Hello`.
"""

import struct
from typing import Any, BinaryIO

import msgspec

LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20
"""Bytes. A longer reply means that something else wrote into the pipe."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has loaded what it scores with, or says why it cannot."""

    error: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to score, and what a reward may look at."""

    data_source: str
    answer_text: str
    ground_truth: Any
    info: dict[str, Any] = {}
    prompt_text: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Encode one message. Raises TypeError, ValueError or OverflowError for values that msgpack cannot hold."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(file: BinaryIO) -> bytes | None:
    """The body of the next frame, or None at the end of the file."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = file.read(length)
    return body if len(body) == length else None
