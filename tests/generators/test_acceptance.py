"""The completions of a group: which are kept, which are sampled again, which are done without; and that this is unbiased."""

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.generators import rollout
from asyncgrpo.generators.rollout import (
    NO_REDUNDANCY,
    GroupInFlight,
    Launched,
    Redundancy,
    TooFewCompletions,
    choose,
    retry_seed,
)
from asyncgrpo.planner.clock import VirtualLoop
from asyncgrpo.rewards.base import Reward
from asyncgrpo.types import Completion, Group, Lease, PolicyVersion, Prompt, Sampling, Score, VersionSpan
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


def generated(
    lease: Lease,
    reward: Reward | None = None,
    redundancy: Redundancy = NO_REDUNDANCY,
    **engine,
) -> Group:
    """The group of a lease, on a virtual clock, by the fake engine at a token a second."""
    loop = VirtualLoop()  # type: ignore[abstract]
    fake = FakeEngine(seconds_per_token=1.0, **engine)

    async def work() -> Group:
        await fake.start(PolicyVersion(1, 0))
        group = await GroupInFlight(lease, fake, reward or Rewards(), str, redundancy).generate("g")
        assert not fake._requests, "a request is left behind"
        return group

    task = loop.create_task(work())
    loop.run_until(1e6)
    return task.result()


def indices(group: Group) -> list[int]:
    return [r.completion.index for r in group.rollouts]


def launched(group: Group) -> list[int]:
    """Place in the order of launch of each sampled completion that was not retried."""
    return [r.seed - SEED for r in group.rollouts]


def done(index: int, failure: str | None = None) -> Launched:
    empty = Completion(index, np.empty(0, np.int32), np.empty(0, np.float32), (), "stop")
    return Launched(index, completion=empty, score=Score(value=1.0) if failure is None else Score(failure=failure))


def chosen(completions: Sequence[Launched], wanted: int, **how) -> list[int] | None:
    found = choose(completions, wanted, **how)
    return None if found is None else [one.index for one in found]


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_first_n_in_order_of_launch_are_waited_for_whoever_finishes_first():
    assert chosen([done(0), Launched(1), done(2), done(3)], 2, is_late=False) is None
    assert chosen([done(0), done(1), Launched(2), done(3)], 2, is_late=False) == [0, 1]


def test_one_that_failed_makes_room_for_the_next_and_is_kept_by_name_where_there_is_none():
    assert chosen([done(0), done(1, "timeout"), Launched(2)], 2, is_late=False) is None
    assert chosen([done(0), done(1, "timeout"), done(2)], 2, is_late=False) == [0, 2]
    assert chosen([done(0), done(1, "timeout"), done(2, "timeout")], 2, is_late=False) == [0, 1]


def test_at_the_deadline_those_that_are_not_done_are_passed_over():
    assert chosen([Launched(0), done(1), Launched(2), done(3), done(4)], 2, is_late=True) == [1, 3]
    assert chosen([Launched(0), done(1), Launched(2)], 2, is_late=True) == [1]


# -- lengths -----------------------------------------------------------------------------------------------------------


class LongTail:
    """An engine whose completions have lognormal lengths, drawn from the seed of each; a token a second; no tokens kept."""

    version = PolicyVersion(1, 0)

    @staticmethod
    def length(seed: int) -> int:
        return max(1, round(random.Random(seed).lognormvariate(3.0, 1.0)))

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        self._aborted = asyncio.Event()
        left = {index: self.length(seed + index) for index in range(num_completions)}
        started_s = asyncio.get_running_loop().time()
        while left:
            index = min(left, key=lambda i: left[i])
            try:
                async with asyncio.timeout_at(started_s + left[index]):
                    await self._aborted.wait()
            except TimeoutError:
                yield self._completion(index, left.pop(index), "stop")
            else:
                ran = int(asyncio.get_running_loop().time() - started_s)
                for index in left:
                    yield self._completion(index, ran, "abort")
                return

    def _completion(self, index: int, length: int, reason) -> Completion:
        spans = (VersionSpan(self.version, 0, length),) if length else ()
        return Completion(index, np.zeros(length, np.int32), np.zeros(length, np.float32), spans, reason)

    async def abort(self, request_id: str) -> None:
        self._aborted.set()


def mean_length(num_groups: int, size: int, extra: int, cut_after_s: float | None) -> tuple[float, float, float]:
    """Mean length of what was kept, its standard error, and the share of completions that were cut."""
    lengths: list[int] = []
    cut = 0
    for number in range(num_groups):
        loop, lease = VirtualLoop(), make_lease(size, seed=1000 * number, cut_after_s=cut_after_s, min_completions=2)  # type: ignore[abstract]
        engine = LongTail()
        task = loop.create_task(GroupInFlight(lease, engine, Rewards(), str, Redundancy(0, extra)).generate("g"))  # type: ignore[arg-type]
        loop.run_until(1e6)
        group = task.result()
        kept = [len(r.completion.token_ids) for r in group.rollouts]
        assert kept == [LongTail.length(r.seed) for r in group.rollouts]
        lengths += kept
        cut += group.discarded.censored
        ran_s = group.timings["generate"]
        every = range(lease.seed, lease.seed + size + extra)
        sampled = sum(min(LongTail.length(seed), int(ran_s)) for seed in every)
        assert group.discarded.tokens == sampled - sum(kept), "every token is in the group or among the discarded"
    error = statistics.stdev(lengths) / len(lengths) ** 0.5
    return statistics.mean(lengths), error, cut / (num_groups * size)


TRUE_MEAN = statistics.mean(LongTail.length(10**9 + seed) for seed in range(50_000))


def test_what_is_kept_is_as_long_as_what_is_sampled_and_the_first_to_finish_are_not(monkeypatch: pytest.MonkeyPatch):
    mean, error, cut = mean_length(400, 6, 3, None)
    assert cut == 0 and abs(mean - TRUE_MEAN) < 3 * error, (mean, TRUE_MEAN, error)

    def first_finished(completions: Sequence[Launched], wanted: int, *, is_late: bool) -> list[Launched] | None:
        good = [one for one in completions if one.is_good]
        return good[:wanted] if len(good) >= wanted else choose(completions, wanted, is_late=is_late)

    monkeypatch.setattr(rollout, "choose", first_finished)
    biased, error, _ = mean_length(400, 6, 3, None)
    assert biased < 0.7 * TRUE_MEAN and biased < TRUE_MEAN - 10 * error, (biased, TRUE_MEAN, error)


def test_a_deadline_makes_what_is_kept_shorter_and_says_how_many_it_cut():
    mean, error, cut = mean_length(400, 6, 3, 60.0)
    assert mean < TRUE_MEAN - 5 * error
    expected = sum(LongTail.length(seed) > 60 for seed in range(50_000)) / 50_000
    assert cut == pytest.approx(expected, rel=0.25), "as many as are longer than the deadline"


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


def test_a_completion_that_the_engine_ended_is_sampled_again_alone_with_a_seed_of_its_own():
    plain = generated(make_lease())
    group = generated(make_lease(), redundancy=Redundancy(retries=1), injected_fault=once(1, "abort"))
    assert indices(group) == [0, 1, 2]
    assert [r.seed for r in group.rollouts] == [SEED, retry_seed(SEED, 1, 1), SEED + 2]
    assert [r.completion.finish_reason for r in group.rollouts] == ["length"] * 3
    tokens = [[r.completion.token_ids.tolist() for r in g.rollouts] for g in (plain, group)]
    assert tokens[0][0] == tokens[1][0] and tokens[0][2] == tokens[1][2], "the others were not sampled again"
    assert tokens[0][1] != tokens[1][1]
    assert (group.discarded.retried, group.discarded.tokens) == (1, 2)


def test_a_completion_whose_reward_failed_is_sampled_again_and_not_for_ever():
    timeout = Score(failure="timeout")
    group = generated(make_lease(), Rewards(timeout), Redundancy(retries=2))
    assert [r.score.failure for r in group.rollouts] == [None] * 3
    assert (group.discarded.retried, group.discarded.tokens) == (1, 8)
    group = generated(make_lease(1), Rewards(timeout, timeout, timeout, timeout), Redundancy(retries=2))
    assert [r.score.failure for r in group.rollouts] == ["timeout"] and group.discarded.retried == 2
    assert [r.seed for r in group.rollouts] == [retry_seed(SEED, 0, 2)]


def test_without_retries_the_group_has_the_failure_by_name():
    group = generated(make_lease(), injected_fault=once(1, "abort"))
    assert [r.score.failure for r in group.rollouts] == [None, "aborted", None]
    assert group.discarded.retried == group.discarded.tokens == 0


def test_what_no_other_completion_would_mend_is_not_tried_again():
    group = generated(make_lease(1), Rewards(Score(failure="unknown_source")), Redundancy(retries=5))
    assert group.discarded.retried == 0


def test_the_greedy_completion_is_retried_too_and_stays_greedy():
    lease = make_lease(with_greedy=True)
    plain = generated(lease).rollouts[-1]
    group = generated(lease, Rewards(*[Score(failure="crash")] * 4), Redundancy(retries=1))
    assert indices(group) == [0, 1, 2, 3] and group.discarded.retried == 4
    assert group.rollouts[-1].completion.token_ids.tolist() == plain.completion.token_ids.tolist()
    assert [r.score.failure for r in group.rollouts] == [None] * 4


def test_seeds_of_tries_do_not_meet():
    seeds = [retry_seed(SEED, index, tried) for index in range(1000) for tried in range(10)]
    assert len(set(seeds)) == len(seeds)


def test_an_evaluation_has_neither_reserve_nor_retries():
    timeout = Score(failure="timeout")
    group = generated(make_lease(1, purpose="eval"), Rewards(timeout), Redundancy(retries=3, extra=3))
    assert [r.score.failure for r in group.rollouts] == ["timeout"]
    assert group.discarded.retried == group.discarded.spare == 0


# -- the reserve and the deadline --------------------------------------------------------------------------------------


def test_the_reserve_takes_the_place_of_one_that_failed_and_is_aborted_where_it_is_not_needed():
    group = generated(make_lease(), redundancy=Redundancy(extra=2), injected_fault=once(1, "abort"))
    assert indices(group) == [0, 1, 2] and launched(group) == [0, 2, 3]
    assert (group.discarded.failed, group.discarded.spare, group.discarded.censored) == (1, 1, 0)
    assert group.discarded.tokens == 2 + 8


def test_a_completion_that_never_ends_is_cut_at_the_deadline_and_counted():
    stuck = once(1, "hang")
    group = generated(make_lease(cut_after_s=50.0), redundancy=Redundancy(extra=1), injected_fault=stuck)
    assert indices(group) == [0, 1, 2] and launched(group) == [0, 2, 3]
    assert (group.discarded.censored, group.discarded.spare, group.discarded.tokens) == (1, 0, 2)


def test_a_retry_that_is_cut_has_its_tokens_counted_once():
    def fate(completion: PendingCompletion, length: int) -> str | None:
        if completion.seed == SEED + 1 and length == 2:
            return "abort"
        return "hang" if completion.seed == retry_seed(SEED, 1, 1) and length == 3 else None

    lease = make_lease(cut_after_s=50.0, min_completions=2)
    group = generated(lease, redundancy=Redundancy(retries=1), injected_fault=fate)
    assert launched(group) == [0, 2]
    assert (group.discarded.retried, group.discarded.censored, group.discarded.tokens) == (1, 1, 2 + 3)


def test_a_retry_that_never_begins_leaves_nothing_behind():
    """It is given up while the engine has not sampled a token of it."""

    def fate(completion: PendingCompletion, length: int) -> str | None:
        if completion.seed == SEED + 1 and length == 2:
            return "abort"
        return "hang" if completion.seed == retry_seed(SEED, 1, 1) else None

    group = generated(
        make_lease(cut_after_s=50.0, min_completions=2), redundancy=Redundancy(retries=1), injected_fault=fate
    )
    assert group.discarded.tokens == 2


def test_a_smaller_group_is_delivered_at_the_deadline_if_it_is_large_enough():
    lease = make_lease(4, cut_after_s=50.0, min_completions=3)
    group = generated(lease, injected_fault=once(1, "hang"))
    assert indices(group) == [0, 1, 2] and launched(group) == [0, 2, 3]
    assert group.discarded.censored == 1
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
        generated(make_lease(prompt=Prompt(prompt_id="train/0", token_ids=(999,))), redundancy=Redundancy(retries=3))
    with pytest.raises(EngineError) as caught:
        generated(make_lease(), fail_after_tokens=5, redundancy=Redundancy(retries=3))
    assert not isinstance(caught.value, RequestError)
