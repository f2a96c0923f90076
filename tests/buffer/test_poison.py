"""A prompt that ends generators is found, dropped and never leased again; those that were beside it lose nothing."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.group_health import ISOLATE_AFTER, QUARANTINE_FILE, Case, IsolatedPrompts, Quarantine
from asyncgrpo.buffer.recovery import earlier_failures
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import DataError
from asyncgrpo.journal.format import Dropped, Interrupted
from asyncgrpo.journal.history import read_history
from asyncgrpo.types import Lease, PolicyVersion, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Finished,
    Grant,
    LeaseFailed,
    NoMore,
    Register,
    Serving,
    Snapshot,
    Take,
    TakeSnapshot,
    Trained,
)
from asyncgrpo.wire.supervision import GeneratorLost
from tests.buffer.test_buffer import deliver, lease_all, prompts, v
from tests.buffer.test_recovery import start
from tests.journal.journals import delivered, group, journal


def make_buffer(count=8, per_step=4, max_lag=0, epochs=1, quarantine=None, max_attempts=3, **settings) -> Buffer:
    config = BufferConfig(prompts_per_step=per_step, max_lag=max_lag, **settings)
    source = PromptSource(prompts(count), seed=0, shuffle=False, epochs=epochs)
    given = {"quarantine": quarantine, "max_attempts": max_attempts}
    buffer = Buffer(config, AlgorithmConfig(group_size=2), source, Sampling(), seed=0, lineage=1, **given)
    buffer.trained(v(0))
    return buffer


def balanced(buffer: Buffer) -> bool:
    out = buffer.outcomes
    gone = out["trained"] + out["requeued"] + sum(n for name, n in out.items() if name.startswith("dropped"))
    return out["leased"] == gone + sum(buffer.count(state) for state in State)


def run(buffer: Buffer, killer: str, holders="ab", window=4) -> tuple[list[Lease], int]:
    """Work until every prompt is done; a generator that gets the killer ends at once. Returns leases, and ends."""
    leases: list[Lease] = []
    ends, version = 0, 0
    rng = random.Random(0)
    held: dict[str, list[Lease]] = {holder: [] for holder in holders}
    for now_s in range(1000):
        for holder in holders:
            while len(held[holder]) < window and (lease := buffer.lease(holder, float(now_s))) is not None:
                leases.append(lease)
                held[holder].append(lease)
            if any(lease.prompt.prompt_id == killer for lease in held[holder]):
                buffer.release(holder)
                held[holder] = []
                ends += 1
            elif held[holder]:
                lease = held[holder].pop(rng.randrange(len(held[holder])))
                assert buffer.accept(deliver(lease, version), b"") is None
            assert balanced(buffer)
            charged = [prompt_index for prompt_index, count in buffer._attempts.items() if count]
            assert all(f"train/{prompt_index % 8}" == killer for prompt_index in charged), "nobody else is charged"
        if buffer.take(v(version)) is not None:
            version += 1
            buffer.trained(v(version))
        if buffer.exhausted:
            return leases, ends
    raise AssertionError("the run does not end")


@pytest.mark.parametrize("holders", ["a", "ab", "abc"])
def test_a_prompt_that_ends_every_generator_is_dropped_and_all_others_are_trained(holders: str):
    buffer = make_buffer(max_attempts=3)
    _, ends = run(buffer, "train/2", holders)
    assert ends == ISOLATE_AFTER + 3
    assert buffer.outcomes["dropped_poison"] == 1 and buffer.outcomes["trained"] == 7


def test_it_is_not_leased_in_later_epochs_and_each_time_counted():
    buffer = make_buffer(max_attempts=2, epochs=3)
    leases, ends = run(buffer, "train/2")
    assert ends == ISOLATE_AFTER + 2
    assert all(lease.prompt_index < 8 for lease in leases if lease.prompt.prompt_id == "train/2")
    assert buffer.outcomes["dropped_poison"] == 1 and buffer.outcomes["dropped_quarantined"] == 2
    assert buffer.outcomes["trained"] == 3 * 7 and buffer.prompts_done == 3 * 8


def test_a_prompt_that_no_generator_can_answer_is_quarantined_and_one_that_is_only_slow_is_not():
    buffer = make_buffer(max_attempts=2, epochs=2, per_step=1)
    for reason in ("failed", "lease_timeout"):
        for _ in range(2):
            buffer.fail(buffer.lease("a", 0.0).lease_id, reason)
    for reason in ("lease_timeout", "failed"):  # not all of it was the prompt's fault
        buffer.fail(buffer.lease("a", 0.0).lease_id, reason)
    assert list(buffer._quarantine.cases) == ["train/0"]


def test_the_end_of_a_generator_costs_a_prompt_nothing_until_it_is_a_suspect_and_an_answer_clears_it():
    buffer = make_buffer()
    for _ in range(ISOLATE_AFTER - 1):
        assert len(lease_all(buffer, "a")) == 4
        buffer.release("a")
    again = lease_all(buffer, "a")
    assert [lease.prompt_index for lease in again] == [0, 1, 2, 3] and not buffer._attempts.total()
    assert buffer.accept(deliver(again[0], 0), b"") is None
    buffer.release("a")
    assert not buffer._isolated.is_isolated(0) and all(map(buffer._isolated.is_isolated, (1, 2, 3)))
    assert [lease.prompt_index for lease in lease_all(buffer, "a")] == [1], "an isolated prompt, alone"
    assert [lease.prompt_index for lease in lease_all(buffer, "b")] == [4, 5], "the others go on"


def test_an_answer_clears_a_prompt_though_it_is_leased_again():
    buffer = make_buffer(per_step=1)
    buffer.lease("a", 0.0)
    buffer.release("a")
    assert buffer.accept(deliver(buffer.lease("a", 0.0), 0), b"") is None
    buffer.trained(v(1))
    assert buffer.take(v(1)) is None and buffer.outcomes["dropped_stale"] == 1
    assert buffer.lease("a", 0.0).prompt_index == 0
    buffer.release("a")
    assert not buffer._isolated.is_isolated(0)


def test_one_generator_is_emptied_before_it_gets_a_suspect():
    isolated = IsolatedPrompts()
    assert isolated.may_lease("a", 2, is_waiting=True) == (False, False), "it is kept free of others"
    assert isolated.may_lease("b", 0, is_waiting=True) == (True, False), "of two, one"
    assert isolated.may_lease("a", 0, is_waiting=True) == (False, True)
    isolated.leased(3)
    assert isolated.may_lease("a", 0, is_waiting=True) == (False, False)
    isolated.lease_ended(3)
    assert isolated.may_lease("a", 0, is_waiting=False) == (True, False)


def test_a_suspect_waits_for_no_generator_that_is_gone():
    isolated = IsolatedPrompts()
    assert isolated.may_lease("a", 1, is_waiting=True) == (False, False)
    isolated.generator_lost("a")
    assert isolated.may_lease("b", 0, is_waiting=True) == (False, True)


def test_a_suspect_that_went_into_quarantine_meanwhile_is_dropped_and_its_generator_works_on():
    buffer = make_buffer(per_step=8)
    for _ in range(ISOLATE_AFTER):
        assert [buffer.lease("a", 0.0).prompt_index for _ in range(2)] == [0, 1]
        buffer.release("a")
    for index in range(2):  # say, in another epoch
        buffer._quarantine.add(Case(prompt_id=f"train/{index}", reason="failed", prompt_index=9, attempts=3))
    assert buffer.lease("a", 0.0) is None and buffer.outcomes["dropped_quarantined"] == 2
    assert [lease.prompt_index for lease in lease_all(buffer, "a")] == [2, 3, 4, 5, 6, 7] and balanced(buffer)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_says_which_prompt_and_why_and_the_next_start_reads_it(tmp_path: Path):
    path = tmp_path / QUARANTINE_FILE
    run(make_buffer(max_attempts=2, quarantine=Quarantine(path)), "train/2")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt_id": "train/2", "reason": "poison", "prompt_index": 2, "attempts": 2}
    ]
    leases, ends = run(make_buffer(quarantine=Quarantine(path)), "train/2")
    assert ends == 0 and not [lease for lease in leases if lease.prompt.prompt_id == "train/2"]
    path.write_text("")
    _, ends = run(make_buffer(quarantine=Quarantine(path)), "train/2")
    assert ends, "whoever takes the line out has the prompt back"


def test_a_torn_line_is_left_out_and_the_next_one_is_whole(tmp_path: Path):
    path = tmp_path / QUARANTINE_FILE
    path.write_bytes(b'{"prompt_id":"train/1","reason":"poi')
    quarantine = Quarantine(path)
    assert "train/1" not in quarantine
    quarantine.add(Case(prompt_id="train/5", reason="failed", prompt_index=5, attempts=3))
    assert list(Quarantine(path).cases) == ["train/5"]


def test_a_disk_that_refuses_does_not_let_the_prompt_go(tmp_path: Path):
    quarantine = Quarantine(tmp_path / "nowhere" / QUARANTINE_FILE)
    quarantine.add(Case(prompt_id="train/5", reason="failed", prompt_index=5, attempts=3))
    assert "train/5" in quarantine


# -- after a restart ---------------------------------------------------------------------------------------------------


def test_failed_attempts_and_ends_of_generators_survive_a_restart(tmp_path: Path):
    config = {"max_attempts": 3, "prompts_per_step": 4, "max_lag": 0}
    buffer, _ = start(tmp_path, 1, **config)
    buffer.trained(PolicyVersion(1, 0))
    for _ in range(2):
        buffer.fail(buffer.lease("a", 0.0).lease_id, "failed")
    assert [buffer.lease("a", 0.0).prompt_index for _ in range(4)] == [0, 1, 2, 3]
    buffer.release("a")
    again = [buffer.lease("a", 0.0) for _ in range(4)]
    buffer.accept(deliver(again[3], 0), bytes(16))
    buffer.release("a")
    records = [found.record for found in read_history(tmp_path).found]
    assert [r.prompt_index for r in records if isinstance(r, Dropped)] == [0, 0]
    assert [len(r.prompt_indices) for r in records if isinstance(r, Interrupted)] == [4, 3]

    buffer, _ = start(tmp_path, 2, **config)
    buffer.trained(PolicyVersion(2, 0))
    assert buffer.lease("a", 0.0).prompt_index == 4, "0, 1 and 2 are isolated, and 3 is completed"
    alone = buffer.lease("b", 0.0)
    assert (alone.prompt_index, alone.attempt) == (0, 2)
    assert buffer.lease("b", 0.0) is None
    buffer.fail(alone.lease_id, "failed")
    assert buffer.outcomes["dropped_failed"] == 1 and buffer.num_quarantined == 1


# -- the process -------------------------------------------------------------------------------------------------------


class Line:
    """In the place of the socket: remembers who was sent what."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, peer: str, message: Message, payload: bytes = b"") -> None:
        self.sent.append((peer, message))

    def grants(self) -> dict[str, list[int]]:
        """Orders leased since the last call, by peer."""
        found: dict[str, list[int]] = {}
        for peer, message in self.sent:
            if isinstance(message, Grant):
                found.setdefault(peer, []).append(message.lease.prompt_index)
        self.sent.clear()
        return found


def said(service: BufferService, peer: str, now_s: float, *messages: Message) -> None:
    for message in messages:
        service.turn((peer, encode(message, b"")), now_s)


def register(name: str, window: int = 2) -> tuple[Message, Message]:
    return (
        Register(protocol=PROTOCOL, generator_id=name, incarnation="i", window=window),
        Serving(generator_id=name, version=v(0)),
    )


def test_while_one_generator_is_kept_free_for_a_suspect_the_others_get_leases():
    line, buffer = Line(), make_buffer(per_step=8)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    for end in range(ISOLATE_AFTER):
        said(service, f"a-{end}", 1.0, *register("a"))
        assert line.grants() == {f"a-{end}": [0, 1]}
        said(service, "driver", 1.0, GeneratorLost(generator_id="a"))
    for peer in "ab":
        said(service, peer, 2.0, *register(peer))
    assert line.grants() == {"a": [0], "b": [2, 3]}
    assert buffer.accept(deliver(buffer._entries["1.0"].lease, 0), b"") is None
    service.turn(None, 3.0)
    assert line.grants() == {"a": [1]}, "the next isolated prompt"
    buffer.accept(deliver(buffer._entries["1.1"].lease, 0), b"")
    service.turn(None, 4.0)
    assert line.grants() == {"a": [4, 5]}, "and then it is a generator like any other"


def test_the_leases_of_a_generator_that_a_publication_left_out_are_free_at_once_and_answered_in_vain():
    line, buffer = Line(), make_buffer(per_step=1, max_lag=0)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    said(service, "a-i", 1.0, *register("a"))
    lease = buffer._entries["1.0"].lease
    said(service, "b-i", 1.0, *register("b"))
    assert line.grants() == {"a-i": [0]} and service.missing == ()
    said(service, "learner", 2.0, GeneratorLost(generator_id="a", incarnation="an earlier one", reason="left out"))
    assert line.grants() == {} and service.missing == ()
    said(service, "learner", 2.0, GeneratorLost(generator_id="a", incarnation="i", reason="left out"))
    assert line.grants() == {"b-i": [0]} and service.missing == ("a-i",)
    assert buffer.accept(deliver(lease, 0), b"") == "no_such_lease", "the rule of lag counts on the other one"
    said(service, "a-i", 3.0, *register("a"))
    assert service.missing == ()


def test_the_end_of_a_generator_counts_against_the_prompts_that_its_silence_gave_to_others():
    line, buffer = Line(), make_buffer(per_step=8)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    now_s = 0.0
    for end in range(ISOLATE_AFTER):
        said(service, f"a-{end}", now_s, *register("a"))
        assert line.grants() == {f"a-{end}": [0, 1]}
        said(service, f"b-{end}", now_s, *register("b"))
        line.sent.clear()
        for _ in range(5):
            now_s += 0.5
            said(service, f"b-{end}", now_s, Serving(generator_id="b", version=v(0)))
        assert buffer.held_by("a") == 0
        said(service, "driver", now_s, GeneratorLost(generator_id="b"), GeneratorLost(generator_id="a"))
    assert buffer._isolated.is_isolated(0) and buffer._isolated.is_isolated(1)
    said(service, "a", now_s, *register("a"))
    (alone,) = line.grants()["a"]
    said(service, "b", now_s, *register("b"))
    for _ in range(5):
        now_s += 0.5
        said(service, "b", now_s, Serving(generator_id="b", version=v(0)))
    assert buffer.held_by("a") == 1, "what works alone may be what stopped it, and stops nobody else"
    said(service, "driver", now_s, GeneratorLost(generator_id="a"))
    assert list(buffer._attempts) == [alone]


def test_a_completion_clears_a_prompt_that_a_silence_gave_to_another():
    line, buffer = Line(), make_buffer(per_step=1)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    for name in "ab":
        said(service, name, 0.0, *register(name))
    for tenth in range(30):
        said(service, "b", tenth / 10, Serving(generator_id="b", version=v(0)))
    assert buffer.accept(deliver(buffer._entries["1.0"].lease, 0), b"") is None
    said(service, "driver", 3.0, GeneratorLost(generator_id="a"))
    assert not buffer._isolated._ends


def test_a_generator_with_more_room_that_may_get_nothing_does_not_keep_others_from_it():
    line, buffer = Line(), make_buffer(per_step=8)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    for end in range(ISOLATE_AFTER):
        said(service, f"a-{end}", 1.0, *register("a", window=1))
        said(service, "driver", 1.0, GeneratorLost(generator_id="a"))
    line.sent.clear()
    said(service, "large", 2.0, *register("large", window=6))
    assert line.grants() == {"large": [0]}, "an isolated prompt"
    said(service, "small", 2.0, *register("small", window=2))
    assert line.grants() == {"small": [1, 2]}


def test_a_lease_that_was_cut_with_too_few_completions_makes_its_generator_count_as_slow():
    line, buffer = Line(), make_buffer(max_attempts=1)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    said(service, "a", 1.0, *register("a"))
    for prompt_index, reason in ((0, "lease_timeout"), (1, "failed")):
        said(service, "a", 2.0, LeaseFailed(generator_id="a", lease_id=f"1.{prompt_index}.0", reason=reason))
    assert buffer.outcomes["dropped_lease_timeout"] == buffer.outcomes["dropped_failed"] == 1
    assert list(buffer._quarantine.cases) == ["train/1"]
    assert service._speeds.seconds_per_token("a", 0, 2) > service._speeds.seconds_per_token("b", 0, 2)


def test_what_is_read_of_a_prompt_s_past_ends_with_its_last_completion(tmp_path: Path):
    written = journal(tmp_path)
    for record in (
        Interrupted(generator_id="a", prompt_indices=(1, 2)),
        Interrupted(generator_id="a", prompt_indices=(1, 3)),
    ):
        written.append(record)
        written.append(*delivered(*group(1)))
    written.append(Interrupted(generator_id="a", prompt_indices=(1,)))
    written.append(Dropped(lease_id="1.2.0", prompt_index=2, reason="lease_timeout", is_final=False))
    written.append(Dropped(lease_id="1.3.0", prompt_index=3, reason="failed", is_final=False))
    written.append(Dropped(lease_id="1.4.0", prompt_index=4, reason="ahead", is_final=False))
    past = earlier_failures(read_history(tmp_path), PromptSource(prompts(12), seed=0, shuffle=False, epochs=1))
    assert past.interruptions == {1: 1, 2: 1, 3: 1}
    assert past.attempts == Counter({2: 1, 3: 1}) and past.blamed == Counter({3: 1})


def test_a_run_whose_every_prompt_is_in_quarantine_ends_instead_of_looking_for_ever():
    """With `epochs: null` there is always a next epoch, and nothing in it to lease."""
    buffer = make_buffer(count=3, epochs=None)
    for index in range(3):
        buffer._quarantine.add(Case(prompt_id=f"train/{index}", reason="failed", prompt_index=index, attempts=3))
    with pytest.raises(DataError, match=r"every prompt of data.train is in quarantine \(see quarantine.jsonl"):
        buffer.lease("g", 0.0)


def test_the_learner_is_told_to_save_before_a_buffer_without_a_prompt_to_lease_ends():
    line, buffer = Line(), make_buffer(count=3, epochs=None)
    service = BufferService(line, buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
    for index in range(3):
        buffer._quarantine.add(Case(prompt_id=f"train/{index}", reason="failed", prompt_index=index, attempts=3))
    said(service, "learner", 1.0, Trained(version=v(0)), Take(step=0, version=v(0)))
    said(service, "a", 2.0, *register("a"))
    service.turn(None, 3.0)
    assert [message.why for _, message in line.sent if isinstance(message, NoMore)] == ["failing"]
    said(service, "learner", 4.0, TakeSnapshot(trained=v(0)))
    assert [message.failing for _, message in line.sent if isinstance(message, Snapshot)] == [True]
    said(service, "learner", 5.0, Finished())
    with pytest.raises(DataError, match="is in quarantine"):
        service.run()
