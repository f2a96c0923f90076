"""From a lease to a group."""

import asyncio

import pytest

from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.generators.rollout import GivenUp, GroupInFlight
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling, Score
from tests.rewards.stubs import OneByOne


class LengthReward(OneByOne):
    """A completion's length."""

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        return Score(value=float(len(text)))


def make_lease(*, seed: int = 0, with_greedy: bool = True) -> Lease:
    return Lease(
        lease_id="1.0.0",
        group_id="1.0",
        attempt=0,
        prompt_index=0,
        purpose="train",
        prompt=Prompt(prompt_id="train/0", token_ids=(1, 2, 3)),
        num_completions=3,
        sampling=Sampling(max_tokens=8),
        seed=seed,
        with_greedy=with_greedy,
    )


async def started() -> FakeEngine:
    engine = FakeEngine()
    await engine.start(PolicyVersion(1, 0))
    return engine


async def completions(lease: Lease) -> dict[int, list[int]]:
    engine = await started()
    group = await GroupInFlight(lease, engine, LengthReward(), str).generate("g")
    await engine.close()
    return {r.completion.index: r.completion.token_ids.tolist() for r in group.rollouts}


async def test_a_lease_gives_its_completions_and_a_greedy_one_if_it_asks_that_does_not_depend_on_the_seed():
    first, second = await completions(make_lease(seed=0)), await completions(make_lease(seed=9))
    assert list(first) == [0, 1, 2, 3] and first[3] == second[3] and first[0] != second[0]
    assert list(await completions(make_lease(with_greedy=False))) == [0, 1, 2]


async def test_a_lease_that_is_given_up_leaves_no_request_behind():
    engine = await started()
    engine.seconds_per_token = 0.01
    group = GroupInFlight(make_lease(), engine, LengthReward(), str)
    task = asyncio.create_task(group.generate("g"))
    await asyncio.sleep(0.025)
    group.give_up()
    await asyncio.wait([task], timeout=1.0)
    with pytest.raises(GivenUp):
        task.result()
    assert not engine._requests and not group._requests, "no request is left behind"
    assert group.num_tokens >= 4, "two of each completion were sampled, and are counted"
    task = asyncio.create_task(GroupInFlight(make_lease(), engine, LengthReward(), str).generate("g"))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not engine._requests
    never = GroupInFlight(make_lease(), engine, LengthReward(), str)
    never.give_up()
    with pytest.raises(GivenUp):
        await never.generate("g")
    assert not engine._requests and never.num_tokens == 0
    await engine.close()
