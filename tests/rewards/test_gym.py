"""The rule for rows of reasoning-gym, and which of its scorers may not run here."""

import inspect
import re

import pytest

from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.maths import EVALUATING, score_gym
from asyncgrpo.rewards.pool import Call
from asyncgrpo.rewards.rules import RuleReward
from tests.rewards.conftest import prompt

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra gym)")

SUM = {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 2, "size": 5, "seed": 0}, "index": 3}


def score(text: str, task: dict) -> float:
    row = prompt(answer="", source=f"reasoning-gym:{task['name']}", info={"reasoning_gym": task})
    return score_gym(Call(prompt=row, completions=(text,)))


def task_of(task: dict) -> dict:
    import reasoning_gym

    return reasoning_gym.create_dataset(task["name"], **task["parameters"])[task["index"]]


@pytest.mark.parametrize("name", ["chain_sum", "aiw", "knights_knaves", "mini_sudoku", "letter_counting"])
def test_the_right_answer_of_every_row_has_its_own_scorers_full_score(name):
    for index in range(3):
        task = {"name": name, "parameters": {"size": 3, "seed": 5}, "index": index}
        answer = task_of(task)["answer"]
        assert score(answer, task) == score(f"<think>x</think> <answer> {answer}\n</answer>", task) == 1.0
        assert score("<answer>nonsense</answer>", task) < 1.0


async def test_a_worker_scores_a_prompt_and_names_a_row_that_does_not_say_its_task():
    reward = RuleReward(RewardConfig(timeout_s=30))
    row = prompt(answer="", source="reasoning-gym:chain_sum", info={"reasoning_gym": SUM})
    try:
        right, wrong = await reward.score(row, [Sampled(task_of(SUM)["answer"]), Sampled("no number")])
        assert (right.value, wrong.value) == (1.0, 0.0)
        failure = await score_one(reward, prompt(source="reasoning-gym:chain_sum"), "1")
        assert failure.failure == "exception" and "does not name its task" in failure.detail
    finally:
        await reward.close()


def test_scorers_that_run_the_answer_as_code_are_refused_unless_that_is_allowed():
    sources = {"reasoning-gym:chain_sum", "reasoning-gym:countdown"}
    with pytest.raises(RewardError, match=r"reasoning-gym:countdown: .*runs answers as Python.*--unsafe-rewards"):
        RuleReward(RewardConfig()).check_sources(sources)
    RuleReward(RewardConfig(code=CodeRewardConfig(unsafe=True))).check_sources(sources)
    RuleReward(RewardConfig()).check_sources({"reasoning-gym:chain_sum"})


def test_every_scorer_of_this_release_that_evaluates_its_answer_is_known():
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (dataset, _) in DATASETS.items():
        scorer = inspect.getsource(dataset.score_answer)
        if re.search(r"(?<!literal_)\b(eval|exec|parse_expr|sympify)\((?!entry)", scorer):
            found.add(name)
    assert found == EVALUATING
