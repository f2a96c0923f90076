"""Messages to frames and back: `[digest and msgspec header][one packed payload]`, nothing else, and never pickle.

Every pair of frames carries an xxh3 digest over both, so a flipped bit is refused by name instead of trained on. Arrays
travel as raw little-endian bytes. Whatever arrives is checked before anything is allocated from its claims.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from asyncgrpo.errors import WireError
from asyncgrpo.types import Completion, Group, Rollout
from asyncgrpo.wire.messages import AnyMessage, Batch, Deliver, Message, RolloutHeader

DIGEST_BYTES = 8
BYTES_PER_TOKEN = 8
"""int32 token id and float32 log-prob."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)

Buffer = bytes | bytearray | memoryview


def _digest(header: Buffer, payload: Buffer) -> bytes:
    hasher = xxhash.xxh3_64(header)
    hasher.update(payload)
    return hasher.digest()


def encode(message: Message, payload: Buffer = b"") -> list[Buffer]:
    """Two frames: digest + header, and the payload (empty for most messages)."""
    header = _encoder.encode(message)
    return [_digest(header, payload) + header, payload]


def decode(frames: Sequence[Buffer]) -> tuple[Message, memoryview]:
    """The inverse of `encode`.

    Raises:
        WireError: wrong number of frames, digest mismatch, or a header that fits no message.
    """
    if len(frames) != 2 or len(frames[0]) <= DIGEST_BYTES:
        raise WireError(
            f"a message has 2 frames, the first longer than {DIGEST_BYTES} bytes; got {[len(f) for f in frames]}"
        )
    first, payload = memoryview(frames[0]), memoryview(frames[1])
    header = first[DIGEST_BYTES:]
    if _digest(header, payload) != first[:DIGEST_BYTES]:
        raise WireError("digest mismatch: the message was altered on its way")
    try:
        return _decoder.decode(header), payload
    except msgspec.MsgspecError as error:
        raise WireError(f"header fits no known message: {error}") from error


def pack_group(group: Group) -> tuple[Deliver, bytes]:
    """A group as message and payload."""
    parts: list[bytes] = []
    headers = []
    for rollout in group.rollouts:
        completion = rollout.completion
        parts.append(np.ascontiguousarray(completion.token_ids, dtype="<i4").tobytes())
        parts.append(np.ascontiguousarray(completion.logprobs, dtype="<f4").tobytes())
        headers.append(
            RolloutHeader(
                index=completion.index,
                num_tokens=len(completion.token_ids),
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                score=rollout.score,
                seed=rollout.seed,
            )
        )
    message = Deliver(
        group_id=group.group_id,
        lease_id=group.lease_id,
        attempt=group.attempt,
        order=group.order,
        purpose=group.purpose,
        prompt=group.prompt,
        rollouts=tuple(headers),
        generator_id=group.generator_id,
        timings=group.timings,
        discarded=group.discarded,
    )
    return message, b"".join(parts)


def unpack_group(message: Deliver, payload: Buffer) -> Group:
    """The inverse of `pack_group`; arrays are read-only views of `payload`.

    Raises:
        WireError: sizes, spans, log-probs or scores that cannot be.
    """
    check_group(message, len(payload))
    rollouts, offset = [], 0
    for header in message.rollouts:
        num_tokens = header.num_tokens
        token_ids = np.frombuffer(payload, "<i4", num_tokens, offset)
        logprobs = np.frombuffer(payload, "<f4", num_tokens, offset + 4 * num_tokens)
        offset += BYTES_PER_TOKEN * num_tokens
        if not np.isfinite(logprobs).all():
            raise WireError(f"group {message.group_id}, answer {header.index}: a log-prob is not finite")
        completion = Completion(header.index, token_ids, logprobs, header.spans, header.finish_reason)
        rollouts.append(Rollout(completion, header.score, header.seed))
    return Group(
        group_id=message.group_id,
        lease_id=message.lease_id,
        attempt=message.attempt,
        order=message.order,
        purpose=message.purpose,
        prompt=message.prompt,
        rollouts=tuple(rollouts),
        generator_id=message.generator_id,
        timings=message.timings,
        discarded=message.discarded,
    )


def check_group(message: Deliver, payload_bytes: int) -> None:
    """Refuse what the schema cannot: lengths that do not add up, spans that do not partition, scores that are no numbers.

    Raises:
        WireError: names the group and what is wrong with it.
    """
    where = f"group {message.group_id}"
    if any(h.num_tokens < 0 for h in message.rollouts):
        raise WireError(f"{where}: a negative length")
    if min(msgspec.structs.astuple(message.discarded)) < 0:
        raise WireError(f"{where}: a negative count of what was discarded")
    expected = BYTES_PER_TOKEN * sum(h.num_tokens for h in message.rollouts)
    if payload_bytes != expected:
        raise WireError(f"{where}: payload has {payload_bytes} bytes, its header says {expected}")
    for header in message.rollouts:
        edges = [0]
        for span in header.spans:
            if span.start != edges[-1] or span.end <= span.start:
                raise WireError(f"{where}, answer {header.index}: version spans do not partition the answer")
            edges.append(span.end)
        if edges[-1] != header.num_tokens:
            raise WireError(
                f"{where}, answer {header.index}: version spans end at {edges[-1]} of {header.num_tokens} tokens"
            )
        versions = [span.version for span in header.spans]
        if versions != sorted(versions):
            raise WireError(f"{where}, answer {header.index}: weight versions decrease")
        score = header.score
        if (score.value is None) == (score.failure is None):
            raise WireError(f"{where}, answer {header.index}: a score is either a value or a named failure")
        if score.value is not None and not np.isfinite(score.value):
            raise WireError(f"{where}, answer {header.index}: the score is not finite")


def unpack_batch(message: Batch, payload: memoryview) -> list[Group]:
    """The groups of a batch. Raises WireError."""
    groups, offset = [], 0
    for header, size in zip(message.groups, message.payload_sizes, strict=True):
        groups.append(unpack_group(header, payload[offset : offset + size]))
        offset += size
    return groups
