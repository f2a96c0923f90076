"""A reward that takes groups is called once for a group: when all of it is sampled, or at its deadline."""

import asyncio

from asyncgrpo.generators.rollout import GroupInFlight
from asyncgrpo.types import Score
from tests.generators import test_acceptance as acceptance
from tests.generators.test_rollout import make_lease, started


class Ranks:
    """Scores a completion by its place in the call, after the failures that are given first; notes the calls."""

    takes_groups = True

    def __init__(self, *failures: Score) -> None:
        self.calls: list[int] = []
        self.failures = list(failures)

    async def score(self, prompt, completions):
        self.calls.append(len(completions))
        assert all(len(one.token_ids) > 0 for one in completions)
        await asyncio.sleep(0.01)
        return [self.failures.pop(0) if self.failures else Score(value=float(i)) for i in range(len(completions))]

    async def close(self) -> None: ...


async def test_all_completions_of_a_group_and_the_greedy_one_are_one_call():
    engine, reward = await started(), Ranks()
    group = await GroupInFlight(make_lease(), engine, reward, str).generate("g")
    assert reward.calls == [4]
    assert sorted(r.score.value for r in group.rollouts) == [0.0, 1.0, 2.0, 3.0]
    await engine.close()


async def test_a_reward_that_does_not_apply_is_not_asked_again():
    engine, reward = await started(), Ranks(*[Score(failure="not_applicable")] * 3)
    group = await GroupInFlight(make_lease(with_greedy=False), engine, reward, str).generate("g")
    assert reward.calls == [3] and {r.score.failure for r in group.rollouts} == {"not_applicable"}
    await engine.close()


async def test_a_call_that_failed_is_made_once_more_for_all_when_the_reward_works():
    engine, reward = await started(), Ranks(*[Score(failure="exception")] * 3)

    async def works() -> None: ...

    group = await GroupInFlight(make_lease(with_greedy=False), engine, reward, str, reward_works=works).generate("g")
    assert reward.calls == [3, 3] and [r.score.value for r in group.rollouts] == [0.0, 1.0, 2.0]
    await engine.close()


def test_at_the_deadline_those_that_are_sampled_are_scored_together():
    reward = Ranks()
    group = acceptance.generated(
        acceptance.make_lease(4, cut_after_s=50.0, min_completions=3), reward, injected_fault=acceptance.once(1, "hang")
    )
    assert acceptance.launched(group) == [0, 2, 3] and reward.calls == [3]
    assert [r.score.value for r in group.rollouts] == [0.0, 1.0, 2.0]


def test_a_completion_that_the_engine_ended_is_not_scored_also_if_it_ends_last():
    def ends_last(completion, length: int) -> str | None:
        return "abort" if completion.seed == acceptance.SEED and length == 7 else None

    reward = Ranks()
    group = acceptance.generated(acceptance.make_lease(), reward, injected_fault=ends_last)
    assert reward.calls == [2] and [r.score.failure for r in group.rollouts] == ["aborted", None, None]
