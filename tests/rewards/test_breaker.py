"""The circuit breaker: an outage holds completions back and burns none, a bad prompt is no outage."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.breaker import FIRST_PROBE_S, LAST_PROBE_S, MAX_KINDS, REST, STREAK, Breaker, Tally
from asyncgrpo.types import Prompt, RewardHealth, Score
from tests import scrape
from tests.rewards.stubs import OneByOne
from tests.simulation.virtual import VirtualLoop


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=f"train/{number}", token_ids=(number,))


class Judge(OneByOne):
    """A reward of a tenth of a second that may be down, or fail for some prompts, and notes who calls it when."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.is_down = False
        self.bad: set[str] = set()
        self.failure = "exception"
        self.seconds = seconds
        self.calls: list[tuple[float, str]] = []

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        loop = asyncio.get_running_loop()
        self.calls.append((loop.time(), prompt.prompt_id))
        await asyncio.sleep(self.seconds)
        if self.is_down or prompt.prompt_id in self.bad:
            return Score(failure=self.failure, detail=f"my_reward.py:12: OSError: {loop.time()}")
        return Score(value=1.0)


class Rig:
    """A breaker around a judge, on a clock that is a number."""

    def __init__(self, judge: Judge | None = None, at_once: int = 4) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.judge = judge or Judge()
        self.breaker = Breaker(self.judge, at_once=at_once)

    @classmethod
    def after_a_call_that_worked(cls) -> "Rig":
        rig = cls()
        rig.ask(0)
        rig.wait(1.0)
        return rig

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return self.loop.create_task(coroutine)

    def ask(self, *numbers: int) -> list[asyncio.Task]:
        return [self.start(score_one(self.breaker, prompt(number), f"answer {i}")) for i, number in enumerate(numbers)]

    def wait(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)

    @property
    def health(self) -> RewardHealth:
        asyncio.events._set_running_loop(self.loop)
        try:
            return self.breaker.health
        finally:
            asyncio.events._set_running_loop(None)

    @property
    def is_paused(self) -> bool:
        return self.health.probe_in_s is not None


def test_while_every_call_fails_only_probes_are_made_and_what_waited_is_scored_after_it():
    rig = Rig.after_a_call_that_worked()
    rig.judge.is_down = True
    asked = rig.ask(*range(1, 41))
    rig.wait(8.0)
    assert rig.is_paused and scrape.exposition("generator").count("asyncgrpo_rewards_paused 1.0") == 1
    calls = len(rig.judge.calls)
    assert calls < STREAK + 12, "the others wait"
    rig.judge.is_down = False
    rig.wait(12.0)
    assert not rig.is_paused
    scores = [task.result() for task in asked]
    assert sum(score.failure is not None for score in scores) < STREAK + 4
    assert sum(score.value == 1.0 for score in scores) > 40 - STREAK - 4


def test_probes_become_rarer_and_never_cease():
    rig = Rig()
    rig.judge.is_down = True
    rig.ask(*range(STREAK))
    rig.wait(400.0)
    times = [at_s for at_s, _ in rig.judge.calls[STREAK + 2 :]]
    gaps = [round(later - earlier - rig.judge.seconds, 3) for earlier, later in itertools.pairwise(times)]
    assert gaps[:6] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0] and set(gaps[6:]) == {60.0}
    assert FIRST_PROBE_S == 1.0 and LAST_PROBE_S == 60.0


def test_a_reward_that_fails_for_some_prompts_is_not_paused():
    """For three prompts in ten, whatever the order: also where all that are in flight are such."""
    rig = Rig()
    rig.judge.bad = {f"train/{n}" for n in range(100) if n % 10 in (3, 4, 5)}
    asked = []
    for number in range(100):
        asked += rig.ask(*[number] * 8)
        rig.wait(0.5)
        assert not rig.is_paused
    rig.wait(5.0)
    failed = [task.result().failure for task in asked]
    assert failed == ["exception" if n % 10 in (3, 4, 5) else None for n in range(100) for _ in range(8)]


def test_a_group_is_one_call_which_worked_if_one_of_its_completions_has_a_score():
    rig = Rig()
    rig.judge.bad = {"train/1"}
    groups = [rig.start(rig.breaker.score(prompt(n), [Sampled("a"), Sampled("b")])) for n in (0, 1)]
    rig.wait(1.0)
    assert [[score.failure for score in group.result()] for group in groups] == [[None] * 2, ["exception"] * 2]
    assert (rig.health.worked, rig.health.failed) == (1, 1)
    assert [news.count for news in rig.breaker.news()] == [1], "of two completions, and the second is no news"


@pytest.mark.parametrize("failure", ["unknown_source", "not_applicable", "aborted"])
def test_a_failure_that_says_nothing_of_the_reward_is_no_outage(failure: str):
    rig = Rig()
    rig.judge.is_down, rig.judge.failure = True, failure
    asked = rig.ask(*range(50))
    rig.wait(30.0)
    assert [task.result().failure for task in asked] == [failure] * 50
    assert not rig.is_paused and len(rig.judge.calls) == 50, "a probe would be one more"


def test_probes_try_other_prompts_than_the_one_that_worked_last():
    """Which may be the only one that does not work any more."""
    rig = Rig.after_a_call_that_worked()
    rig.judge.is_down = True
    asked = rig.ask(*range(20))
    rig.wait(10.0)
    assert rig.is_paused
    rig.judge.is_down, rig.judge.bad = False, {"train/0"}
    rig.wait(30.0)
    assert not rig.is_paused and sum(task.result().failure is None for task in asked) > 5


def test_one_bad_prompt_alone_in_flight_is_found_to_be_the_one():
    """The call that worked last is made again, and works."""
    rig = Rig.after_a_call_that_worked()
    rig.judge.bad = {"train/1"}
    asked = rig.ask(*[1] * 20)
    works = rig.start(rig.breaker.works())
    rig.wait(5.0)
    assert [task.result().failure for task in asked] == ["exception"] * 20
    assert works.done() and works.exception() is None and not rig.is_paused


def test_a_group_without_a_score_is_no_verdict_before_a_call_has_worked():
    rig = Rig.after_a_call_that_worked()
    rig.judge.is_down = True
    rig.ask(1, 1)
    rig.wait(0.3)
    works = rig.start(rig.breaker.works())
    rig.wait(20.0)
    assert not works.done() and rig.is_paused
    rig.judge.is_down = False
    rig.wait(20.0)
    assert works.done() and works.exception() is None


def test_calls_that_run_out_of_time_need_fewer_of_them():
    rig = Rig(Judge(seconds=10.0), at_once=1)
    rig.judge.is_down = True
    rig.ask(*range(20))
    rig.wait(30.5)
    assert rig.breaker._check is not None, "three calls and half a minute are enough"
    rig.wait(20.0)
    assert rig.is_paused


def test_health_counts_and_names_the_last_failure():
    rig = Rig()
    rig.ask(0, 0)
    rig.wait(1.0)
    rig.judge.bad = {"train/1"}
    rig.ask(1)
    rig.wait(3.0)
    health = rig.health
    assert (health.worked, health.failed, health.probe_in_s) == (2, 1, None)
    assert health.failing_s == pytest.approx(2.9) and health.last.startswith("exception: my_reward.py:12: OSError")


def test_the_first_failure_of_a_kind_is_news_at_once_and_then_the_tenth(caplog: pytest.LogCaptureFixture):
    rig = Rig(at_once=1)
    rig.judge.bad = {"train/1"}
    for _ in range(12):
        rig.ask(0, 1)
        rig.wait(1.0)
    kind = "exception my_reward.py:12: OSError"
    assert [(news.kind, news.count) for news in rig.breaker.news()] == [(kind, 1), (kind, 10)]
    assert rig.breaker.changed.is_set() and rig.breaker.news() == []
    assert [record.message.split(" so far")[0] for record in caplog.records if "reward failed" in record.message] == [
        f"reward failed ({kind}, 1",
        f"reward failed ({kind}, 10",
    ]


def test_failures_without_an_exception_differ_by_their_first_words():
    rig = Rig()
    late = [Score(failure="environment", detail=f"step did not return within {s} s") for s in (5, 6)]
    others = [Score(failure="environment", detail="done must be true"), Score(failure="timeout", detail="no score")]
    rig.breaker.played([*late, *others], is_call=False)
    kinds = [(news.kind, news.count) for news in rig.breaker.news()]
    assert kinds == [
        ("environment step did not return within", 1),
        ("environment done must be true", 1),
        ("timeout", 1),
    ]


def test_what_an_environment_scores_proves_nothing_of_a_teacher_and_leaves_the_circuit_as_it_is():
    rig, teacher = Rig(), Rig()
    teacher.breaker.teaches = True
    for one in (rig, teacher):
        one.loop.create_task(play(one.breaker))
        one.wait(20.0)
    assert (rig.health.worked, rig.health.failed, rig.health.failing_s) == (1, 2 * STREAK, 0.0)
    assert (teacher.health.worked, teacher.health.failed, teacher.health.failing_s) == (0, 2 * STREAK, 20.0)
    assert not rig.breaker.is_paused and rig.judge.calls == []


async def play(breaker: Breaker) -> None:
    boom = Score(failure="environment", detail="my_game.py:3: ValueError: boom")
    for _ in range(2 * STREAK):
        breaker.played([boom, boom], is_call=True)
        breaker.played([boom, boom], is_call=False)
    breaker.played([], is_call=False)
    breaker.played([boom, Score(value=0.0)], is_call=True)


def test_a_tally_tells_of_powers_of_ten_and_keeps_few_kinds():
    tally = Tally()
    assert [n for n in range(1, 1001) if tally.add("a") is not None] == [1, 10, 100, 1000]
    assert tally.add("b", 25) == 25 and tally.add("b", 224) is None and tally.add("b") == 250
    told = [tally.add(f"kind {n}") for n in range(1000)]
    assert len(tally._counts) == MAX_KINDS + 1 and REST in tally._counts
    assert sum(count is not None for count in told) < MAX_KINDS + 3
