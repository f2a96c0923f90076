"""The buffer loses nothing, trains nothing twice, and says what became of every group."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import msgspec
import pytest

from asyncgrpo.buffer.buffer import Buffer, group_seed
from asyncgrpo.buffer.group_health import DEADLINE_WINDOW, MIN_GROUPS, SHORTEST_S, Deadlines, Quarantine, zero_signal
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import Dropped, JournalRecord
from asyncgrpo.journal.log import InMemory
from asyncgrpo.types import Discarded, Lease, PolicyVersion, Prompt, Sampling, Score, VersionSpan
from asyncgrpo.wire.rollouts import Deliver, RolloutHeader

GROUP_SIZE = 2
POLICIES = get_args(BufferConfig.__annotations__["policy"])


class Recording(InMemory):
    """A ledger that shows what it was told."""

    def __init__(self) -> None:
        self.records: list[JournalRecord] = []

    def append(self, record: JournalRecord, body: Sequence[bytes] = ()) -> None:
        self.records.append(record)


class EagerBuffer(Buffer):
    """A buffer that wants all slots in use."""

    @property
    def wanted(self) -> int:
        return self.num_slots


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=f"train/{i}", token_ids=(i + 1,)) for i in range(count))


def make_buffer(
    count=12, per_step=2, max_lag=1, epochs=1, filters=False, too_long=(), shuffle=True, algorithm=None, journal=None,
    quarantine=None, max_attempts=3, is_eager=True, **settings,
) -> Buffer:  # fmt: skip
    """A buffer over `count` prompts, of which those in `too_long` have no tokens. An eager one wants all slots in use."""
    config = BufferConfig(prompts_per_step=per_step, max_lag=max_lag, **settings)
    objective = AlgorithmConfig(**{"group_size": GROUP_SIZE, "filter_zero_signal": filters} | (algorithm or {}))
    some = [
        msgspec.structs.replace(one, token_ids=()) if i in too_long else one for i, one in enumerate(prompts(count))
    ]
    source = PromptSource(some, seed=0, shuffle=shuffle, epochs=epochs)
    given = {"journal": journal or InMemory(), "quarantine": quarantine or Quarantine(), "max_attempts": max_attempts}
    return (EagerBuffer if is_eager else Buffer)(config, objective, source, Sampling(), seed=0, lineage=1, **given)


def begun(*args, **settings) -> Buffer:
    """A buffer of `make_buffer` whose first weights are published."""
    buffer = make_buffer(*args, **settings)
    buffer.trained(v(0))
    return buffer


def deliver(
    lease: Lease, version: int, scores=(0.0, 1.0), lineage=1, tokens=1, texts: Sequence[str] = (), purpose="train"
) -> Deliver:
    """A completion for each score, which is a number, None for a failure, or a `Score`."""
    spans = (VersionSpan(PolicyVersion(lineage, version), 0, tokens),)
    same = {name: getattr(lease, name) for name in ("group_id", "lease_id", "attempt", "prompt_index", "prompt")}
    rollouts = []
    for index, score in enumerate(scores):
        if not isinstance(score, Score):
            score = Score(failure="timeout") if score is None else Score(value=score)
        known = {"index": index, "num_tokens": tokens, "spans": spans, "finish_reason": "stop"}
        rollouts.append(RolloutHeader(**known, score=score, text=texts[index] if texts else ""))
    return Deliver(**same, purpose=purpose, rollouts=tuple(rollouts), generator_id="g", timings={})


def v(version: int) -> PolicyVersion:
    return PolicyVersion(1, version)


def lease_all(buffer: Buffer, holder="g") -> list[Lease]:
    leases = []
    while (lease := buffer.lease(holder, 0.0)) is not None:
        leases.append(lease)
    return leases


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_without_tokens_was_too_long_and_is_dropped_for_good_when_it_is_due(policy):
    too_long = set(range(12)) - {0, 3, 6, 9}
    journal = Recording()
    buffer = make_buffer(per_step=2, max_lag=0, epochs=2, policy=policy, too_long=too_long, journal=journal)
    trained, leased = [], []
    for version in range(4):
        buffer.trained(v(version))
        for lease in lease_all(buffer):
            leased.append(lease.prompt.prompt_id)
            assert buffer.accept(deliver(lease, version), b"") is None
        trained += [entry.prompt_index for entry in buffer.take(v(version))]
    buffer.trained(v(4))
    assert buffer.lease("g", 0.0) is None and buffer.exhausted
    assert Counter(leased) == dict.fromkeys(["train/0", "train/3", "train/6", "train/9"], 2)
    assert (buffer.prompts.num_done, buffer.outcomes["trained"], buffer.outcomes["dropped_too_long"]) == (24, 8, 16)
    assert buffer.outcomes["leased"] == 24
    dropped = [record for record in journal.records if isinstance(record, Dropped)]
    assert {record.reason for record in dropped} == {"too_long"} and all(record.is_final for record in dropped)
    assert {record.prompt_index for record in dropped} | set(trained) == set(range(24))


def without_tokens(message: Deliver) -> Deliver:
    """The same, if its environment or agent had failed before the first token."""
    rollouts = [msgspec.structs.replace(rollout, num_tokens=0, spans=()) for rollout in message.rollouts]
    return msgspec.structs.replace(message, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (lambda lease: deliver(lease, 0, scores=(1.0,)), "incomplete"),
        (lambda lease: deliver(lease, 0, scores=(1.0, None)), "unscored"),
        (lambda lease: without_tokens(deliver(lease, 0, scores=(None, None))), "unscored"),
        (lambda lease: deliver(lease, 0, lineage=7), "lineage"),
        (lambda lease: msgspec.structs.replace(deliver(lease, 0), group_id="1.999"), "no_such_lease"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_by_name(message, reason):
    buffer = begun()
    lease = buffer.lease("g", 0.0)
    assert lease is not None
    assert buffer.accept(message(lease), b"") == reason


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.0, 0.0, 0.0], "all_equal_low"),
        ([0.98] * 15, "all_equal_high"),  # whose standard deviation is not 0 in floating point
        ([1.0], "unscored"),
        ([], "unscored"),
        ([0.1, 0.1 + 2**-56], None),  # equal in float32, the next number in float64
        ([-0.0, 0.0], "all_equal_low"),
    ],
)
def test_a_group_is_without_signal_only_if_its_rewards_are_exactly_equal(rewards, kind):
    assert zero_signal(rewards) == kind


def test_a_group_without_signal_is_kept_where_nobody_asked_for_the_filter():
    buffer = begun(per_step=1, max_lag=0)
    (lease,) = lease_all(buffer)
    buffer.accept(deliver(lease, 0, (1.0, 1.0)), b"")
    assert len(buffer.take(v(0))) == 1 and not buffer.filtered


def with_indices(message: Deliver, *indices: int) -> Deliver:
    """The same with these completions, of which index 3 is the greedy one of a group of three."""
    first = message.rollouts[0]
    scored = [msgspec.structs.replace(first, index=i, score=Score(value=float(i))) for i in indices]
    return msgspec.structs.replace(message, rollouts=tuple(scored))


@pytest.mark.parametrize(
    ("least", "advantage", "indices", "refusal"),
    [
        (None, "grpo", (0, 1, 2), None),
        (None, "grpo", (0, 1), "incomplete"),
        (2, "grpo", (0, 1), None),
        (2, "grpo", (0,), "incomplete"),
        (2, "grpo", (0, 1, 2, 3), "incomplete"),
        (2, "remax", (0, 1, 3), None),
        (2, "remax", (0, 1, 2), "incomplete"),
        (2, "remax", (0, 1, 2, 3), None),
    ],
)
def test_a_smaller_group_is_accepted_where_the_configuration_says_so(least, advantage, indices, refusal):
    algorithm = {"group_size": 3, "min_completions": least, "advantage": advantage}
    buffer = begun(per_step=1, max_lag=0, algorithm=algorithm)
    lease = buffer.lease("g", 0.0)
    assert (lease.num_completions, lease.with_greedy) == (3, advantage == "remax")
    assert lease.min_completions == (least or 3) and lease.cut_after_s < BufferConfig().lease_timeout_s
    assert buffer.accept(with_indices(deliver(lease, 0), *indices), b"") == refusal
    sampled = sum(i < 3 for i in indices)
    assert buffer.outcomes["accepted_short"] == (refusal is None and sampled < 3)


def test_completions_left_out_of_a_group_are_counted_and_their_tokens_are_aborted():
    buffer = begun()
    lease = buffer.lease("g", 0.0)
    discarded = Discarded(tokens=70, censored=4)
    message = msgspec.structs.replace(deliver(lease, 0), discarded=discarded)
    assert buffer.accept(message, b"") is None
    assert buffer.tokens == {"generated": 72, "aborted": 70} and buffer.tokens_in_flight == 2
    assert buffer.discarded == {"censored": 4}
    assert buffer.accept(message, b"") == "duplicate"
    assert buffer.tokens == {"generated": 144, "aborted": 70, "duplicate": 72}
    assert buffer.discarded["censored"] == 4, "of a group that came twice, once"


def after(durations, factor=3.0, longest_s=1800.0) -> Deadlines:
    deadlines = Deadlines(factor, longest_s)
    for seconds in durations:
        deadlines.observe(seconds)
    return deadlines


@pytest.mark.parametrize(
    ("durations", "settings", "seconds"),
    [
        ([50.0] * DEADLINE_WINDOW + [100.0] * DEADLINE_WINDOW, {}, 300.0),  # a multiple of the median of the newest
        ([40.0] * 6 + [60.0] * 7, {}, 180.0),
        ([0.1] * 20, {}, SHORTEST_S),
        ([1000.0] * 20, {}, 1800.0),
        ([50.0] * (MIN_GROUPS - 1), {}, 1800.0),  # little is known
        ([50.0] * 20, {"factor": 0.0}, 1800.0),
        ([50.0] * 20 + [0.0, -1.0, math.nan, math.inf] * 30, {}, 150.0),  # these are no times
    ],
)
def test_a_deadline_follows_the_median_between_a_floor_and_a_ceiling(durations, settings, seconds):
    assert after(durations, **settings).seconds(is_last=False) == seconds
    assert after(durations, **settings).seconds(is_last=True) == 1800.0, "the last lease of a prompt has all the time"


def test_a_deadline_follows_what_groups_took_but_for_the_last_lease_of_a_prompt():
    buffer = begun(count=40, per_step=20, max_attempts=2, lease_timeout_s=1000.0, straggler_factor=3.0)
    for _ in range(MIN_GROUPS):
        lease = buffer.lease("g", 0.0)
        assert lease.cut_after_s == 900.0, "nothing is known yet"
        timings = {"generate": 15.0, "reward": 5.0}
        buffer.accept(msgspec.structs.replace(deliver(lease, 0), timings=timings), b"")
    lease = buffer.lease("g", 100.0)
    assert lease.cut_after_s == pytest.approx(54.0) and buffer.deadlines.seconds(is_last=False) == 60.0
    assert buffer.expire(160.0) == []
    assert [entry.lease for entry in buffer.expire(161.0)] == [lease]
    again = buffer.lease("g", 200.0)
    assert again.prompt_index == lease.prompt_index and again.cut_after_s == 900.0
    assert buffer.expire(1199.0) == [] and len(buffer.expire(1201.0)) == 1
    assert buffer.outcomes["dropped_lease_timeout"] == 1 and len(buffer.quarantine.cases) == 0


def test_leases_that_run_out_count_in_the_median():
    buffer = begun(count=60, per_step=40, max_attempts=9, lease_timeout_s=1000.0, straggler_factor=3.0)
    for _ in range(MIN_GROUPS):
        message = deliver(buffer.lease("g", 0.0), 0)
        buffer.accept(msgspec.structs.replace(message, timings={"generate": 20.0}), b"")
    late = [buffer.lease("g", 0.0) for _ in range(MIN_GROUPS + 1)]
    assert buffer.deadlines.seconds(is_last=False) == 60.0 and len(buffer.expire(61.0)) == len(late)
    assert buffer.deadlines.seconds(is_last=False) == 180.0, "most of what is known took 60 s or more"


def test_seeds_differ_between_groups_attempts_and_runs():
    seeds = {group_seed(s, o, a) for s in range(3) for o in range(50) for a in range(3)}
    assert len(seeds) == 3 * 50 * 3 and all(0 <= s < 2**48 for s in seeds)
