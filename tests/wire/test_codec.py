"""Messages survive the wire exactly, and whatever was altered on it is refused by name."""

import random
from dataclasses import replace

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


def test_a_group_comes_back_as_it_was_sent():
    group = make_group()
    message, payload = pack_group(group)
    arrived, raw = decode(encode(message, payload))
    assert isinstance(arrived, Deliver)
    back = unpack_group(arrived, raw)
    assert back.prompt == group.prompt and back.timings == group.timings
    assert back.discarded == group.discarded
    assert [(r.score, r.seed) for r in back.rollouts] == [(r.score, r.seed) for r in group.rollouts]
    for mine, theirs in zip(group.rollouts, back.rollouts, strict=True):
        assert np.array_equal(mine.completion.token_ids, theirs.completion.token_ids)
        assert np.array_equal(mine.completion.logprobs, theirs.completion.logprobs)
        assert mine.completion.spans == theirs.completion.spans
    assert back.versions == [PolicyVersion(1, 4), PolicyVersion(1, 5)]


def with_choices(group: Group) -> Group:
    """The same group; completions with tokens have kept tokens, all but the last have routes, all but the first a teacher."""
    rollouts = []
    for rollout in group.rollouts:
        completion, length = rollout.completion, len(rollout.completion.token_ids)
        counts = np.arange(1, length + 1, dtype=np.int32)
        kept = KeptTokens(np.arange(counts.sum(), dtype=np.int32), counts) if length else None
        routes = np.arange(-1, (3 + length) * 6 - 1, dtype=np.int16).reshape(-1, 2, 3) if completion.index < 2 else None
        ids = np.arange(2 * length, dtype=np.int32).reshape(length, 2)
        teacher = TeacherLogprobs(completion.logprobs - 1, ids, -ids.astype(np.float32)) if completion.index else None
        rollouts.append(replace(rollout, completion=replace(completion, kept=kept, routes=routes, teacher=teacher)))
    return replace(group, rollouts=tuple(rollouts))


def test_choices_come_back_as_they_were_sent():
    group = with_choices(make_group())
    arrived, raw = decode(encode(*pack_group(group)))
    for mine, theirs in zip(group.rollouts, unpack_group(arrived, raw).rollouts, strict=True):
        mine, theirs = mine.completion, theirs.completion
        assert (mine.kept is None) == (theirs.kept is None) and (mine.routes is None) == (theirs.routes is None)
        if mine.kept is not None:
            assert all(np.array_equal(a, b) for a, b in zip(mine.kept, theirs.kept, strict=True))
        if mine.routes is not None:
            assert np.array_equal(mine.routes, theirs.routes)
        assert np.array_equal(mine.logprobs, theirs.logprobs)
        assert (mine.teacher is None) == (theirs.teacher is None)
        if mine.teacher is not None:
            pairs = list(zip(mine.teacher, theirs.teacher, strict=True))
            assert all(np.array_equal(a, b) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize(
    ("fields", "at", "complaint"),
    [
        ({"kept": 5}, None, "payload has"),
        ({"routes": (7, 2, 3)}, None, "routes .7, 2, 3. of 6 tokens"),
        ({"routes": (6, 2, 4)}, None, "its routes cannot be read"),
        ({"routes": (6, 2**15, 1)}, None, "routes"),
        ({}, 4 * 16, "do not add up"),
        ({}, 4 * 19, "a kept token is not in"),
        ({}, 4 * 25, "its routes cannot be read"),
        ({"teacher": 3}, None, "payload has"),
        ({}, -4 * 25, "a log-prob of the teacher is not finite"),
        ({}, -4 * 20, "a token of the teacher is not in"),
        ({}, -4 * 10, "a log-prob of the teacher is not finite"),
    ],
)
def test_malformed_choices_are_refused(fields, at, complaint):
    """Of the first completion: 3 tokens, whose counts begin after 16 numbers; 6 kept tokens; then its routes. At the end,
    of the last one: 5 log-probs of the teacher, 10 ids, and 10 log-probs."""
    message, payload = pack_group(with_choices(make_group()))
    payload = bytearray(payload)
    if at is not None:
        payload[at : at + 4] = b"\xff" * 4
    with pytest.raises(WireError, match=complaint):
        unpack_group(change(message, **fields), bytes(payload))


def test_counts_of_kept_tokens_that_do_not_add_up_are_refused():
    message, payload = pack_group(with_choices(make_group()))
    for count in (2, 4):  # of the third token of the first completion, which has 3
        with pytest.raises(WireError, match="do not add up"):
            unpack_group(message, payload[: 4 * 18] + bytes([count, 0, 0, 0]) + payload[4 * 19 :])


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
