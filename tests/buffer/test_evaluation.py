"""An evaluation ends with every prompt scored or counted as failed, and names the versions that sampled."""

import msgspec
import pytest

from asyncgrpo.algorithms.estimates import share_of
from asyncgrpo.buffer.evaluation import FREE_LOSSES, MAX_ATTEMPTS, Evaluations
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling, Score, VersionSpan
from asyncgrpo.wire.rollouts import Deliver, RolloutHeader

PROMPTS = tuple(Prompt(prompt_id=f"eval/{i}", token_ids=(i + 1,)) for i in range(3))


def make() -> Evaluations:
    return Evaluations(PROMPTS, Sampling(temperature=0.0), seed=0, lease_timeout_s=10.0)


def delivery_of(lease: Lease, value: float | None, version: int = 4) -> Deliver:
    header = RolloutHeader(
        index=0,
        num_tokens=2,
        spans=(VersionSpan(PolicyVersion(1, version), 0, 2),),
        finish_reason="stop",
        score=Score(failure="timeout") if value is None else Score(value=value),
    )
    return Deliver(
        group_id=lease.group_id,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        prompt_index=lease.prompt_index,
        purpose="eval",
        prompt=lease.prompt,
        rollouts=(header,),
        generator_id="g",
        timings={},
    )


def test_the_result_counts_every_prompt_and_names_the_versions():
    evaluations = make()
    evaluations.request(5, 0.0)
    leases = [evaluations.lease("g", 0.0) for _ in PROMPTS]
    assert [lease.prompt for lease in leases] == list(PROMPTS) and evaluations.lease("g", 0.0) is None
    assert evaluations.accept(delivery_of(leases[0], 1.0, 4), 1.0) is None
    assert evaluations.accept(delivery_of(leases[2], None, 5), 2.0) is None
    result = evaluations.accept(delivery_of(leases[1], 0.0, 6), 3.0)
    assert result is not None and not evaluations.in_flight
    assert (result.step, result.completions, result.reward_mean) == (5, 3, 0.5)
    assert (result.oldest, result.newest) == (PolicyVersion(1, 4), PolicyVersion(1, 6))
    assert result.failures == {"timeout": 1} and result.seconds == 3.0


def test_the_same_completion_twice_counts_once():
    evaluations = make()
    evaluations.request(0, 0.0)
    lease = evaluations.lease("g", 0.0)
    assert evaluations.accept(delivery_of(lease, 1.0), 1.0) is None
    assert evaluations.accept(delivery_of(lease, 1.0), 1.0) is None
    assert evaluations.held_by("g") == 0


def test_what_a_lost_generator_held_is_answered_by_another():
    evaluations = make()
    evaluations.request(0, 0.0)
    lost = evaluations.lease("lost", 0.0)
    assert evaluations.release("lost", 1.0) == []
    assert evaluations.lease("other", 1.0) == lost


def test_a_prompt_that_ends_every_generator_is_counted_as_failed_and_the_evaluation_ends():
    evaluations = make()
    evaluations.request(0, 0.0)
    others = [evaluations.lease("g", 0.0) for _ in PROMPTS][1:]
    for lease in others:
        evaluations.accept(delivery_of(lease, 1.0), 0.0)
    for ends in range(1, 20):
        results = evaluations.release("g", float(ends))
        if results:
            break
        assert evaluations.lease("g", float(ends)).prompt_index == 0
    assert ends == FREE_LOSSES + MAX_ATTEMPTS
    assert results[0].failures == {"generator_lost": 1} and results[0].completions == 2
    assert not evaluations.in_flight


def test_a_prompt_that_always_fails_or_is_late_is_counted_and_the_evaluation_ends():
    evaluations = make()
    evaluations.request(0, 0.0)
    result, now = None, 0.0
    for _ in range(len(PROMPTS)):
        lease = evaluations.lease("g", now)
        if lease.prompt_index:
            evaluations.accept(delivery_of(lease, 1.0), now)
    for _ in range(MAX_ATTEMPTS - 1):
        now += 11.0
        late, results = evaluations.expire(now)
        assert [lease.prompt_index for lease, _ in late] == [0] and results == []
        assert evaluations.lease("g", now).prompt_index == 0
    _, (result,) = evaluations.expire(now + 11.0)
    assert result.failures == {"lease_timeout": 1} and result.reward_mean == 1.0


def test_an_evaluation_of_which_nothing_was_answered_is_a_result_too():
    evaluations = make()
    evaluations.request(0, 0.0)
    results = []
    while not results:
        lease = evaluations.lease("g", 0.0)
        results += filter(None, [evaluations.fail(lease.lease_id, "failed", 5.0)])
    (result,) = results
    assert (result.completions, result.failures, result.seconds) == (0, {"failed": len(PROMPTS)}, 5.0)
    assert result.reward_mean is result.newest is result.completion_length_mean is None and not evaluations.in_flight


def test_an_answer_to_a_lease_of_another_start_answers_none_of_ours():
    before, evaluations = make(), Evaluations(PROMPTS, Sampling(temperature=0.0), 0, 10.0, lineage=2)
    for each in (before, evaluations):
        each.request(5, 0.0)
    late, ours = before.lease("g", 0.0), evaluations.lease("g", 0.0)
    assert late is not None and ours is not None
    assert evaluations.accept(delivery_of(late, 1.0), 1.0) is None and evaluations.held_by("g") == 1
    assert evaluations.accept(delivery_of(ours, 1.0), 1.0) is None and evaluations.held_by("g") == 0


# -- suites ------------------------------------------------------------------------------------------------------------

SUITES = (
    Prompt(prompt_id="gsm8k/0", token_ids=(1,), source="gsm8k"),
    Prompt(prompt_id="gsm8k/1", token_ids=(2,), source="gsm8k"),
    Prompt(prompt_id="qa/0", token_ids=(3,), source="qa"),
)


def answered(lease: Lease, *texts: str, right: str, version: int = 4) -> Deliver:
    """Completions with these texts. Those that contain `right` have a reward of 1, and the empty ones none."""
    rollouts = tuple(
        RolloutHeader(
            index=index,
            num_tokens=2,
            spans=(VersionSpan(PolicyVersion(1, version), 0, 2),),
            finish_reason="stop",
            score=Score(value=float(right in text), parts={"short": 0.5}) if text else Score(failure="timeout"),
            text=text,
        )
        for index, text in enumerate(texts)
    )
    return msgspec.structs.replace(delivery_of(lease, 1.0), rollouts=rollouts)


def test_each_suite_has_numbers_of_its_own_with_the_versions_that_sampled_it():
    kept = []
    evaluations = Evaluations(
        SUITES, Sampling(temperature=1.0), 7, 10.0, completions=4, keep=lambda step, groups: kept.append((step, groups))
    )
    evaluations.request(5, 0.0)
    first, second, third = (evaluations.lease("g", 0.0) for _ in SUITES)
    assert [lease.num_completions for lease in (first, second, third)] == [4, 4, 4]
    assert (first.seed, second.seed, third.seed) == (7, 11, 15), "no two completions have one seed"
    evaluations.accept(answered(first, "so \\boxed{8}", "#### 8", "#### 9", "#### 7", right="8"), 1.0)
    evaluations.accept(answered(third, "Answer: Paris", "answer: paris.", "Rome", "Rome", right="aris", version=6), 1.0)
    result = evaluations.accept(answered(second, "#### 1", "#### 1", "#### 1", "", right="2"), 2.0)
    assert (result.completions, result.failures) == (12, {"timeout": 1})
    assert result.reward_mean == pytest.approx(4 / 11)
    maths, qa = result.suites["gsm8k"], result.suites["qa"]
    assert (maths.prompts, maths.completions, maths.failures) == (2, 8, {"timeout": 1})
    assert {name: number[0] for name, number in maths.numbers.items()} == pytest.approx(
        {"reward": 2 / 7, "pass@1": 1 / 4, "pass@2": (5 / 6 + 0) / 2, "pass@4": 1.0, "maj@4": 1.0}
    ), "the prompt of which only three have a score takes no part in k = 4, and both spellings of 8 are one vote"
    assert qa.numbers["maj@4"][0] == 0.5, "two votes against two"
    assert qa.numbers["pass@1"] == pytest.approx((0.5, *share_of([0.5])[1:]))
    assert (maths.newest, qa.oldest) == (PolicyVersion(1, 4), PolicyVersion(1, 6))
    assert maths.parts == {"short": 0.5}
    assert [(step, [group.prompt.prompt_id for group in groups]) for step, groups in kept] == [
        (5, ["gsm8k/0", "qa/0", "gsm8k/1"])
    ]


def test_a_reward_counts_as_success_from_the_threshold_on():
    evaluations = Evaluations(SUITES[:1], Sampling(), 0, 10.0, success=0.5)
    evaluations.request(0, 0.0)
    (suite,) = evaluations.accept(delivery_of(evaluations.lease("g", 0.0), 0.5), 1.0).suites.values()
    assert suite.numbers["pass@1"][0] == 1.0 and suite.numbers["reward"] == (0.5, None, None)


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
