"""Every source has its rule, or is refused by name before the run starts."""

import pytest

from asyncgrpo.config.schema import RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards import build_reward
from asyncgrpo.rewards.rules import RuleReward, exact_match, label_match, text_match
from tests.rewards.conftest import prompt, workers_of

MATHS = [
    "math_reasoning",
    "gsm8k",
    "openai/gsm8k",
    "math",
    "math_dapo",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "aime2024",
]
TEXT = ["qa", "trivia", "qa_zh", "searchR1_nq", "classification", "exact_match"]


@pytest.fixture
def rules():
    return RuleReward(timeout_s=30, workers=1, extra_rules={"demo/reverse": lambda text, truth: float(text == truth)})


def test_known_sources_pass(rules):
    rules.check_sources({*MATHS, *TEXT, "demo/reverse"})


@pytest.mark.parametrize("source", ["", "mathqa", "my_data", "demo/sort"])
def test_an_unknown_source_is_refused_with_the_known_ones(rules, source):
    with pytest.raises(RewardError, match=rf"data_source '{source}'; known: .*gsm8k.*qa.*--reward-func"):
        rules.check_sources({source, "gsm8k"})


@pytest.mark.parametrize("source", ["code", "code_generation", "codecontests"])
def test_code_is_refused_with_the_reason(rules, source):
    with pytest.raises(RewardError, match="sandbox"):
        rules.check_sources({source})


async def test_an_unknown_source_at_run_time_is_a_named_failure(rules):
    score = await rules.score(prompt(source="my_data"), "42")
    assert (score.value, score.failure) == (None, "unknown_source")
    assert "'my_data'" in score.detail
    assert (await rules.score(prompt(source="code"), "print()")).failure == "unknown_source"


async def test_mathematics_runs_in_a_worker_and_the_rest_does_not():
    rules = build_reward(RewardConfig(timeout_s=30))
    assert isinstance(rules, RuleReward)
    for source in TEXT:
        assert (await rules.score(prompt(source=source, answer="Paris"), "Paris")).value == 1.0
    assert workers_of() == []
    assert (await rules.score(prompt(source="gsm8k"), "15 + 27 = 42")).value == 1.0
    assert (await rules.score(prompt(source="math"), r"\boxed{43}")).value == 0.0
    assert len(workers_of()) == 1
    missing = await rules.score(prompt(source="math", answer=None), "42")
    assert (missing.failure, missing.detail) == ("exception", "the row has no ground truth")
    await rules.close()
    assert workers_of() == []


async def test_a_tower_of_powers_is_a_timeout_and_not_a_wrong_answer():
    rules = RuleReward(timeout_s=0.5, workers=1)
    score = await rules.score(prompt(source="math"), r"\boxed{9^{9^{9^{9}}}}")
    assert (score.value, score.failure) == (None, "timeout")
    await rules.close()


async def test_an_extra_rule_that_fails_is_named(rules):
    reward = build_reward(
        RewardConfig(), extra_rules={"broken": lambda text, truth: 1 / 0, "text": lambda text, truth: truth}
    )
    assert (await reward.score(prompt(source="broken"), "")).failure == "exception"
    assert (await reward.score(prompt(source="text"), "")).failure == "bad_type"
    assert (await rules.score(prompt(source="demo/reverse", answer="cba"), "cba")).value == 1.0


@pytest.mark.parametrize(
    ("completion_text", "ground_truth", "value"),
    [
        ("The capital of France is Paris.", "Paris", 1.0),
        ("the PARIS!", "Paris", 1.0),
        ("It was long.\nParis", ["London", "Paris"], 1.0),
        ("<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
        ("<answer>London</answer> Paris", "Paris", 0.0),
        (r"\boxed{Paris}", "paris", 1.0),
        ("**Answer:** Paris.", "Paris", 1.0),
        ("Answer: not Paris", "Paris", 0.0),
        ("答案是巴黎。", "巴黎", 1.0),
        ("我认为首都是巴黎市", "巴黎", 1.0),
        ("Parisian", "Paris", 0.0),
        ("Paris\nor London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("Café", "cafe\u0301", 1.0),
        ("1969", 1969, 1.0),
    ],
)
def test_text_match(completion_text, ground_truth, value):
    assert text_match(completion_text, ground_truth) == value


@pytest.mark.parametrize(
    ("completion_text", "ground_truth", "value"),
    [
        ("positive", "Positive", 1.0),
        ("I read it.\n Positive.\n", "positive", 1.0),
        ("Label: positive", "positive", 1.0),
        ("类别：体育", "体育", 1.0),
        ("not positive", "positive", 0.0),
        ("3", 3, 1.0),
    ],
)
def test_label_match(completion_text, ground_truth, value):
    assert label_match(completion_text, ground_truth) == value


def test_exact_match_counts_everything_but_blanks_around():
    assert exact_match(" a b\n", "a b") == 1.0
    assert exact_match("A b", "a b") == 0.0


@pytest.mark.parametrize("rule", [exact_match, text_match, label_match])
@pytest.mark.parametrize("missing", [None, "", [], {}])
def test_a_row_without_ground_truth_is_no_wrong_answer(rule, missing):
    with pytest.raises(RewardError, match="no ground truth"):
        rule("Paris", missing)
