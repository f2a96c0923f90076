"""A prompt that ends generators is found, dropped and never leased again; those that were beside it lose nothing."""

import json
from functools import partial
from pathlib import Path

import pytest

from asyncgrpo.buffer.group_health import ISOLATE_AFTER, QUARANTINE_FILE, Case, Quarantine
from asyncgrpo.errors import DataError
from asyncgrpo.journal.history import Dropped, Interrupted, read_history
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import Finished, LeaseFailed, NoMore, Snapshot, Take, TakeSnapshot, Trained
from asyncgrpo.wire.supervision import GeneratorLost
from tests.buffer.test_buffer import begun, deliver, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.buffer.test_recovery import start

in_order = partial(begun, count=8, per_step=8, max_lag=0, shuffle=False)
"""A buffer of prompts in order, without a bound to wait for."""


def served_in_order(**settings) -> Served:
    served = Served(**{"count": 8, "per_step": 8, "max_lag": 0, "shuffle": False} | settings)
    served.hear("learner", Trained(version=v(0)))
    return served


def test_a_prompt_that_is_to_blame_for_some_of_its_attempts_is_dropped_and_not_in_quarantine():
    buffer = in_order(max_attempts=2)
    for reason in ("failed", "lease_timeout"):
        buffer.fail(buffer.lease("a", 0.0).lease_id, reason)
    assert buffer.outcomes["dropped_lease_timeout"] == 1 and not buffer.quarantine.cases


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_says_which_prompt_and_why_and_the_next_start_reads_it(tmp_path: Path):
    path = tmp_path / QUARANTINE_FILE
    buffer = in_order(max_attempts=2, quarantine=Quarantine(path))
    for _ in range(ISOLATE_AFTER + 2):
        assert buffer.lease("a", 0.0).prompt_index == 0
        buffer.release("a")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt_id": "train/0", "reason": "poison", "prompt_index": 0, "attempts": 2}
    ]
    buffer = in_order(quarantine=Quarantine(path))
    assert [buffer.lease("a", 0.0).prompt_index for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]
    path.write_text("")
    buffer = in_order(quarantine=Quarantine(path))
    assert buffer.lease("a", 0.0).prompt_index == 0, "whoever takes the line out has the prompt back"


def test_a_torn_line_is_left_out_and_a_disk_that_refuses_does_not_let_the_prompt_go(tmp_path: Path):
    path = tmp_path / QUARANTINE_FILE
    path.write_bytes(b'{"prompt_id":"train/1","reason":"poi')
    quarantine = Quarantine(path)
    assert "train/1" not in quarantine
    case = Case(prompt_id="train/5", reason="failed", prompt_index=5, attempts=3)
    quarantine.add(case)
    assert list(Quarantine(path).cases) == ["train/5"]
    quarantine = Quarantine(tmp_path / "nowhere" / QUARANTINE_FILE)
    quarantine.add(case)
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
    assert buffer.outcomes["dropped_failed"] == 1 and len(buffer.quarantine.cases) == 1


# -- the process -------------------------------------------------------------------------------------------------------


def test_while_one_generator_is_kept_free_for_a_suspect_the_others_get_leases():
    served = served_in_order()
    for end in range(ISOLATE_AFTER):
        served.join("a", peer=f"a-{end}")
        assert served.grants() == {f"a-{end}": [0, 1]}
        served.hear("driver", GeneratorLost(generator_id="a"))
    served.join("large", window=6)
    assert served.grants() == {"large": [0]}, "an isolated prompt, and nothing beside it for all its room"
    served.join("b")
    assert served.grants() == {"b": [2, 3]}
    served.now_s += 1.0
    for index, then in ((0, [1]), (1, [4, 5, 6, 7])):
        served.hear("large", deliver(served.buffer._entries[f"1.{index}"].lease, 0), PAYLOAD)
        assert served.grants() == {"large": then}, "the next isolated prompt; then it is a generator like any other"


def test_the_leases_of_a_generator_that_ended_are_free_at_once_and_answered_in_vain():
    served = served_in_order(per_step=1)
    served.join("a", peer="a-i", incarnation="i")
    lease = served.oldest_lease()
    assert served.grants() == {"a-i": [0]}
    served.join("b")
    served.hear("driver", GeneratorLost(generator_id="a", incarnation="an earlier one"))
    assert served.grants() == {} and served.service.missing == ()
    served.hear("driver", GeneratorLost(generator_id="a", incarnation="i"))
    assert served.grants() == {"b": [0]} and served.service.missing == ("a-i",)
    assert served.buffer.accept(deliver(lease, 0), b"") == "no_such_lease", "the rule of lag counts on the other one"


def test_the_end_of_a_generator_counts_against_the_prompts_that_its_silence_gave_to_others():
    served = served_in_order()
    buffer = served.buffer
    for end in range(ISOLATE_AFTER):
        for name in "ab":
            served.join(name, incarnation=str(end))
        served.pass_time(5.5, "b")
        assert buffer.held_by("a") == 0
        for name in "ba":
            served.hear("driver", GeneratorLost(generator_id=name))
    assert buffer._isolated.is_isolated(0) and buffer._isolated.is_isolated(1)
    served.join("a", incarnation="last")
    (alone,) = served.grants()["a"]
    served.join("b", incarnation="last")
    served.pass_time(5.5, "b")
    assert buffer.held_by("a") == 1, "what works alone may be what stopped it, and stops nobody else"
    served.hear("driver", GeneratorLost(generator_id="a"))
    assert list(buffer._attempts) == [alone]


def test_a_completion_clears_a_prompt_that_a_silence_gave_to_another():
    served = served_in_order(per_step=1)
    for name in "ab":
        served.join(name)
    served.pass_time(5.5, "b")
    assert served.buffer.accept(deliver(served.oldest_lease(), 0), b"") is None
    served.hear("driver", GeneratorLost(generator_id="a"))
    assert not served.buffer._isolated._ends


def test_a_lease_that_was_cut_with_too_few_completions_makes_its_generator_count_as_slow():
    served = served_in_order(max_attempts=1)
    served.join("a")
    for prompt_index, reason in ((0, "lease_timeout"), (1, "failed")):
        served.hear("a", LeaseFailed(generator_id="a", lease_id=f"1.{prompt_index}.0", reason=reason))
    outcomes = served.buffer.outcomes
    assert outcomes["dropped_lease_timeout"] == outcomes["dropped_failed"] == 1
    assert list(served.buffer.quarantine.cases) == ["train/1"], "one that is only slow is not in quarantine"
    speeds = served.service._speeds
    assert speeds.seconds_per_token("a", 0.0, speeds.fastest_s) > speeds.seconds_per_token("b", 1.0, speeds.fastest_s)


def test_a_run_whose_every_prompt_is_in_quarantine_ends_once_the_learner_has_saved():
    """With `epochs: null` there is always a next epoch, and nothing in it to lease."""
    served = served_in_order(count=3, epochs=None)
    for index in range(3):
        case = Case(prompt_id=f"train/{index}", reason="failed", prompt_index=index, attempts=3)
        served.buffer.quarantine.add(case)
    with pytest.raises(DataError, match=r"every prompt of data.train is in quarantine \(RUN/quarantine.jsonl"):
        served.buffer.lease("g", 0.0)
    served.hear("learner", Take(version=v(0)))
    served.join("a")
    (ended,) = [message for _, message in served.pass_time(0.2) if isinstance(message, NoMore)]
    assert ended.why == "failing"
    served.hear("learner", TakeSnapshot(trained=v(0)))
    assert [message.failing for _, message in served.lines.sent if isinstance(message, Snapshot)] == [True]
    served.hear("learner", Finished())
    with pytest.raises(DataError, match="is in quarantine"):
        served.service.run()
