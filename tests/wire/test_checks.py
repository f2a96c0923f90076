"""A group is kept only if an engine can have made it, in completion to a lease that was given."""

import itertools
from types import UnionType
from typing import get_args

import msgspec
import numpy as np
import pytest

from asyncgrpo import metrics
from asyncgrpo.buffer.buffer import State
from asyncgrpo.errors import RefusedError, WireError
from asyncgrpo.types import PolicyVersion, Prompt, VersionSpan
from asyncgrpo.wire import Message, codec, rollouts
from asyncgrpo.wire.codec import (
    ANY,
    LARGEST_LOGPROB,
    AnyMessage,
    Kinds,
    check_group,
    check_lease,
    decode,
    encode,
    kinds_of,
    pack_group,
    unpack_batch,
)
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_incarnations import Served
from tests.generators.test_rollout import make_lease
from tests.wire.mutations import sealed
from tests.wire.test_codec import change, make_group

VOCABULARY = 100
PAYLOAD = bytes(16)
"""Two completions of one token."""


def refusal(message: rollouts.Deliver, payload, vocabulary=VOCABULARY) -> str | None:
    try:
        check_group(message, payload, vocabulary)
    except RefusedError as error:
        assert message.group_id in str(error)
        return error.reason
    return None


def altered(completion: int, place: int, *, token: int | None = None, logprob: float | None = None):
    """The group of three completions (3, 0 and 5 tokens), with one number of it changed."""
    group = make_group()
    completion = group.rollouts[completion].completion
    if token is not None:
        completion.token_ids[place] = token
    if logprob is not None:
        completion.logprobs[place] = logprob
    return pack_group(group)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        ({"token": VOCABULARY - 1}, None),
        ({"token": VOCABULARY}, "vocabulary"),
        ({"token": -1}, "vocabulary"),
        ({"logprob": LARGEST_LOGPROB}, None),
        ({"logprob": 1e-4}, "not_finite"),
        ({"logprob": float("nan")}, "not_finite"),
    ],
)
def test_every_number_of_every_answer_is_looked_at(number, reason):
    for completion, place in ((0, 0), (0, 2), (2, 0), (2, 4)):
        assert refusal(*altered(completion, place, **number)) == reason


def test_completions_are_in_order_and_may_have_no_token():
    message, payload = pack_group(make_group())
    assert refusal(change(message, index=1), payload) == "schema"
    assert refusal(*pack_group(make_group(lengths=()))) is None
    assert refusal(*pack_group(make_group(lengths=(0, 0)))) is None


LEASE = make_lease(lease_id="1.7.0", group_id="1.7", prompt_index=7, prompt=make_group().prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"group_id": "1.8"},
        {"attempt": 1},
        {"prompt_index": 8},
        {"purpose": "eval"},
        {"prompt": Prompt(prompt_id="train/7", token_ids=(1, 2, 4))},
        {"prompt": msgspec.structs.replace(make_group().prompt, images=("another",))},
    ],
)
def test_another_answer_than_was_asked_for_is_refused(fields):
    message, _ = pack_group(make_group())
    check_lease(message, LEASE, PolicyVersion(1, 5))
    with pytest.raises(RefusedError, match=r"1\.7\.0") as error:
        check_lease(msgspec.structs.replace(message, **fields), LEASE, PolicyVersion(1, 5))
    assert error.value.reason == "lease"


def test_the_beginning_of_a_prompt_is_one_where_each_completion_says_what_it_read_after_it():
    message, _ = pack_group(make_group())
    short = msgspec.structs.replace(message.prompt, token_ids=message.prompt.token_ids[:1])
    assert len(message.prompt.token_ids) > 1

    def judge(prompt: Prompt, *observed: tuple[tuple[int, int], ...]) -> None:
        read = itertools.cycle(observed)
        headers = tuple(msgspec.structs.replace(one, observed=next(read)) for one in message.rollouts)
        check_lease(msgspec.structs.replace(message, prompt=prompt, rollouts=headers), LEASE, None)

    judge(short, ((0, 4),))
    judge(message.prompt, ())
    other = msgspec.structs.replace(short, token_ids=(short.token_ids[0] + 1,))
    empty = msgspec.structs.replace(short, token_ids=())
    for prompt, observed in (
        (short, [()]),
        (short, [((1, 4),), ((0, 4),)]),
        (other, [((0, 4),)]),
        (empty, [((0, 4),)]),
    ):
        with pytest.raises(RefusedError, match=r"1\.7\.0"):
            judge(prompt, *observed)


def test_weights_that_do_not_exist_yet_are_refused():
    """The version after the one that the learner named last may sample before the buffer hears of it."""
    message, _ = pack_group(make_group())  # of versions 4 and 5
    check_lease(message, LEASE, PolicyVersion(1, 4))
    with pytest.raises(RefusedError, match=r"1\.5 do not exist yet; the newest are 1\.3") as error:
        check_lease(message, LEASE, PolicyVersion(1, 3))
    assert error.value.reason == "version"


# -- frames ------------------------------------------------------------------------------------------------------------


def refused_frames(frames, kinds: Kinds = ANY) -> str:
    with pytest.raises(RefusedError) as error:
        decode(frames, kinds)
    return error.value.reason


def test_a_header_is_measured_before_it_is_decoded(monkeypatch):
    def must_not_decode(header):
        raise AssertionError("decoded")

    monkeypatch.setattr(codec, "_decoder", type("Decoder", (), {"decode": staticmethod(must_not_decode)}))
    for kind in get_args(AnyMessage):
        if kind.max_header_bytes < 2**28:
            long = msgspec.msgpack.encode({"kind": kind.__name__, "x": "y" * kind.max_header_bytes})
            assert refused_frames(sealed(long)) == "size", kind
        if kind.max_payload_bytes == 0:
            assert refused_frames(sealed(msgspec.msgpack.encode({"kind": kind.__name__}), b"x")) == "size", kind


def test_a_message_that_nobody_would_read_is_not_sent():
    long = rollouts.Register(generator_id="g" * 2**16, incarnation="", window=1)
    for message, payload in ((rollouts.Saved(step=1), b"x"), (long, b"")):
        with pytest.raises(WireError, match="the limits are"):
            encode(message, payload)


def test_what_is_for_others_is_not_decoded():
    of_buffer = kinds_of(codec.ToBuffer)
    assert decode(encode(rollouts.Saved(step=1)), of_buffer)[0] == rollouts.Saved(step=1)
    assert refused_frames(encode(rollouts.Nack(lease_id="", reason="")), of_buffer) == "decode"
    assert refused_frames(encode(rollouts.Saved(step=1)), kinds_of(codec.ToPublisher)) == "decode"


def test_conversations_are_parts_of_the_whole():
    def members(union: UnionType) -> set[type]:
        return set(get_args(union))

    assert members(AnyMessage) == set(Message.__subclasses__())
    assert members(codec.ToBuffer) == members(codec.OfGenerator) | members(codec.OfLearnerOrDriver)


# -- at the buffer's door ----------------------------------------------------------------------------------------------


def hear_raw(served: Served, peer: str, frames) -> list[tuple[str, Message]]:
    served.lines.sent.clear()
    served.service.turn((peer, frames), served.now_s)
    return list(served.lines.sent)


def a_lease(served: Served):
    served.hear("learner", rollouts.Trained(version=v(0)))
    served.join("a", window=1)
    return served.oldest_lease()


def counted(reason: str) -> float:
    return metrics.rejected_frames_total.labels(reason=reason)._value.get()


def of_weights_to_come(message: rollouts.Deliver) -> rollouts.Deliver:
    return change(message, spans=(VersionSpan(v(9), 0, 1),))


@pytest.mark.parametrize(
    ("reason", "change_message", "payload"),
    [
        ("schema", lambda m: m, PAYLOAD[:-1]),
        ("vocabulary", lambda m: m, np.array([2**31 - 1, 0, 0, 0], "<i4").tobytes()),
        ("not_finite", lambda m: m, np.array([0, np.nan, 0, 0], "<f4").tobytes()),
        ("lease", lambda m: msgspec.structs.replace(m, prompt_index=11), PAYLOAD),
        ("version", of_weights_to_come, PAYLOAD),
    ],
)
def test_a_group_that_is_not_believed_is_counted_and_its_prompt_leased_again(reason, change_message, payload):
    served = Served(per_step=1, max_lag=0)
    served.service._vocabulary = VOCABULARY
    lease, before = a_lease(served), counted(reason)
    sent = hear_raw(served, "a", encode(change_message(deliver(lease, 0)), payload))
    assert [type(m).__name__ for _, m in sent] == ["Nack", "Grant"]
    assert sent[0][1].reason == reason and sent[0][1].lease_id == lease.lease_id
    again = served.oldest_lease()
    assert (again.prompt_index, again.attempt) == (lease.prompt_index, 1)
    assert counted(reason) == before + 1
    assert hear_raw(served, "a", encode(deliver(again, 0), PAYLOAD))[0][1].lease_id == again.lease_id
    assert served.buffer.count(State.READY) == 1


def test_an_evaluation_that_is_not_believed_is_asked_for_again():
    served = Served(held_out=prompts(1))
    served.hear("learner", rollouts.RequestEval(step=0))
    served.hear("learner", rollouts.Trained(version=v(0)))
    served.join("a", window=1)
    lease = served.service._evaluations.lease_of("eval.1.0.0.0")
    assert lease is not None
    message = deliver(lease, 9, scores=(1.0,), purpose="eval")
    sent = hear_raw(served, "a", encode(message, bytes(8)))
    assert sent[0][1].reason == "version"
    assert served.service._evaluations.lease_of("eval.1.0.0.1") is not None
    assert served.service._evaluations.in_flight


@pytest.mark.parametrize(
    ("reason", "frames"),
    [
        ("checksum", [encode(rollouts.Serving(generator_id="a", version=None))[0][:-1] + b"x", b""]),
        ("decode", sealed(msgspec.msgpack.encode({"kind": "Serving", "generator_id": 1}))),
        ("decode", encode(rollouts.Nack(lease_id="", reason=""))),
        ("size", sealed(msgspec.msgpack.encode({"kind": "Serving", "x": "y" * 2**20}))),
        ("sender", encode(rollouts.Finished())),
        ("sender", encode(rollouts.Serving(generator_id="b", version=None))),
        ("sender", encode(rollouts.Register(generator_id="b", incarnation="", window=9))),
    ],
)
def test_what_cannot_be_read_or_is_not_for_the_sender_to_say_changes_nothing(reason, frames):
    served = Served(per_step=1, max_lag=0)
    lease, before = a_lease(served), counted(reason)
    assert hear_raw(served, "a", frames) == [("a", rollouts.Nack(lease_id="", reason=reason))]
    assert counted(reason) == before + 1
    assert served.oldest_lease() == lease and served.buffer.version == v(0)
    assert hear_raw(served, "stranger", frames[:1]) == [], "who never said rollouts.Register is told nothing"
    before = counted("schema")
    served.hear("learner", rollouts.Saved(step=1))
    assert counted("schema") == before + 1, "nobody asked for a checkpoint"


def test_a_batch_whose_sizes_lie_is_refused():
    message, payload = pack_group(make_group())
    for sizes in ((len(payload), 8), (len(payload) - 8,)):
        batch = rollouts.Batch(version=v(0), groups=(message,), payload_sizes=sizes, counters={}, evals=())
        with pytest.raises(RefusedError):
            unpack_batch(batch, memoryview(payload))


def observed(*places: tuple[int, int]):
    """A group whose third completion (5 tokens) has observations of token 99 at these places and of these lengths."""
    message, payload = pack_group(make_group())
    headers = list(message.rollouts)
    headers[2] = msgspec.structs.replace(headers[2], observed=places)
    said = np.full(sum(size for _, size in places), 99, "<i4").tobytes()
    return msgspec.structs.replace(message, rollouts=tuple(headers)), payload + said


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (((0, 2), (3, 1), (5, 4)), None),
        (((6, 1),), "schema"),
        (((3, 1), (2, 1)), "schema"),
        (((2, 0),), "schema"),
    ],
)
def test_observations_lie_in_order_between_the_tokens_of_their_completion(places, reason):
    message, payload = observed(*places)
    assert refusal(message, payload) == reason
    assert refusal(message, payload + b"\0\0\0\0") == "schema"
    assert refusal(*pack_group(make_group()), vocabulary=99) is None
    assert refusal(message, payload, vocabulary=99) == ("vocabulary" if reason is None else reason)
