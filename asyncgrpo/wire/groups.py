"""Packs a group as a message and a payload of raw arrays, unpacks it, and checks that it can be trained.

`check_group` checks what a schema cannot, before the group is stored: lengths, spans, scores, and every token and log-prob
of the payload. `check_lease` compares a group with its lease. Refusals are counted by reason.
"""

import math
from typing import Any

import msgspec
import numpy as np

from asyncgrpo.errors import RefusedError
from asyncgrpo.types import Completion, Group, Lease, Observation, PolicyVersion, Rollout
from asyncgrpo.wire.codec import Buffer
from asyncgrpo.wire.rollouts import Batch, Deliver, RolloutHeader

BYTES_PER_TOKEN = 8
"""A sampled token: int32 token id and float32 log-prob."""
BYTES_PER_OBSERVED = 4
"""A token of an observation: int32 token id."""
SHARED_FIELDS = tuple(name for name in Deliver.__struct_fields__ if name != "rollouts")
"""Fields that `Group` and `Deliver` share."""

# -- packing -----------------------------------------------------------------------------------------------------------


def pack_group(group: Group) -> tuple[Deliver, bytes]:
    """Pack a group into message and payload."""
    parts: list[Any] = []  # arrays: `join` copies their bytes once
    observed: list[Any] = []
    headers = []
    for rollout in group.rollouts:
        completion = rollout.completion
        parts.append(np.ascontiguousarray(completion.token_ids, dtype="<i4"))
        parts.append(np.ascontiguousarray(completion.logprobs, dtype="<f4"))
        observed += [np.ascontiguousarray(one.token_ids, dtype="<i4") for one in completion.observations]
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
            )
        )
    shared = {name: getattr(group, name) for name in SHARED_FIELDS}
    return Deliver(rollouts=tuple(headers), **shared), b"".join(parts + observed)


def unpack_group(message: Deliver, payload: Buffer) -> Group:
    """Unpack a group: the inverse of `pack_group`. Its arrays are read-only views of `payload`.

    Raises:
        RefusedError: the group is malformed, see `check_group`.
    """
    check_group(message, payload)
    token_ids, logprobs = np.frombuffer(payload, "<i4"), np.frombuffer(payload, "<f4")
    rollouts, start, observed = [], 0, 2 * message.num_tokens
    for header in message.rollouts:
        middle = start + header.num_tokens
        end = middle + header.num_tokens
        tokens, values = token_ids[start:middle], logprobs[middle:end]
        observations = []
        for at, size in header.observed:
            observations.append(Observation(at, token_ids[observed : observed + size]))
            observed += size
        completion = Completion(header.index, tokens, values, header.spans, header.finish_reason, tuple(observations))
        rollouts.append(Rollout(completion, header.score, header.seed, header.text))
        start = end
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


# -- checks ------------------------------------------------------------------------------------------------------------


LARGEST_LOGPROB = 1e-5
"""Largest accepted log-prob: the log of a probability of 1 may round to a positive number."""

# Reinterpreted as integers, float32 numbers keep their order: signed integers rise with positive numbers, unsigned ones
# rise as negative numbers fall to minus infinity, and NaNs follow both infinities. So the largest signed and the largest
# unsigned integer show whether all log-probs of a completion are finite and none is positive.
_POSITIVE = int(np.float32(LARGEST_LOGPROB).view(np.int32))
_MINUS_INFINITY = int(np.float32(-np.inf).view(np.uint32))


def check_group(message: Deliver, payload: Buffer, vocabulary: int = 2**31) -> None:
    """Refuse a malformed group.

    Args:
        vocabulary: token ids are below it.
    Raises:
        RefusedError: names the group and the completion. By `schema`: lengths do not add up, completions are out of
            order, spans do not partition, versions decrease, observations lie outside, or a score has both a value and
            a failure, or neither. By `not_finite`: a score or log-prob is not a finite number. By `vocabulary`: a token
            id is out of range.
    """
    if min((header.num_tokens for header in message.rollouts), default=0) < 0:
        raise _refused("schema", message, None, "a negative length")
    if min(msgspec.structs.astuple(message.discarded)) < 0:
        raise _refused("schema", message, None, "a negative count of discarded completions")
    expected = BYTES_PER_TOKEN * message.num_tokens + BYTES_PER_OBSERVED * message.num_observed
    if len(payload) != expected:
        raise _refused("schema", message, None, f"payload has {len(payload)} bytes, its header gives {expected}")
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
                raise _refused("schema", message, index, "policy versions decrease")
            end, version = span.end, span.version
        if end != header.num_tokens:
            raise _refused("schema", message, index, f"version spans end at {end} of {header.num_tokens} tokens")
        places = [at for at, size in header.observed if size > 0]
        if len(places) < len(header.observed) or places != sorted({p for p in places if p <= header.num_tokens}):
            raise _refused("schema", message, index, "observations are empty, out of order or behind its end")
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
    if message.num_observed and np.frombuffer(payload, "<u4")[at:].max() >= vocabulary:
        raise _refused("vocabulary", message, None, f"a token id of an observation is not in [0, {vocabulary})")
    if not starts:
        return
    # Per completion: the largest token id, then the largest log-prob.
    signed = np.maximum.reduceat(np.frombuffer(payload, "<i4", at), starts).tolist()
    unsigned = np.maximum.reduceat(np.frombuffer(payload, "<u4", at), starts).tolist()
    if max(unsigned[::2]) >= vocabulary:
        index = next(i for i, token in zip(with_tokens, unsigned[::2], strict=True) if token >= vocabulary)
        raise _refused("vocabulary", message, index, f"a token id is not in [0, {vocabulary})")
    if max(signed[1::2]) > _POSITIVE or max(unsigned[1::2]) >= _MINUS_INFINITY:
        both = zip(with_tokens, signed[1::2], unsigned[1::2], strict=True)
        index = next(i for i, s, u in both if s > _POSITIVE or u >= _MINUS_INFINITY)
        raise _refused("not_finite", message, index, "a log-prob is not finite, or positive")


def check_lease(message: Deliver, lease: Lease, newest: PolicyVersion | None) -> None:
    """Refuse a group that does not match its lease.

    If an agent sent other messages than its row has, the prompt of its group may be a prefix of the lease's.

    Args:
        newest: the version that the learner reported last. Generators may already sample with the next one.
    Raises:
        RefusedError: by `lease` (another prompt or position in the run) or `version` (not published yet).
    """
    is_same = all(getattr(message, name) == getattr(lease, name) for name in ("group_id", "attempt", "prompt_index"))
    asked, came = lease.prompt, message.prompt
    is_same = is_same and message.purpose == lease.purpose and came.prompt_id == asked.prompt_id
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
