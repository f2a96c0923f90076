"""An evaluation ends with every prompt scored or counted as failed, and names the versions that sampled."""

import pytest
from msgspec.structs import replace

from asyncgrpo.buffer import evaluation
from asyncgrpo.buffer.evaluation import (
    MAX_ATTEMPTS,
    Evaluations,
    majority,
    mean_of,
    share_of,
)
from asyncgrpo.rewards import rules
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling, Score
from asyncgrpo.wire.rollouts import Deliver
from tests.buffer.test_buffer import deliver

PROMPTS = tuple(Prompt(prompt_id=f"eval/{i}", token_ids=(i + 1,)) for i in range(3))


def make() -> Evaluations:
    return Evaluations(PROMPTS, Sampling(temperature=0.0), seed=0, lease_timeout_s=10.0)


def delivery_of(lease: Lease, value: float | None, version: int = 4) -> Deliver:
    return answered(lease, "x" if value is not None else "", value=value or 0.0, version=version)


def answered(lease: Lease, *texts: str, right: str = "", value: float = 1.0, version: int = 4) -> Deliver:
    """Completions with these texts. Those that contain `right` have a reward of `value`, and the empty ones none."""
    scores = [Score(value=value * (right in text), parts={"short": 0.5}) if text else None for text in texts]
    return deliver(lease, version, scores, tokens=2, texts=texts, purpose="eval")


def test_the_result_counts_every_prompt_and_names_the_versions():
    evaluations = make()
    evaluations.request(5, 0.0)
    leases = [evaluations.lease("g", 0.0) for _ in PROMPTS]
    assert [lease.prompt for lease in leases] == list(PROMPTS) and evaluations.lease("g", 0.0) is None
    for _ in range(2):  # the same completion twice counts once
        evaluations.accept(delivery_of(leases[0], 1.0, 4), 1.0)
    assert evaluations.held_by("g") == 2
    evaluations.accept(delivery_of(leases[2], None, 5), 2.0)
    assert evaluations.take_finished() == () and evaluations.in_flight
    evaluations.accept(delivery_of(leases[1], 0.0, 6), 3.0)
    (result,) = evaluations.take_finished()
    assert evaluations.take_finished() == () and not evaluations.in_flight
    assert (result.step, result.completions, result.reward_mean) == (5, 3, 0.5)
    assert (result.oldest, result.newest) == (PolicyVersion(1, 4), PolicyVersion(1, 6))
    assert result.failures == {"timeout": 1} and result.seconds == 3.0


def test_evaluations_that_ended_since_the_last_reply_are_in_the_order_of_their_steps():
    evaluations = make()
    evaluations.request(5, 0.0)
    late = [evaluations.lease("g", 0.0) for _ in PROMPTS]
    evaluations.request(6, 1.0)
    for lease in [*(evaluations.lease("g", 1.0) for _ in PROMPTS), *late]:
        evaluations.accept(delivery_of(lease, 1.0), 2.0)
    assert [result.step for result in evaluations.take_finished()] == [5, 6]


def test_a_prompt_that_always_fails_or_is_late_or_ends_its_generator_is_counted_and_the_evaluation_ends():
    evaluations = make()
    evaluations.request(0, 0.0)
    now = 0.0
    for _ in range(len(PROMPTS)):
        lease = evaluations.lease("g", now)
        if lease.prompt_index:
            evaluations.accept(delivery_of(lease, 1.0), now)
    evaluations.release("g", now)
    assert evaluations.lease("g", now).prompt_index == 0
    for _ in range(MAX_ATTEMPTS - 2):
        now += 11.0
        assert [lease.prompt_index for lease, _ in evaluations.expire(now)] == [0]
        assert evaluations.take_finished() == ()
        assert evaluations.lease("g", now).prompt_index == 0
    evaluations.expire(now + 11.0)
    (result,) = evaluations.take_finished()
    assert result.failures == {"lease_timeout": 1} and result.reward_mean == 1.0
    evaluations.request(1, now)
    while evaluations.in_flight:
        evaluations.fail(evaluations.lease("g", now).lease_id, "failed", now + 5.0)
    (result,) = evaluations.take_finished()  # nothing was answered
    assert (result.completions, result.failures, result.seconds) == (0, {"failed": len(PROMPTS)}, 5.0)
    assert result.reward_mean is result.newest is result.completion_length_mean is None and not evaluations.in_flight


# -- suites ------------------------------------------------------------------------------------------------------------

SUITES = (
    Prompt(prompt_id="gsm8k/0", token_ids=(1,), source="gsm8k"),
    Prompt(prompt_id="gsm8k/1", token_ids=(2,), source="gsm8k"),
    Prompt(prompt_id="qa/0", token_ids=(3,), source="qa"),
)


def test_each_suite_has_numbers_of_its_own_with_the_versions_that_sampled_it():
    kept = []
    evaluations = Evaluations(
        SUITES, Sampling(), 7, 10.0, completions=4, keep=lambda step, groups: kept.append((step, groups)), success=0.5
    )
    evaluations.request(5, 0.0)
    first, second, third = (evaluations.lease("g", 0.0) for _ in SUITES)
    assert [lease.num_completions for lease in (first, second, third)] == [4, 4, 4]
    assert (first.seed, second.seed, third.seed) == (7, 11, 15), "no two completions have one seed"
    evaluations.accept(answered(first, "so \\boxed{8}", "#### 8", "#### 9", "#### 7", right="8"), 1.0)
    evaluations.accept(
        answered(third, "Answer: Paris", "answer: paris.", "Rome", "Rome", right="aris", value=0.5, version=6), 1.0
    )
    evaluations.accept(answered(second, "#### 1", "#### 1", "#### 1", "", right="2"), 2.0)
    (result,) = evaluations.take_finished()
    assert (result.completions, result.failures) == (12, {"timeout": 1})
    assert result.reward_mean == pytest.approx(3 / 11)
    maths, qa = result.suites["gsm8k"], result.suites["qa"]
    assert (maths.prompts, maths.completions, maths.failures) == (2, 8, {"timeout": 1})
    assert {name: number[0] for name, number in maths.numbers.items()} == pytest.approx(
        {"reward": 2 / 7, "pass@1": 1 / 4, "pass@2": (5 / 6 + 0) / 2, "pass@4": 1.0, "maj@4": 0.5}
    ), "the prompt of which only three have a score takes no part in pass@4, and both spellings of 8 are one vote"
    assert qa.numbers["maj@4"][0] == 0.5, "two votes against two"
    assert qa.numbers["pass@1"] == pytest.approx((0.5, *share_of([0.5])[1:])), "a reward at the threshold is a success"
    assert qa.numbers["reward"] == (0.25, None, None)
    assert (maths.newest, qa.oldest) == (PolicyVersion(1, 4), PolicyVersion(1, 6))
    assert maths.parts == {"short": 0.5}
    assert [(step, [group.prompt.prompt_id for group in groups]) for step, groups in kept] == [
        (5, ["gsm8k/0", "qa/0", "gsm8k/1"])
    ]


def test_a_prompt_that_only_awaits_its_score_takes_no_place():
    evaluations = make()
    evaluations.request(0, 0.0)
    first = evaluations.lease("g", 0.0)
    evaluations.lease("g", 0.0)
    evaluations.awaits_scores("other", first.lease_id)
    assert evaluations.sampled_by("g") == 2, "it is not its own"
    evaluations.awaits_scores("g", first.lease_id)
    assert (evaluations.held_by("g"), evaluations.sampled_by("g")) == (2, 1)
    evaluations.give_back(first.lease_id)
    assert evaluations.lease("g", 1.0) == first
    assert evaluations.sampled_by("g") == 2, "it is sampled anew"


def test_what_an_environment_replied_is_no_vote_and_each_vote_is_found_once(monkeypatch):
    read = []

    def vote_of(text: str, source: str) -> str:
        read.append(text)
        return rules.vote_of(text, source)

    monkeypatch.setattr(evaluation, "vote_of", vote_of)
    evaluations = Evaluations(SUITES[2:], Sampling(), 7, 10.0, completions=5)
    evaluations.request(0, 0.0)
    texts = [f"where?Answer: {found}Oslo" for found in ("Rome", "Bern", "Kyiv")]
    message = answered(evaluations.lease("g", 0.0), *texts, "Paris", "Paris", right="Oslo")
    rollouts = [replace(one, sampled_text="where?\nOslo" if "Oslo" in one.text else "") for one in message.rollouts]
    evaluations.accept(replace(message, rollouts=tuple(rollouts)), 1.0)
    (result,) = evaluations.take_finished()
    assert result.suites["qa"].numbers["maj@5"][0] == result.numbers["maj@5"][0] == 1.0
    assert read == [*["where?\nOslo"] * 3, "Paris", "Paris"]


# -- pass@k, maj@n and intervals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "is_right", "share"),
    [("aab", "yyn", 1.0), ("abb", "ynn", 0.0), ("aabb", "yynn", 0.5), ("aaa", "yyn", 2 / 3), ("abc", "ynn", 1 / 3)],
)
def test_tied_votes_and_votes_that_are_right_in_part_count_with_their_share(votes, is_right, share):
    assert majority(list(votes), [one == "y" for one in is_right]) == pytest.approx(share)


def test_an_interval_is_there_where_all_prompts_agree_and_none_for_one_prompt():
    assert share_of([1.0] * 20) == pytest.approx((1.0, 0.8389, 1.0), abs=1e-4)
    assert share_of([0.0] * 20) == pytest.approx((0.0, 0.0, 0.1611), abs=1e-4)
    assert share_of([1.0] * 6 + [0.0] * 14) == pytest.approx((0.3, 0.1455, 0.5190), abs=1e-4)
    assert mean_of([[3.0]]) == (3.0, None, None)
    assert mean_of([[1.0, 1.0], [3.0, 3.0]]) == pytest.approx((2.0, 2 - 1.96, 2 + 1.96), abs=1e-3)
