"""A group has all of its completions, failed ones by name; only its deadline leaves late ones out, and counts them."""

from collections.abc import Callable

import pytest

from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.generators.rollout import GroupInFlight, TooFewCompletions
from asyncgrpo.planner.stand_ins import VirtualLoop
from asyncgrpo.rewards.base import Reward
from asyncgrpo.types import Discarded, Group, Lease, PolicyVersion, Prompt, Sampling, Score
from tests.rewards.stubs import OneByOne

SEED = 7000


def make_lease(num_completions: int = 3, **fields) -> Lease:
    prompt = Prompt(prompt_id="train/0", token_ids=(1, 2, 3))
    settings = {"attempt": 0, "prompt_index": 0, "purpose": "train", "sampling": Sampling(max_tokens=8), "seed": SEED}
    return Lease(
        **{"lease_id": "1.0.0", "group_id": "1.0", "prompt": prompt, "num_completions": num_completions}
        | settings
        | fields
    )


class Rewards(OneByOne):
    """Scores a completion by its text; the scores given come first, whoever asks."""

    def __init__(self, *first: Score) -> None:
        self.first = list(first)

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        return self.first.pop(0) if self.first else Score(value=float(len(text)))


def generated(lease: Lease, reward: Reward | None = None, **engine) -> Group:
    """The group of a lease, on a virtual clock, by the fake engine at a token a second."""
    loop = VirtualLoop()  # type: ignore[abstract]
    fake = FakeEngine(seconds_per_token=1.0, **engine)

    async def work() -> Group:
        await fake.start(PolicyVersion(1, 0))
        group = await GroupInFlight(lease, fake, reward or Rewards(), str).generate("g")
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


# -- one completion that fails ---------------------------------------------------------------------------------------------


def once(index: int, what: str) -> Callable[[PendingCompletion, int], str | None]:
    """The first completion with this index meets its fate after two tokens."""
    met: list[PendingCompletion] = []

    def injected_fault(completion: PendingCompletion, length: int) -> str | None:
        if completion.index == index and len(completion.request.pending) > 1 and length == 2:
            met.append(completion)
            return what
        return None

    return injected_fault


def test_a_group_has_a_failed_completion_by_name():
    group = generated(make_lease(), injected_fault=once(1, "abort"))
    assert [r.score.failure for r in group.rollouts] == [None, "aborted", None]
    assert group.discarded == Discarded()


# -- the deadline ------------------------------------------------------------------------------------------------------


def test_a_smaller_group_is_delivered_at_the_deadline_if_it_is_large_enough():
    lease = make_lease(4, cut_after_s=50.0, min_completions=3)
    group = generated(lease, injected_fault=once(1, "hang"))
    assert indices(group) == [0, 1, 2] and launched(group) == [0, 2, 3]
    assert group.discarded == Discarded(tokens=2, censored=1), "every token is in the group or among the discarded"
    with pytest.raises(TooFewCompletions, match="2 of 4 completions were done after 50 s"):
        generated(lease, injected_fault=lambda completion, length: "hang" if completion.index < 2 else None)


def test_a_group_without_its_greedy_baseline_is_given_back():
    def greedy_hangs(completion: PendingCompletion, length: int) -> str | None:
        return "hang" if len(completion.request.pending) == 1 else None

    with pytest.raises(TooFewCompletions, match="not the greedy one"):
        generated(make_lease(4, cut_after_s=50.0, min_completions=3, with_greedy=True), injected_fault=greedy_hangs)


def test_a_lease_that_can_do_without_nothing_waits_past_the_cut():
    group = generated(make_lease(cut_after_s=3.0))
    assert indices(group) == [0, 1, 2] and group.timings["generate"] == 8.0


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_request_that_is_refused_is_not_a_failure_of_the_engine():
    with pytest.raises(RequestError, match="prompt token 999"):
        generated(make_lease(prompt=Prompt(prompt_id="train/0", token_ids=(999,))))
    with pytest.raises(EngineError) as caught:
        generated(make_lease(), fail_after_tokens=5)
    assert not isinstance(caught.value, RequestError)
