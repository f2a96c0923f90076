"""Every source has its rule, or is refused by name before the run starts; the page of rewards shows each as it is."""

import re
from pathlib import Path

import pytest

from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.rules import (
    CODE_SOURCES,
    MATHS_SOURCES,
    SHAPE_RULES,
    TEXT_RULES,
    RuleReward,
    exact_match,
    label_match,
    text_match,
    token_f1,
)
from tests.rewards.conftest import prompt, workers_of

MATHS = ["math_reasoning", "openai/gsm8k", "math_dapo", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]
TEXT = ["qa", "trivia", "qa_zh", "searchR1_nq", "classification", "exact_match"]


@pytest.fixture
def rules():
    return RuleReward(RewardConfig(timeout_s=30))


@pytest.mark.parametrize("source", ["", "mathqa", "my_data", "democracy"])
def test_an_unknown_source_is_refused_with_the_known_ones(rules, source):
    rules.check_sources({*MATHS, *TEXT, "demo_reverse"})
    with pytest.raises(RewardError, match=rf"data_source '{source}'; known: .*gsm8k.*qa.*--reward-func"):
        rules.check_sources({source, "gsm8k"})


async def test_an_unknown_source_at_run_time_is_a_named_failure(rules):
    score = await score_one(rules, prompt(source="my_data"), "42")
    assert (score.value, score.failure) == (None, "unknown_source")
    assert "'my_data'" in score.detail


async def test_mathematics_runs_in_a_worker_and_the_rest_does_not():
    rules = build_reward(RewardConfig(timeout_s=30))
    assert isinstance(rules, RuleReward)
    for source in TEXT:
        assert (await score_one(rules, prompt(source=source, answer="Paris"), "Paris")).value == 1.0
    assert workers_of() == []
    assert (await score_one(rules, prompt(source="gsm8k"), "15 + 27 = 42")).value == 1.0
    assert (await score_one(rules, prompt(source="math"), r"\boxed{43}")).value == 0.0
    assert len(workers_of()) == 1
    missing = await score_one(rules, prompt(source="math", answer=None), "42")
    assert (missing.failure, missing.detail) == ("exception", "the row has no ground truth")
    await rules.close()
    assert workers_of() == []


@pytest.mark.parametrize(
    ("rule", "completion_text", "ground_truth", "value"),
    [
        (text_match, "The capital of France is Paris.", "Paris", 1.0),
        (text_match, "It was long.\nParis", ["London", "Paris"], 1.0),
        (text_match, "<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
        (text_match, "<answer>London</answer> Paris", "Paris", 0.0),
        (text_match, "**Answer:** Paris.", "Paris", 1.0),
        (text_match, "Answer: not Paris", "Paris", 0.0),
        (text_match, "答案是巴黎。", "巴黎", 1.0),
        (text_match, "Parisian", "Paris", 0.0),
        (text_match, "The answer is A.", "A", 1.0),
        (text_match, "B is a dog.", "A", 0.0),
        (text_match, "Café", "cafe\u0301", 1.0),
        (text_match, "Answer: Rome\nNo.\nAnswer: Paris\nDone.", "Paris", 1.0),
        (text_match, r"\boxed{Paris}, not Rome. Answer: Rome", "Paris", 1.0),
        (label_match, "positive", "Positive", 1.0),
        (label_match, "I read it.\n Positive.\n", "positive", 1.0),
        (label_match, "类别：体育", "体育", 1.0),
        (label_match, "not positive", "positive", 0.0),
        (label_match, "Answer: A.", "A", 1.0),
        (label_match, "", "A", 0.0),
        (label_match, "Answer: the", "A", 0.0),
        (label_match, "!", "?", 0.0),
        (label_match, "-1", "1", 0.0),
        (label_match, "−1", "-1", 1.0),
        (text_match, "<answer></answer>", "A", 0.0),
        (text_match, "In 1990-1995.", "1990 1995", 1.0),
        (token_f1, "(A)", "a", 1.0),
        (exact_match, " a b\n", "a b", 1.0),
        (exact_match, "A b", "a b", 0.0),
        (token_f1, "I think so.\nThe city of Paris", "Paris, the city", 0.8),  # 2 of {city, of, paris} and of {paris, city}
        (token_f1, "<answer>New York</answer> Boston", ["Boston", "New York City"], 0.8),
        (token_f1, "paris paris", "Paris", 2 / 3),
        (token_f1, "答案是北京", "北京市", 0.8),
    ],
)  # fmt: skip
def test_a_rule_of_texts(rule, completion_text, ground_truth, value):
    assert rule(completion_text, ground_truth) == pytest.approx(value)


async def test_a_question_has_a_match_and_an_f1_and_the_configuration_says_which_is_the_score():
    row = prompt(source="trivia_qa", answer="Paris, the city")
    for name, value in (("match", 0.0), ("f1", 0.8)):
        reward = build_reward(RewardConfig(qa_score=name))
        score = await score_one(reward, row, "The city of Paris")
        assert score.value == pytest.approx(value) and score.parts == {"match": 0.0, "f1": pytest.approx(0.8)}


async def test_a_wrong_answer_of_gsm8k_in_the_right_format_has_the_score_of_the_configuration():
    reward = build_reward(RewardConfig(format_score=0.25, timeout_s=30))
    texts = ["#### 42", "#### 41", "it is 42", "it is 41", ""]
    scores = [await score_one(reward, prompt(source="openai/gsm8k"), text) for text in texts]
    assert [score.value for score in scores] == [1.0, 0.25, 1.0, 0.0, 0.0]
    assert [tuple(score.parts.values()) for score in scores] == [(1, 1), (0, 1), (1, 0), (0, 0), (0, 0)]
    assert list(scores[0].parts) == ["correct", "format"]
    await reward.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("again", ["<answer>", r"\boxed{", "{", "answer: ", "</think>", "答案是"])
def test_rules_that_run_in_the_generator_take_a_moment_for_a_text_that_repeats_itself(again):
    """Minutes, if their time grew with the square of the length."""
    text = "answer" + again * (2**18 // len(again))
    assert text_match(text, "Paris") == token_f1(text, "Paris") == label_match(text, "Paris") == 0.0
    assert all(rule(Sampled(text)) == 0.0 for rule in SHAPE_RULES.values())


GOOD = "<think>15 + 27</think><answer>42</answer>"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (GOOD, {"format", "think_format"}),
        (f"\n{GOOD}\n".replace("</think>", "\n</think>\n\n"), {"format", "think_format"}),
        (GOOD.removeprefix("<think>"), {"format", "think_format"}),
        ("<think></think><answer>42</answer>", {"format", "think_format"}),
        ("<think>15 + 27</think> It is 42.", {"think_format"}),
        (r"<think>15 + 27</think> \boxed{42}", {"think_format", "boxed_format"}),
        (GOOD + GOOD, set()),
        ("<think><think>x</think><answer>42</answer>", set()),
        ("<think>x</think><answer> </answer>", {"think_format"}),
        ("<think>15 + 27 = 42", set()),
        ("", set()),
    ],
)
def test_the_shape_of_a_completion(text, rules):
    shapes = [name for name in SHAPE_RULES if name != "length"]
    assert {name for name in shapes if SHAPE_RULES[name](Sampled(text)) == 1.0} == rules


@pytest.mark.parametrize("rule", [exact_match, text_match, label_match])
@pytest.mark.parametrize("missing", [None, "", [], {}])
def test_a_row_without_ground_truth_is_no_wrong_answer(rule, missing):
    with pytest.raises(RewardError, match="no ground truth"):
        rule("Paris", missing)


# -- docs/rewards.md ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (?:`([^`]+)`)? ?\| ([\d.]+) \|$", PAGE, re.MULTILINE)


async def test_every_example_has_its_score():
    assert len(EXAMPLES) == 10
    code = CodeRewardConfig(unsafe=True)  # the code is ours
    rewards = {
        name: build_reward(RewardConfig(function=name, timeout_s=30, code=code))
        for name in {row[0] for row in EXAMPLES}
    }
    for name, completion, truth, score in EXAMPLES:
        assert (await score_one(rewards[name], prompt(answer=truth, source="any"), completion)).value == float(score)
    for reward in rewards.values():
        await reward.close()


@pytest.mark.parametrize("name", [*MATHS_SOURCES, *CODE_SOURCES, *TEXT_RULES, *SHAPE_RULES])
def test_every_built_in_reward_is_in_a_table(name):
    assert re.search(rf"^\|[^|]*`{re.escape(name)}`", PAGE, re.MULTILINE)
