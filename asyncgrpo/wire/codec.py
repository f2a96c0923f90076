"""Encodes a message as two frames, `[digest and msgspec header][one packed payload]`, and decodes them. Never pickle.

The digest (xxh3) covers both frames, so a message with a flipped bit is refused by name and never trained on. Arrays
travel as raw little-endian bytes. A message is measured before it is decoded, and no memory is allocated by what it
claims. The contents of a group are checked by `wire/groups.py`.
"""

from collections.abc import Sequence
from types import UnionType
from typing import get_args

import msgspec
import xxhash

from asyncgrpo.errors import RefusedError, WireError
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import OfGenerator, OfLearner, ToGenerator, ToLearner
from asyncgrpo.wire.supervision import OfDriver, ToDriver, ToEveryone
from asyncgrpo.wire.weights import ToPublisher, ToReceiver

OfLearnerOrDriver = OfLearner | OfDriver
ToBuffer = OfGenerator | OfLearnerOrDriver
AnyMessage = ToBuffer | ToGenerator | ToLearner | ToPublisher | ToReceiver | ToDriver | ToEveryone

DIGEST_BYTES = 8

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)

Buffer = bytes | bytearray | memoryview


class Kinds:
    """The kinds of messages that a process reads, found by the first bytes of a header."""

    def __init__(self, union: UnionType) -> None:
        self._by_start = {}
        for kind in get_args(union):
            tag = msgspec.msgpack.encode({"kind": kind.__struct_config__.tag})[1:]
            self._by_start[tag] = kind

    def of(self, header: memoryview) -> type[Message] | None:
        """The kind that a header claims to be; None if it is none of these.

        The tag must come first in a header, as `encode` puts it.
        """
        start = bytes(header[:40])
        tag_at = 1 if start[0] & 0xF0 == 0x80 else 3  # a map of up to 15 fields, or of up to 65535
        name_at = tag_at + _TAG_KEY_BYTES
        name_bytes = start[name_at] & 0x1F if len(start) > name_at else 0
        return self._by_start.get(start[tag_at : name_at + 1 + name_bytes])


_TAG_KEY_BYTES = len(msgspec.msgpack.encode("kind"))
ANY = Kinds(AnyMessage)


def _digest(header: Buffer, payload: Buffer) -> bytes:
    hasher = xxhash.xxh3_64(header)
    hasher.update(payload)
    return hasher.digest()


def encode(message: Message, payload: Buffer = b"") -> list[Buffer]:
    """Encode a message as two frames: digest + header, and the payload (empty for most messages).

    Raises:
        WireError: the message is longer than its receiver reads, because a prompt of the data is too long.
    """
    header = _encoder.encode(message)
    if len(header) > message.max_header_bytes or len(payload) > message.max_payload_bytes:
        raise WireError(_too_long(type(message), header, payload))
    return [_digest(header, payload) + header, payload]


def decode(frames: Sequence[Buffer], kinds: Kinds = ANY) -> tuple[Message, memoryview]:
    """Decode two frames into a message and its payload: the inverse of `encode`.

    Args:
        kinds: messages of any other kind are refused before they are decoded.
    Raises:
        RefusedError: by `decode` (wrong number of frames, or a header that fits no message), `checksum` or `size`.
    """
    if len(frames) != 2 or len(frames[0]) <= DIGEST_BYTES:
        sizes = [len(frame) for frame in frames[:8]]
        raise RefusedError("decode", f"a message has 2 frames, the first longer than {DIGEST_BYTES} bytes; got {sizes}")
    first, payload = memoryview(frames[0]), memoryview(frames[1])
    header = first[DIGEST_BYTES:]
    if _digest(header, payload) != first[:DIGEST_BYTES]:
        raise RefusedError("checksum", "digest mismatch: the message was altered on its way")
    kind = kinds.of(header)
    if kind is None:
        raise RefusedError("decode", "header fits no known message that is for us")
    if len(header) > kind.max_header_bytes or len(payload) > kind.max_payload_bytes:
        raise RefusedError("size", _too_long(kind, header, payload))
    try:
        return _decoder.decode(header), payload
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8, nesting without end
        raise RefusedError("decode", f"header fits no known message: {error}") from error


def _too_long(kind: type[Message], header: Buffer, payload: Buffer) -> str:
    return (
        f"{kind.__name__} has {len(header)} bytes of header and {len(payload)} of payload; "
        f"{kind.max_header_bytes} and {kind.max_payload_bytes} are read"
    )
