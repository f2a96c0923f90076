"""The learner's wait for the buffer, on a clock that is a number."""

import pytest
from msgspec.structs import replace

from asyncgrpo.errors import RewardError, StalledError, WireError
from asyncgrpo.learner.ranks import Inbox
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import Batch, EvalResult, LastEvals, NoMore, Snapshot, Take, TakeSnapshot, Waiting

AT = PolicyVersion(1, 3)
RESULT = EvalResult(
    step=3, prompts=1, completions=1, oldest=AT, newest=AT, failures={}, completion_length_mean=1.0, parts={},
    numbers={"reward": (1.0, None, None)}, seconds=1.0,
)  # fmt: skip


class Line:
    """A buffer that sends a message every 40 s or so, whatever it is sent."""

    def __init__(self, messages: list[Message], every_s: float = 40.0) -> None:
        self.messages, self.every_s, self.now_s = messages, every_s, 0.0

    def send(self, message: Message) -> None:
        pass

    def receive(self, timeout_s: float) -> tuple[Message, memoryview]:
        self.now_s += self.every_s
        return self.messages.pop(0), memoryview(b"")


def inbox_of(line: Line, limit_s: float = 1000.0) -> tuple[Inbox, list[EvalResult]]:
    """An inbox, and the evaluations that it has told of."""
    inbox, results = Inbox(line, limit_s, lambda: line.now_s), list[EvalResult]()  # type: ignore[arg-type]
    inbox.on_eval = results.append
    return inbox, results


def wait(messages: list[Message]) -> list[EvalResult]:
    inbox, results = inbox_of(Line(messages), 100.0)
    inbox.last_evals()
    return results


class Lossy(Line):
    """A buffer that receives every second request and replies to it twice."""

    def __init__(self) -> None:
        super().__init__([])
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if self.sent.count(message) == 2:
            self.messages += [self.reply(message)] * 2

    def reply(self, request: Message) -> Message:
        if isinstance(request, TakeSnapshot):
            return Snapshot(state={"of": len(self.sent)}, trained=request.trained)
        assert isinstance(request, Take)
        return Batch(version=request.version, groups=(), payload_sizes=(), counters={}, evals=(RESULT,))

    def receive(self, timeout_s: float) -> tuple[Message, memoryview] | None:
        self.now_s += timeout_s
        return (self.messages.pop(0), memoryview(b"")) if self.messages else None


def test_a_lost_reply_is_asked_for_again_and_a_second_one_is_not_taken_for_the_next():
    inbox, results = inbox_of(line := Lossy())
    for version in (AT, PolicyVersion(1, 4)):
        assert inbox.take(version, {})[0] == line.reply(Take(version=version))
    assert [message.version.number for message in line.sent] == [3, 3, 4, 4] and line.now_s < 40.0
    assert results == [RESULT], "what was evaluated is told once"


def test_evaluations_of_earlier_batches_are_forgotten_so_that_a_run_without_an_end_keeps_none():
    steps = range(50)
    batches = [
        Batch(version=PolicyVersion(1, n), groups=(), payload_sizes=(), counters={}, evals=(replace(RESULT, step=n),))
        for n in steps
    ]
    inbox, results = inbox_of(Line(list(batches)))
    for batch in batches:
        inbox.take(batch.version, {})
    assert [result.step for result in results] == list(steps)
    assert len(inbox._evaluated) == 1, "the last reply may be repeated"


class Exhausted(Lossy):
    """A buffer without prompts."""

    def reply(self, request: Message) -> Message:
        if isinstance(request, LastEvals):
            return NoMore(why="exhausted", evals=(RESULT,))
        assert isinstance(request, Take)
        return NoMore(why="exhausted", version=request.version)


def test_a_second_word_that_the_prompts_are_exhausted_does_not_end_the_wait_for_the_last_evaluation():
    inbox, results = inbox_of(Exhausted())
    inbox.take(AT, {})
    inbox.request_eval(3)
    inbox.last_evals()
    assert results == [RESULT]


def test_a_lost_snapshot_is_asked_for_again_and_a_second_one_is_not_taken_for_the_next():
    inbox, _ = inbox_of(line := Lossy())
    for number in (3, 4):
        inbox.trained(PolicyVersion(1, number))
        assert inbox.snapshot().trained == PolicyVersion(1, number)
    assert line.now_s < 40.0


def test_a_request_for_an_evaluation_that_was_lost_is_in_the_requests_that_follow():
    inbox, _ = inbox_of(line := Lossy())
    inbox.request_eval(3)
    inbox.request_eval(3)  # once
    inbox.take(AT, {})
    assert line.sent[1:] == [Take(version=AT, evaluate=3)] * 2


def test_words_alone_are_no_progress_and_the_error_names_what_was_awaited():
    with pytest.raises(StalledError, match=r"nothing to train for 120 s.*the last evaluation"):
        wait([Waiting(what="the last evaluation")] * 3)


def test_as_long_as_evaluations_end_nothing_is_stalled():
    waiting = Waiting(what="the last evaluation")
    messages = [waiting, Waiting(what="the last evaluation", evals=(RESULT,)), waiting, waiting]
    assert wait([*messages, NoMore(why="exhausted", counters={})]) == [RESULT]


def test_what_will_never_come_is_not_waited_for():
    with pytest.raises(RewardError, match="never worked: 9 of 9"):
        wait([Waiting(what="groups"), Waiting(what="rewards", hopeless="reward function f.py never worked: 9 of 9")])


def test_a_pause_may_last_as_long_as_a_person_wants():
    paused = [Waiting(what="the end of the pause", is_paused=True)] * 5
    assert wait([*paused, NoMore(why="exhausted", counters={})]) == []
    with pytest.raises(StalledError, match="groups"):
        wait([*paused, *[Waiting(what="groups")] * 3])


def test_a_batch_and_an_evaluation_that_come_while_a_snapshot_is_awaited_are_not_lost():
    nothing = NoMore(why="draining", version=AT, evals=(RESULT,))
    line = Line([Waiting(what="groups", evals=(RESULT,)), nothing, Snapshot(state={"done": 3})], every_s=4.0)
    inbox, results = inbox_of(line)
    assert inbox.snapshot().state == {"done": 3}
    taken = inbox.take(AT, {})
    assert taken[0] == nothing and line.messages == [] and results == [RESULT]


def test_a_snapshot_that_never_comes_is_not_awaited_because_the_buffer_talks_of_a_batch():
    inbox, _ = inbox_of(Line([Waiting(what="groups")] * 5))
    with pytest.raises(WireError, match="did not reply to a snapshot request for 60 s"):
        inbox.snapshot()


def test_a_snapshot_that_waits_for_the_journal_has_the_limit_of_a_stall():
    inbox, _ = inbox_of(Line([Waiting(what="the journal: no space", of_snapshot=True)] * 5), 100.0)
    waits = []
    with pytest.raises(StalledError, match=r"no checkpoint for 100 s .*the journal"):
        inbox.snapshot(while_waiting=lambda what, seconds: waits.append((what, seconds)))
    assert waits[0][0] == "the journal: no space" and waits[-1][1] > 100.0
