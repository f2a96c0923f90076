"""A group as a message and a payload of raw arrays, and whether it is one that can be trained.

`check_group` says what a schema cannot, before anyone keeps the group: lengths, spans, scores, and every token and
log-prob of its payload. `check_lease` holds it against the lease that it answers. A refusal has one of the
reasons by which refusals are counted.
"""

import math
from typing import Any

import msgspec
import numpy as np

from asyncgrpo.errors import RefusedError
from asyncgrpo.types import Completion, Group, Lease, PolicyVersion, Rollout
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.rollouts import Batch, Deliver, RolloutHeader

BYTES_PER_TOKEN = 8
"""int32 token id and float32 log-prob."""

LARGEST_LOGPROB = 1e-5
"""A probability of 1 may be rounded up."""

# A float32's bits as an integer keep its order: upwards from 0 where it is positive; and seen unsigned, downwards to
# minus infinity where it is negative, with what is no number behind both infinities. So two largest integers say whether
# all numbers of a completion are finite and none is positive, without looking at one as a number.
_POSITIVE = int(np.float32(LARGEST_LOGPROB).view(np.int32))
_MINUS_INFINITY = int(np.float32(-np.inf).view(np.uint32))


def check_group(message: Deliver, payload: Buffer, vocabulary: int = 2**31) -> None:
    """Refuse a group that no engine can have made.

    Args:
        vocabulary: token ids are below it.
    Raises:
        RefusedError: names the group and the completion. By `schema`: lengths that do not add up, completions out of order,
            spans that do not partition, versions that decrease, a score that is both or neither. By `not_finite`: a
            score, or a log-prob that is none. By `vocabulary`: a token that the model does not have.
    """
    lengths = [header.num_tokens for header in message.rollouts]
    if lengths and min(lengths) < 0:
        raise _refused("schema", message, None, "a negative length")
    if min(msgspec.structs.astuple(message.discarded)) < 0:
        raise _refused("schema", message, None, "a negative count of what was discarded")
    if len(payload) != BYTES_PER_TOKEN * sum(lengths):
        expected = BYTES_PER_TOKEN * sum(lengths)
        raise _refused("schema", message, None, f"payload has {len(payload)} bytes, its header says {expected}")
    before = -1
    for header in message.rollouts:
        index = header.index
        if index <= before:
            raise _refused("schema", message, index, f"it follows completion {before}")
        before = index
        end, version = 0, None
        for span in header.spans:
            if span.start != end or span.end <= end:
                raise _refused("schema", message, index, "version spans do not partition the completion")
            if version is not None and span.version < version:
                raise _refused("schema", message, index, "weight versions decrease")
            end, version = span.end, span.version
        if end != header.num_tokens:
            raise _refused("schema", message, index, f"version spans end at {end} of {header.num_tokens} tokens")
        score = header.score
        if (score.value is None) == (score.failure is None):
            raise _refused("schema", message, index, "a score is either a value or a named failure")
        if score.value is not None and not math.isfinite(score.value):
            raise _refused("not_finite", message, index, "the score is not finite")
    if len(payload):
        _check_values(message, payload, vocabulary)


def _check_values(message: Deliver, payload: Buffer, vocabulary: int) -> None:
    starts, at, with_tokens = [], 0, []
    for header in message.rollouts:
        if header.num_tokens:
            with_tokens.append(header.index)
            starts += [at, at + header.num_tokens]
            at += 2 * header.num_tokens
    # Tokens and log-probs in turn, each completion's largest of both.
    signed = np.maximum.reduceat(np.frombuffer(payload, "<i4"), starts).tolist()
    unsigned = np.maximum.reduceat(np.frombuffer(payload, "<u4"), starts).tolist()
    if max(unsigned[::2]) >= vocabulary:
        index = next(i for i, token in zip(with_tokens, unsigned[::2], strict=True) if token >= vocabulary)
        raise _refused("vocabulary", message, index, f"a token id is not in [0, {vocabulary})")
    if max(signed[1::2]) > _POSITIVE or max(unsigned[1::2]) >= _MINUS_INFINITY:
        both = zip(with_tokens, signed[1::2], unsigned[1::2], strict=True)
        index = next(i for i, s, u in both if s > _POSITIVE or u >= _MINUS_INFINITY)
        raise _refused("not_finite", message, index, "a log-prob is not finite, or positive")


def check_lease(message: Deliver, lease: Lease, newest: PolicyVersion | None) -> None:
    """Refuse a group that is no completion to its lease.

    Args:
        newest: the version published last. The one after it may sample already, where its publication is under way.
    Raises:
        RefusedError: by `lease` (another prompt, or place in the order) or `version` (of weights yet to come).
    """
    asked = (
        lease.group_id,
        lease.attempt,
        lease.prompt_index,
        lease.purpose,
        lease.prompt.prompt_id,
        lease.prompt.token_ids,
    )
    prompt = message.prompt
    if (
        message.group_id, message.attempt, message.prompt_index, message.purpose, prompt.prompt_id, prompt.token_ids
    ) != asked:  # fmt: skip
        raise _refused("lease", message, None, f"it does not answer what lease {lease.lease_id} asks")
    if newest is None:
        return
    for header in message.rollouts:
        for span in header.spans:
            if span.version.lineage == newest.lineage and span.version.number > newest.number + 1:
                raise _refused("version", message, header.index, f"weights {span.version} after {newest} are to come")


def _refused(reason: str, message: Deliver, completion: int | None, text: str) -> RefusedError:
    where = f"group {message.group_id}" if completion is None else f"group {message.group_id}, completion {completion}"
    return RefusedError(reason, f"{where}: {text}")


# -- to the wire and back ----------------------------------------------------------------------------------------------


def pack_group(group: Group) -> tuple[Deliver, bytes]:
    """A group as message and payload."""
    parts: list[Any] = []  # arrays, whose bytes `join` takes where they lie
    headers = []
    for rollout in group.rollouts:
        completion = rollout.completion
        parts.append(np.ascontiguousarray(completion.token_ids, dtype="<i4"))
        parts.append(np.ascontiguousarray(completion.logprobs, dtype="<f4"))
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
        prompt_index=group.prompt_index,
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
        RefusedError: a group that cannot be, see `check_group`.
    """
    check_group(message, payload)
    token_ids, logprobs = np.frombuffer(payload, "<i4"), np.frombuffer(payload, "<f4")
    rollouts, start = [], 0
    for header in message.rollouts:
        middle = start + header.num_tokens
        end = middle + header.num_tokens
        rollouts.append(
            Rollout(
                Completion(
                    header.index, token_ids[start:middle], logprobs[middle:end], header.spans, header.finish_reason
                ),
                header.score,
                header.seed,
            )
        )
        start = end
    return Group(
        group_id=message.group_id,
        lease_id=message.lease_id,
        attempt=message.attempt,
        prompt_index=message.prompt_index,
        purpose=message.purpose,
        prompt=message.prompt,
        rollouts=tuple(rollouts),
        generator_id=message.generator_id,
        timings=message.timings,
        discarded=message.discarded,
    )


def unpack_batch(message: Batch, payload: memoryview) -> list[Group]:
    """The groups of a batch.

    Raises:
        RefusedError: a group that cannot be, or sizes that do not add up.
    """
    if len(message.groups) != len(message.payload_sizes) or sum(message.payload_sizes) != len(payload):
        raise RefusedError("schema", f"a batch of {len(payload)} bytes says it has {sum(message.payload_sizes)}")
    groups, offset = [], 0
    for header, size in zip(message.groups, message.payload_sizes, strict=True):
        groups.append(unpack_group(header, payload[offset : offset + size]))
        offset += size
    return groups
