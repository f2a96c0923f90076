"""Messages survive the wire exactly, and whatever was altered on it is refused by name."""

import random
from dataclasses import is_dataclass, replace

import msgspec
import numpy as np
import pytest

from asyncgrpo.errors import WireError
from asyncgrpo.types import (
    Completion,
    Discarded,
    Group,
    KeptTokens,
    PolicyVersion,
    Prompt,
    Rollout,
    Score,
    TeacherLogprobs,
    VersionSpan,
)
from asyncgrpo.wire.codec import decode, encode, pack_group, unpack_group
from asyncgrpo.wire.rollouts import Deliver, RolloutHeader


def make_group(lengths=(3, 0, 5), group_id="1.7") -> Group:
    rollouts = []
    for index, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + index
        logprobs = -np.linspace(0.1, 2.0, length).astype(np.float32) if length else np.zeros(0, np.float32)
        half = length // 2
        spans = [VersionSpan(PolicyVersion(1, v), a, b) for v, a, b in ((4, 0, half), (5, half, length)) if b > a]
        score = Score(value=0.25 * index) if index != 1 else Score(failure="timeout", detail="10 s")
        rollouts.append(Rollout(Completion(index, tokens, logprobs, tuple(spans), "stop"), score, seed=100 + index))
    prompt = Prompt(prompt_id="train/7", token_ids=(1, 2, 3), answer={"a": [1, None]}, source="gsm8k", info={"k": "v"})
    return Group(
        group_id=group_id,
        lease_id=f"{group_id}.0",
        attempt=0,
        prompt_index=7,
        purpose="train",
        prompt=prompt,
        rollouts=tuple(rollouts),
        generator_id="generator-0",
        timings={"generate": 0.5},
        discarded=Discarded(tokens=70, censored=4),
    )


def with_choices(group: Group) -> Group:
    """The same group; completions with tokens have kept tokens, all but the last have routes, all but the first a teacher.

    An expert of the first is unknown, so its routes take two bytes each."""
    rollouts = []
    for rollout in group.rollouts:
        completion, length = rollout.completion, len(rollout.completion.token_ids)
        counts = np.arange(1, length + 1, dtype=np.int32)
        kept = KeptTokens(np.arange(counts.sum(), dtype=np.int32), counts) if length else None
        experts = np.arange((3 + length) * 6).reshape(-1, 2, 3)
        routes = [(experts - 1).astype(np.int16), experts.astype(np.uint8), None][completion.index]
        ids = np.arange(2 * length, dtype=np.int32).reshape(length, 2)
        teacher = TeacherLogprobs(completion.logprobs - 1, ids, -ids.astype(np.float32)) if completion.index else None
        rollouts.append(replace(rollout, completion=replace(completion, kept=kept, routes=routes, teacher=teacher)))
    return replace(group, rollouts=tuple(rollouts))


def same(one, other) -> bool:
    """True if two groups or parts of them are equal, their arrays in shape and dtype too."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return type(one) is type(other) and same(tuple(vars(one).values()), tuple(vars(other).values()))
    return one == other


@pytest.mark.parametrize("group", [make_group(), with_choices(make_group())], ids=["plain", "with choices"])
def test_a_group_comes_back_as_it_was_sent(group):
    arrived, raw = decode(encode(*pack_group(group)))
    assert isinstance(arrived, Deliver)
    back = unpack_group(arrived, raw)
    assert same(back, group) and back.versions == [PolicyVersion(1, 4), PolicyVersion(1, 5)]


@pytest.mark.parametrize(
    ("fields", "number", "complaint"),
    [
        ({"kept": 5}, None, "payload has"),
        ({"routes": (7, 2, 3)}, None, "routes .7, 2, 3. of 6 tokens"),
        ({"routes": (6, 2, 4)}, None, "72 bytes of routes .6, 2, 4. of 6 tokens"),
        ({"routes": (6, 2, 2)}, None, "72 bytes of routes"),
        ({"expert_bytes": 1}, None, "72 bytes of routes"),
        ({"routes": (6, 2**15, 1)}, None, "routes"),
        ({}, (16, -1), "do not add up"),
        ({}, (18, 2), "do not add up"),
        ({}, (19, -1), "a kept token is not in"),
        ({"teacher": 3}, None, "payload has"),
        ({}, (-25, -1), "a log-prob of the teacher is not finite"),
        ({}, (-20, -1), "a token of the teacher is not in"),
        ({}, (-10, -1), "a log-prob of the teacher is not finite"),
    ],
)
def test_malformed_choices_are_refused(fields, number, complaint):
    """Of the first completion: 3 tokens, whose counts begin after 16 numbers; 6 kept tokens; then its routes. At the end,
    of the last one: 5 log-probs of the teacher, 10 ids, and 10 log-probs."""
    message, payload = pack_group(with_choices(make_group()))
    numbers = np.frombuffer(payload, "<i4").copy()
    if number is not None:
        numbers[number[0]] = number[1]
    with pytest.raises(WireError, match=complaint):
        unpack_group(change(message, **fields), numbers.tobytes())


def test_every_flipped_bit_is_refused():
    frames = [bytes(frame) for frame in encode(*pack_group(make_group()))]
    rng = random.Random(0)
    for _ in range(500):
        which = rng.randrange(2)
        altered = bytearray(frames[which])
        altered[rng.randrange(len(altered))] ^= 1 << rng.randrange(8)
        with pytest.raises(WireError, match=r"digest|no known message"):
            decode([altered, frames[1]] if which == 0 else [frames[0], altered])


def change(message: Deliver, **fields) -> Deliver:
    first: RolloutHeader = msgspec.structs.replace(message.rollouts[0], **fields)
    return msgspec.structs.replace(message, rollouts=(first, *message.rollouts[1:]))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_tokens": 4}, "payload has"),
        ({"spans": (VersionSpan(PolicyVersion(1, 4), 1, 3),)}, "do not partition"),
        ({"spans": (VersionSpan(PolicyVersion(1, 4), 0, 9),)}, "end at 9 of 3"),
        ({"spans": (VersionSpan(PolicyVersion(1, 5), 0, 1), VersionSpan(PolicyVersion(1, 4), 1, 3))}, "decrease"),
        ({"score": Score()}, "value or a named failure"),
        ({"score": Score(value=float("nan"))}, "not finite"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_named(fields, complaint):
    message, payload = pack_group(make_group())
    with pytest.raises(WireError, match=complaint) as error:
        unpack_group(change(message, **fields), payload)
    assert "1.7" in str(error.value)


def test_negative_and_odd_counts_are_refused():
    message, payload = pack_group(make_group())
    forged = [change(message, **fields) for fields in ({"num_tokens": -3}, {"kept": -1}, {"routes_bytes": 3})]
    for field in Discarded.__struct_fields__:
        discarded = msgspec.structs.replace(message.discarded, **{field: -1})
        forged.append(msgspec.structs.replace(message, discarded=discarded))
    for one in forged:
        with pytest.raises(WireError, match="Expected `int`"):
            decode(encode(one, payload))
