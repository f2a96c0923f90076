"""Encodes messages as two frames, `[digest and msgspec header][packed payload]`, and decodes them. It never pickles.

The xxh3 digest covers both frames, so a message with a flipped bit is refused and never trained on. Arrays travel as raw
little-endian bytes. Sizes are checked before decoding, and no claimed size allocates memory.

A group is a message and a payload of raw arrays. `check_group` checks what a schema cannot, before the group is stored:
lengths, spans, scores, and every token and log-prob of the payload. `check_lease` compares a group with its lease. Refusals
are counted by reason.
"""

import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash

from asyncgrpo.errors import RefusedError, WireError
from asyncgrpo.types import Completion, Group, KeptTokens, Lease, Observation, PolicyVersion, Rollout, TeacherLogprobs
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import Batch, Deliver, OfGenerator, OfLearner, RolloutHeader, ToGenerator, ToLearner
from asyncgrpo.wire.supervision import OfDriver, ToDriver, ToEveryone
from asyncgrpo.wire.weights import ToPublisher, ToReceiver

OfLearnerOrDriver = OfLearner | OfDriver
ToBuffer = OfGenerator | OfLearnerOrDriver
AnyMessage = ToBuffer | ToGenerator | ToLearner | ToPublisher | ToReceiver | ToDriver | ToEveryone

DIGEST_BYTES = 8

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)

Buffer = bytes | bytearray | memoryview


class _Tag(msgspec.Struct):
    """The tag of a header. All other fields are skipped."""

    kind: str


_tag_decoder = msgspec.msgpack.Decoder(_Tag)
Kinds = Mapping[str, type[Message]]
"""Message kinds that a process accepts, by their tags."""


def kinds_of(union: UnionType) -> Kinds:
    return {kind.__name__: kind for kind in get_args(union)}


ANY = kinds_of(AnyMessage)


def digest_of(*parts: Buffer) -> bytes:
    """Return the xxh3 digest of some bytes in several parts, `DIGEST_BYTES` long."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def encode(message: Message, payload: Buffer = b"") -> list[Buffer]:
    """Encode a message as two frames: digest and header, and the payload (empty for most messages).

    Raises:
        WireError: the message exceeds the size limits of its kind.
    """
    header = _encoder.encode(message)
    if len(header) > message.max_header_bytes or len(payload) > message.max_payload_bytes:
        raise WireError(_too_long(type(message), header, payload))
    return [digest_of(header, payload) + header, payload]


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
    if digest_of(header, payload) != first[:DIGEST_BYTES]:
        raise RefusedError("checksum", "digest mismatch: the message was altered in transit")
    try:
        kind = kinds.get(_tag_decoder.decode(header).kind)
        if kind is None:
            raise RefusedError("decode", "header matches no message that this process accepts")
        if len(header) > kind.max_header_bytes or len(payload) > kind.max_payload_bytes:
            raise RefusedError("size", _too_long(kind, header, payload))
        return _decoder.decode(header), payload
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # invalid UTF-8, unbounded nesting
        raise RefusedError("decode", f"header matches no known message: {error}") from error


def _too_long(kind: type[Message], header: Buffer, payload: Buffer) -> str:
    most = f"{kind.max_header_bytes} and {kind.max_payload_bytes}"
    return f"{kind.__name__} has {len(header)} bytes of header and {len(payload)} of payload; the limits are {most}"


_IDS, _VALUES = "<i4", "<f4"
"""Types of token ids and counts, and of log-probs, in a payload."""
_ROUTES = {1: "u1", 2: "<i2"}
"""Types of experts in a payload, by their bytes."""
_NO_ROUTES = np.zeros((0, 0, 0), np.uint8)

SHARED_FIELDS = tuple(name for name in Deliver.__struct_fields__ if name != "rollouts")
"""Fields that `Group` and `Deliver` share."""

# -- groups packed -----------------------------------------------------------------------------------------------------


def pack_group(group: Group) -> tuple[Deliver, bytes]:
    """Pack a group into message and payload."""
    sampled: list[Any] = []  # arrays: `join` copies their bytes once
    observed: list[Any] = []
    chosen: list[Any] = []
    headers = []
    for rollout in group.rollouts:
        completion, kept, teacher = rollout.completion, rollout.completion.kept, rollout.completion.teacher
        sampled += [_array(completion.token_ids, _IDS), _array(completion.logprobs, _VALUES)]
        observed += [_array(one.token_ids, _IDS) for one in completion.observations]
        if kept is not None:
            chosen += [_array(kept.counts, _IDS), _array(kept.ids, _IDS)]
        if teacher is not None:
            chosen += map(_array, teacher, (_VALUES, _IDS, _VALUES))
        routes = _NO_ROUTES
        if completion.routes is not None:
            fit_bytes = completion.routes.min(initial=0) >= 0 and completion.routes.max(initial=0) < 256
            routes = _array(completion.routes, _ROUTES[1 if fit_bytes else 2])
            chosen += [routes, bytes(-routes.nbytes % 4)]
        headers.append(
            RolloutHeader(
                index=completion.index,
                num_tokens=len(completion.token_ids),
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                score=rollout.score,
                seed=rollout.seed,
                observed=tuple((one.at, len(one.token_ids)) for one in completion.observations),
                text=rollout.text,
                sampled_text=rollout.sampled_text,
                kept=0 if kept is None else len(kept.ids),
                routes=routes.shape,
                routes_bytes=-(-routes.nbytes // 4) * 4,
                expert_bytes=routes.itemsize,
                teacher=0 if teacher is None else 1 + teacher.ids.shape[1],
            )
        )
    shared = {name: getattr(group, name) for name in SHARED_FIELDS}
    return Deliver(rollouts=tuple(headers), **shared), b"".join(sampled + observed + chosen)


def _array(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)


def unpack_group(message: Deliver, payload: Buffer) -> Group:
    """Unpack a group: the inverse of `pack_group`. Its arrays are read-only views of `payload`.

    Raises:
        RefusedError: the group is malformed, see `check_group`.
    """
    completions = check_group(message, payload)
    rollouts = (
        Rollout(completion, header.score, header.seed, header.text, header.sampled_text)
        for header, completion in zip(message.rollouts, completions, strict=True)
    )
    return Group(rollouts=tuple(rollouts), **{name: getattr(message, name) for name in SHARED_FIELDS})


def unpack_batch(message: Batch, payload: memoryview) -> list[Group]:
    """Unpack the groups of a batch.

    Raises:
        RefusedError: a group is malformed, or the sizes do not add up.
    """
    if len(message.groups) != len(message.payload_sizes) or sum(message.payload_sizes) != len(payload):
        raise RefusedError("schema", f"a batch has {len(payload)} bytes, its header gives {sum(message.payload_sizes)}")
    groups, offset = [], 0
    for header, size in zip(message.groups, message.payload_sizes, strict=True):
        groups.append(unpack_group(header, payload[offset : offset + size]))
        offset += size
    return groups


# -- groups checked ----------------------------------------------------------------------------------------------------

LARGEST_ROUTE = 2**14
"""Most experts of one token, over all layers."""
LARGEST_LOGPROB = 1e-5
"""Largest accepted log-prob: the log of a probability of 1 may round to a positive number."""


def check_group(message: Deliver, payload: Buffer, vocabulary: int = 2**31) -> list[Completion]:
    """Return the completions of a group, whose arrays are views of `payload`. Refuse a malformed group.

    Args:
        vocabulary: token ids are below it.
    Raises:
        RefusedError: names the group and the completion. By `schema`: lengths do not add up, completions are out of
            order, spans do not partition, versions decrease, observations lie outside, or a score has both a value and
            a failure, or neither. By `not_finite`: a score or log-prob is not a finite number. By `vocabulary`: a token
            id is out of range.
    """
    expected = sum(header.num_bytes for header in message.rollouts)
    if len(payload) != expected:
        raise _refused("schema", message, None, f"payload has {len(payload)} bytes, its header gives {expected}")
    num_sampled = 2 * message.num_tokens
    sampled, observed, chosen = (
        _Reader(payload, start) for start in (0, num_sampled, num_sampled + message.num_observed)
    )
    completions: list[Completion] = []

    def ids(of: _Reader, count: int, what: str) -> np.ndarray:
        found = of.take(count)
        if found.view("<u4").max(initial=0) >= vocabulary:
            raise _refused("vocabulary", message, header.index, f"{what} is not in [0, {vocabulary})")
        return found

    def values(of: _Reader, count: int, what: str) -> np.ndarray:
        found = of.take(count).view(_VALUES)
        if not ((found > -np.inf) & (found <= LARGEST_LOGPROB)).all():  # False if one is NaN
            raise _refused("not_finite", message, header.index, f"{what} is not finite, or positive")
        return found

    for header in message.rollouts:
        if completions and header.index <= completions[-1].index:
            raise _refused("schema", message, header.index, f"it follows completion {completions[-1].index}")
        _check_header(message, header)
        length, recorded = header.num_tokens, dict[str, Any]()
        token_ids, logprobs = ids(sampled, length, "a token id"), values(sampled, length, "a log-prob")
        observations = tuple(
            Observation(at, ids(observed, size, "a token id of an observation")) for at, size in header.observed
        )
        if header.kept:
            counts = chosen.take(length)
            if counts.min(initial=1) < 1 or counts.sum(dtype=np.int64) != header.kept:
                raise _refused("schema", message, header.index, "the counts of its kept tokens do not add up")
            recorded["kept"] = KeptTokens(ids(chosen, header.kept, "a kept token"), counts)
        if header.teacher:
            shape = length, header.teacher - 1
            recorded["teacher"] = TeacherLogprobs(
                values(chosen, length, "a log-prob of the teacher"),
                ids(chosen, math.prod(shape), "a token of the teacher").reshape(shape),
                values(chosen, math.prod(shape), "a log-prob of the teacher").reshape(shape),
            )
        if header.routes_bytes:
            recorded["routes"] = _routes(message, header, chosen.take(header.routes_bytes // 4))
        completions.append(
            Completion(header.index, token_ids, logprobs, header.spans, header.finish_reason, observations, **recorded)
        )
    return completions


class _Reader:
    """Reads arrays one after the other from a payload."""

    def __init__(self, payload: Buffer, start: int) -> None:
        """
        Args:
            start: numbers of 4 bytes before the first array.
        """
        self._numbers, self._at = np.frombuffer(payload, _IDS), start

    def take(self, count: int) -> np.ndarray:
        """Return the next [count] numbers, int32."""
        self._at += count
        return self._numbers[self._at - count : self._at]


def _check_header(message: Deliver, header: RolloutHeader) -> None:
    """Refuse a completion whose spans, observations or score cannot be. Raises RefusedError."""
    end, version = 0, None
    for span in header.spans:
        if span.start != end or span.end <= end:
            raise _refused("schema", message, header.index, "version spans do not partition the completion")
        if version is not None and span.version < version:
            raise _refused("schema", message, header.index, "policy versions decrease")
        end, version = span.end, span.version
    if end != header.num_tokens:
        raise _refused("schema", message, header.index, f"version spans end at {end} of {header.num_tokens} tokens")
    places = [at for at, size in header.observed if size > 0 and at <= header.num_tokens]
    if len(places) < len(header.observed) or places != sorted(set(places)):
        raise _refused("schema", message, header.index, "observations are empty, out of order or behind its end")
    if (header.score.value is None) == (header.score.failure is None):
        raise _refused("schema", message, header.index, "a score is either a value or a named failure")
    if header.score.value is not None and not math.isfinite(header.score.value):
        raise _refused("not_finite", message, header.index, "the score is not finite")


def _routes(message: Deliver, header: RolloutHeader, found: np.ndarray) -> np.ndarray:
    """Return routes in their shape. Raises RefusedError: the shape is not theirs, or cannot be."""
    longest, size = len(message.prompt.token_ids) + header.num_tokens + header.num_observed, math.prod(header.routes)
    routes = found.view(_ROUTES[header.expert_bytes])
    is_theirs = 0 <= routes.nbytes - size * header.expert_bytes < 4
    if header.routes[0] > longest or math.prod(header.routes[1:]) > LARGEST_ROUTE or not is_theirs:
        text = f"{found.nbytes} bytes of routes {header.routes} of {longest} tokens"
        raise _refused("schema", message, header.index, text)
    return routes[:size].reshape(header.routes)


def check_lease(message: Deliver, lease: Lease, newest: PolicyVersion | None) -> None:
    """Refuse a group that does not match its lease.

    If an agent sent other messages than its row has, the prompt of its group may be a prefix of the lease's.

    Args:
        newest: the version that the learner reported last. Generators may already sample with the next one.
    Raises:
        RefusedError: by `lease` (another prompt or position in the run) or `version` (not published yet).
    """
    names = ("group_id", "attempt", "prompt_index", "purpose")
    is_same = all(getattr(message, name) == getattr(lease, name) for name in names)
    asked, came = lease.prompt, message.prompt
    is_same = is_same and (came.prompt_id, came.images) == (asked.prompt_id, asked.images)
    if not is_same or not (came.token_ids == asked.token_ids or _is_prefix(message, asked.token_ids)):
        raise _refused("lease", message, None, f"it does not match lease {lease.lease_id}")
    if newest is None:
        return
    for header in message.rollouts:
        for span in header.spans:
            if span.version.lineage == newest.lineage and span.version.number > newest.number + 1:
                text = f"weights {span.version} do not exist yet; the newest are {newest}"
                raise _refused("version", message, header.index, text)


def _is_prefix(message: Deliver, token_ids: tuple[int, ...]) -> bool:
    """Return True if the group's prompt is a proper prefix of these token ids, and completions begin with observations."""
    prefix = message.prompt.token_ids
    begins = all(header.observed and header.observed[0][0] == 0 for header in message.rollouts if header.num_tokens)
    return 0 < len(prefix) < len(token_ids) and token_ids[: len(prefix)] == prefix and begins


def _refused(reason: str, message: Deliver, completion: int | None, text: str) -> RefusedError:
    where = f"group {message.group_id}" if completion is None else f"group {message.group_id}, completion {completion}"
    return RefusedError(reason, f"{where}: {text}")
