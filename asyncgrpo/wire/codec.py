"""Encodes messages as two frames, `[digest and msgspec header][packed payload]`, and decodes them. It never pickles.

The xxh3 digest covers both frames, so a message with a flipped bit is refused and never trained on. Arrays travel as raw
little-endian bytes. Sizes are checked before decoding, and no claimed size allocates memory. `wire/groups.py` checks the
contents of a group.
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
    """The message kinds that a process accepts, recognized by the first bytes of a header."""

    def __init__(self, union: UnionType) -> None:
        self._by_start = {}
        for kind in get_args(union):
            tag = msgspec.msgpack.encode({"kind": kind.__struct_config__.tag})[1:]
            self._by_start[tag] = kind

    def of(self, header: memoryview) -> type[Message] | None:
        """Return the kind that a header claims; None if it is not among these.

        The tag must be the first field of a header, where `encode` puts it.
        """
        start = bytes(header[:40])
        tag_at = 1 if start[0] & 0xF0 == 0x80 else 3  # a map of up to 15 fields, or of up to 65,535
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
    """Encode a message as two frames: digest and header, and the payload (empty for most messages).

    Raises:
        WireError: the message exceeds the size limits of its kind, because a prompt of the data is too long.
    """
    header = _encoder.encode(message)
    if len(header) > message.max_header_bytes or len(payload) > message.max_payload_bytes:
        raise WireError(_too_long(type(message), header, payload))
    return [_digest(header, payload) + header, payload]


def decode(frames: Sequence[Buffer], kinds: Kinds = ANY) -> tuple[Message, memoryview]:
    """Decode two frames into a message and its payload: the inverse of `encode`.

    Args:
        kinds: accepted kinds. Other messages are refused before they are decoded.
    Raises:
        RefusedError: by `decode` (wrong number of frames, or an unknown header), `checksum` or `size`.
    """
    if len(frames) != 2 or len(frames[0]) <= DIGEST_BYTES:
        sizes = [len(frame) for frame in frames[:8]]
        raise RefusedError("decode", f"a message has 2 frames, the first longer than {DIGEST_BYTES} bytes; got {sizes}")
    first, payload = memoryview(frames[0]), memoryview(frames[1])
    header = first[DIGEST_BYTES:]
    if _digest(header, payload) != first[:DIGEST_BYTES]:
        raise RefusedError("checksum", "digest mismatch: the message was altered in transit")
    kind = kinds.of(header)
    if kind is None:
        raise RefusedError("decode", "header matches no message that this process accepts")
    if len(header) > kind.max_header_bytes or len(payload) > kind.max_payload_bytes:
        raise RefusedError("size", _too_long(kind, header, payload))
    try:
        return _decoder.decode(header), payload
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # invalid UTF-8, unbounded nesting
        raise RefusedError("decode", f"header matches no known message: {error}") from error


def _too_long(kind: type[Message], header: Buffer, payload: Buffer) -> str:
    return (
        f"{kind.__name__} has {len(header)} bytes of header and {len(payload)} of payload; "
        f"the limits are {kind.max_header_bytes} and {kind.max_payload_bytes}"
    )
