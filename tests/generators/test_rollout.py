"""From a lease to a group: it has all of its completions, failed ones by name; only its deadline leaves late ones out."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.generators.rollout import GivenUp, GroupInFlight, Played, TooFewCompletions
from asyncgrpo.rewards.base import Reward
from asyncgrpo.rewards.teacher import TaughtScore
from asyncgrpo.types import Discarded, Group, Lease, PolicyVersion, Prompt, Sampling, Score, TeacherLogprobs
from asyncgrpo.wire.codec import pack_group, unpack_group
from tests.engines.faulty import FaultyEngine
from tests.rewards.stubs import OneByOne
from tests.simulation.virtual import VirtualLoop

SEED = 7000


def make_lease(num_completions: int = 3, **fields) -> Lease:
    named = {"lease_id": "1.0.0", "group_id": "1.0", "attempt": 0, "prompt_index": 0, "purpose": "train", "seed": SEED}
    named |= {"prompt": Prompt(prompt_id="train/0", token_ids=(1, 2, 3)), "sampling": Sampling(max_tokens=8)}
    return Lease(**named | {"num_completions": num_completions} | fields)


class LengthReward(OneByOne):
    """A completion's length."""

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        return Score(value=float(len(text)))


def generated(lease: Lease, reward: Reward | None = None, kind: type[FakeEngine] = FaultyEngine, **engine) -> Group:
    """The group of a lease, on a virtual clock, by the fake engine at a token a second."""
    loop = VirtualLoop()  # type: ignore[abstract]
    fake = kind(seconds_per_token=1.0, **engine)

    async def works() -> None:
        """The reward works by then."""

    async def work() -> Group:
        await fake.start(PolicyVersion(1, 0))
        group = await GroupInFlight(lease, fake, reward or LengthReward(), str, reward_works=works).generate("g")
        assert not fake._requests, "a request is left behind"
        return group

    task = loop.create_task(work())
    loop.run_until(1e6)
    return task.result()


def indices(group: Group) -> list[int]:
    return [r.completion.index for r in group.rollouts]


def launched(group: Group) -> list[int]:
    """Position of each sampled completion in the order of launch."""
    return [r.seed - SEED for r in group.rollouts]


def once(index: int, what: str) -> Callable[[PendingCompletion, int], str | None]:
    """The completion with this index meets its fate after two tokens."""

    def injected_fault(completion: PendingCompletion, length: int) -> str | None:
        return what if completion.index == index and len(completion.request.pending) > 1 and length == 2 else None

    return injected_fault


def test_a_lease_gives_its_completions_and_a_greedy_one_if_it_asks_that_does_not_depend_on_the_seed():
    first, second = (generated(make_lease(seed=seed, with_greedy=True)).rollouts for seed in (0, 9))
    tokens = [[r.completion.token_ids.tolist() for r in rollouts] for rollouts in (first, second)]
    assert [r.completion.index for r in first] == [0, 1, 2, 3]
    assert tokens[0][3] == tokens[1][3] and tokens[0][0] != tokens[1][0]
    assert indices(generated(make_lease())) == [0, 1, 2]


async def test_a_lease_that_is_given_up_leaves_no_request_behind():
    def give_up_at_the_third_token(completion: PendingCompletion, length: int) -> None:
        if length == 2:
            group.give_up()

    engine = FaultyEngine(seconds_per_token=0.01, injected_fault=give_up_at_the_third_token)
    await engine.start(PolicyVersion(1, 0))
    group = GroupInFlight(make_lease(), engine, LengthReward(), str)
    task = asyncio.create_task(group.generate("g"))
    await asyncio.wait([task], timeout=10.0)
    with pytest.raises(GivenUp):
        task.result()
    assert not engine._requests and not group._requests
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


def test_a_request_that_is_refused_is_not_a_failure_of_the_engine():
    with pytest.raises(RequestError, match="prompt token 999"):
        generated(make_lease(prompt=Prompt(prompt_id="train/0", token_ids=(999,))))
    with pytest.raises(EngineError) as caught:
        generated(make_lease(), fail_after_tokens=5)
    assert not isinstance(caught.value, RequestError)


# -- the deadline ------------------------------------------------------------------------------------------------------


def test_a_smaller_group_is_delivered_at_the_deadline_if_it_is_large_enough():
    lease = make_lease(4, cut_after_s=50.0, min_completions=3)
    group = generated(lease, injected_fault=once(1, "hang"))
    assert indices(group) == [0, 1, 2] and launched(group) == [0, 2, 3]
    assert group.discarded == Discarded(tokens=2, censored=1), "every token is in the group or among the discarded"
    with pytest.raises(TooFewCompletions, match="2 of 4 completions were done after 50 s"):
        generated(lease, injected_fault=lambda completion, length: "hang" if completion.index < 2 else None)
    group = generated(make_lease(cut_after_s=3.0))
    assert indices(group) == [0, 1, 2] and group.timings["generate"] == 8.0, "it can do without nothing, and waits"


def test_a_group_without_its_greedy_baseline_is_given_back():
    def greedy_hangs(completion: PendingCompletion, length: int) -> str | None:
        return "hang" if len(completion.request.pending) == 1 else None

    with pytest.raises(TooFewCompletions, match="not the greedy one"):
        generated(make_lease(4, cut_after_s=50.0, min_completions=3, with_greedy=True), injected_fault=greedy_hangs)


# -- a teacher ---------------------------------------------------------------------------------------------------------


class Taught(Reward):
    """Log-probs of a teacher that are the lengths, and the score that the environment gave, or the length."""

    teaches = True

    async def score(self, prompt, completions):
        scores = [getattr(one.completion, "score", None) or Score(value=float(len(one.text))) for one in completions]
        lengths = [np.full(len(one.token_ids), -len(one.token_ids), np.float32) for one in completions]
        nothing = np.zeros((0, 0))
        taught = [TeacherLogprobs(one, nothing, nothing) for one in lengths]
        return [TaughtScore(value=one.value, teacher=teacher) for one, teacher in zip(scores, taught, strict=True)]


class ScoredByItsEnvironment(FakeEngine):
    """Completions have a score, the first one a failure."""

    async def generate(self, *request):
        async for one in super().generate(*request):
            yield Played(**vars(one), score=Score(value=7.0) if one.index else Score(failure="environment"))


@pytest.mark.parametrize("engine", [FakeEngine, ScoredByItsEnvironment])
def test_completions_keep_the_log_probs_of_the_teacher_also_those_that_their_environment_scored(engine):
    group = generated(make_lease(), Taught(), kind=engine)
    for rollout in group.rollouts:
        completion, score = rollout.completion, rollout.score
        assert type(score) is Score, "it is sent as any other"
        if engine is not FakeEngine and completion.index == 0:
            assert score.failure == "environment" and completion.teacher is None
        else:
            assert score.value == (len(str(completion.token_ids.tolist())) if engine is FakeEngine else 7.0)
            assert completion.teacher.sampled.tolist() == [-len(completion.token_ids)] * len(completion.token_ids)
    message, payload = pack_group(group)
    assert unpack_group(message, payload).rollouts[-1].completion.teacher is not None


# -- a reward that takes groups ----------------------------------------------------------------------------------------


class Ranks:
    """Scores a completion by its place in the call, after the failures that are given first; notes the calls."""

    takes_groups = True

    def __init__(self, *failures: str) -> None:
        self.calls: list[int] = []
        self.failures = list(failures)

    async def score(self, prompt, completions):
        self.calls.append(len(completions))
        assert all(len(one.token_ids) > 0 for one in completions)
        await asyncio.sleep(0.01)
        places = range(len(completions))
        return [Score(failure=self.failures.pop(0)) if self.failures else Score(value=float(i)) for i in places]

    async def close(self) -> None: ...


def values(group: Group) -> list[float | None]:
    return [r.score.value for r in group.rollouts]


def test_all_completions_of_a_group_and_the_greedy_one_are_one_call():
    reward = Ranks()
    group = generated(make_lease(with_greedy=True), reward)
    assert reward.calls == [4] and sorted(values(group)) == [0.0, 1.0, 2.0, 3.0]


def test_a_call_that_failed_is_made_once_more_for_all_when_the_reward_works_unless_it_does_not_apply():
    reward = Ranks(*["exception"] * 3)
    assert values(generated(make_lease(), reward)) == [0.0, 1.0, 2.0] and reward.calls == [3, 3]
    reward = Ranks(*["not_applicable"] * 3)
    group = generated(make_lease(), reward)
    assert reward.calls == [3] and {r.score.failure for r in group.rollouts} == {"not_applicable"}


def test_those_that_are_sampled_at_the_deadline_are_scored_together_and_one_that_the_engine_ended_is_not():
    reward, lease = Ranks(), make_lease(4, cut_after_s=50.0, min_completions=3)
    group = generated(lease, reward, injected_fault=once(1, "hang"))
    assert launched(group) == [0, 2, 3] and reward.calls == [3] and values(group) == [0.0, 1.0, 2.0]

    def ends_last(completion: PendingCompletion, length: int) -> str | None:
        return "abort" if completion.seed == SEED and length == 7 else None

    reward = Ranks()
    group = generated(make_lease(), reward, injected_fault=ends_last)
    assert reward.calls == [2] and [r.score.failure for r in group.rollouts] == ["aborted", None, None]
