"""Each common form of a reward function is recognised by its parameters, called as its project calls it, and told."""

import asyncio

import pytest

from asyncgrpo.config.schema import DataConfig, RewardConfig
from asyncgrpo.data.rows import recognise
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one, scores_of_call
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.pool import call_of
from asyncgrpo.rewards.user import load_user_function
from asyncgrpo.types import Prompt
from tests.rewards.conftest import prompt

pytestmark = pytest.mark.usefixtures("_imports_are_put_back")
TURNS = ({"role": "user", "content": "6 * 7?"},)
INFO = {"level": 3, "split": "train"}
ANSWERS = [Sampled("it is 42", [5, 6]), Sampled("41", [7])]
TEXT = prompt(source="gsm8k", info=INFO, text="6 * 7?")
CHAT = prompt(source="gsm8k", info=INFO, turns=TURNS)


@pytest.fixture
def seen(reward_file):
    """What a function with these parameters is given for two completions of a prompt."""

    def call(parameters: str, of: Prompt = TEXT):
        names = ", ".join(part.split("=")[0].strip(" *") for part in parameters.split(","))
        function = load_user_function(reward_file(f"def f({parameters}):\n    return ({names},)", "f.py") + ":f")
        assert function.takes_groups
        return function(call_of(of, ANSWERS, is_group=True))

    return call


def test_trl_gives_texts_where_the_prompt_is_a_text_and_turns_where_it_is_a_chat(seen, reward_file):
    assert seen("prompts, completions") == (["6 * 7?"] * 2, ["it is 42", "41"])
    turns = [[{"role": "assistant", "content": text}] for text in ("it is 42", "41")]
    assert seen("prompts, completions", CHAT) == ([list(TURNS)] * 2, turns)
    by_keyword = load_user_function(reward_file("def compute_score(prompt): return prompt"))
    assert by_keyword(call_of(TEXT, ANSWERS[:1])) == by_keyword(call_of(CHAT, ANSWERS[:1])) == "6 * 7?"


def test_trl_gives_each_column_and_the_token_ids_for_each_completion(seen):
    assert seen("completions, level") == (["it is 42", "41"], [3, 3])
    assert seen("completions, ground_truth, data_source") == (["it is 42", "41"], ["42", "42"], ["gsm8k"] * 2)
    assert seen("completion_ids, **kwargs")[0] == [[5, 6], [7]]
    (kwargs,) = seen("completions, **kwargs")[1:]
    assert kwargs["prompts"] == ["6 * 7?"] * 2 and kwargs["split"] == ["train"] * 2 and kwargs["answer"] == ["42"] * 2
    assert "completions" not in kwargs


def test_a_column_that_the_row_does_not_have_is_its_default_or_named(seen):
    assert seen("completions, hints=None")[1] is None
    with pytest.raises(RewardError, match=r"no column hints, which the function takes"):
        seen("completions, hints")


def test_verls_batch_form_gives_a_list_of_each(seen):
    everything = (["gsm8k"] * 2, ["it is 42", "41"], ["42"] * 2, [INFO] * 2)
    assert seen("data_sources, solution_strs, ground_truths, extra_infos") == everything
    assert seen("solution_strs, ground_truths") == everything[1:3]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"prompt": "6 * 7?", "solution": "42", "difficulty": 2}], {}),  # TRL
        ([{"prompt": "6 * 7?", "ground_truth": "42", "data_source": "gsm8k", "difficulty": 2}], {}),  # the plain one
        ([{"question": "6 * 7?", "answer": "42", "info": {"difficulty": 2}}], {}),  # verifiers
        ([{"prompt": [*TURNS], "reward_model": {"ground_truth": "42"}, "extra_info": {"difficulty": 2}}], {}),  # verl
        ([{"prompt": [*TURNS], "reward_spec": {"ground_truth": "42"}, "extra_info": {"difficulty": 2}}], {}),  # SkyRL
        ([{"input": "6 * 7?", "label": "42", "difficulty": 2}], {"prompt": "input", "answer": "label"}),
    ],
)
@pytest.mark.parametrize("answer", ["ground_truth", "answer", "solution"])
def test_the_columns_of_every_schema_reach_trls_functions(seen, rows, columns, answer):
    record = recognise(rows, DataConfig(train="", columns=columns).columns, "f.jsonl").to_record(rows[0], 0)
    row = Prompt(prompt_id="train/0", token_ids=(1,), answer=record.answer, source=record.source, info=record.info)
    assert seen(f"completions, {answer}, difficulty", row)[1:] == (["42", "42"], [2, 2])
    if columns:
        assert seen("completions, label", row)[1] == ["42", "42"]


@pytest.mark.parametrize(
    ("returned", "scores"),
    [
        ([1.0, None], [(1.0, None), (None, "not_applicable")]),
        ([1, {"score": 0.5, "has_number": True}], [(1.0, None), (0.5, None)]),
        ([float("nan"), "high"], [(None, "not_finite"), (None, "bad_type")]),
        ([1.0], [(None, "bad_type")] * 2),
        (0.5, [(None, "bad_type")] * 2),
    ],
)
def test_a_group_has_a_score_for_each_completion_or_a_named_failure(returned, scores):
    found = scores_of_call(lambda: returned, 2)
    assert [(score.value, score.failure) for score in found] == scores
    assert returned != [1.0] or "a list of 1 was returned for 2 completions" in found[0].detail


async def test_a_group_is_one_call_of_an_async_function_in_a_worker(reward_file):
    text = (
        "import asyncio\nfrom collections import Counter\ncalls = Counter()\n"
        "async def judge(completions, ground_truth, **kwargs):\n"
        "    await asyncio.sleep(0)\n    calls['all'] += 1\n"
        "    return [{'score': float(t == g), 'calls': calls['all']} for t, g in zip(completions, ground_truth)]\n"
        "def hang(completions):\n    while True: pass\n"
    )
    path = reward_file(text, "judge.py")
    reward = build_reward(RewardConfig(function=f"{path}:judge", timeout_s=30))
    assert reward.takes_groups and reward.about == (
        "judge(completions, ground_truth, **kwargs), TRL's form, one call for a group"
    )
    scores = await reward.score(prompt(), [Sampled("42"), Sampled("41"), Sampled("")])
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]
    assert {score.parts["calls"] for score in scores} == {1.0}
    assert (await score_one(reward, prompt(), "42")).parts["calls"] == 2.0
    await reward.close()
    hang = build_reward(RewardConfig(function=f"{path}:hang", timeout_s=0.3))
    async with asyncio.timeout(30):
        scores = await hang.score(prompt(), ANSWERS)
    assert [score.failure for score in scores] == ["timeout"] * 2
    await hang.close()


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus): return bonus",
        "def compute_score(completions, bonus, **columns): return [bonus] * len(completions)",
        "def compute_score(solution_strs, **rest): return [rest['bonus']] * len(solution_strs)",
    ],
)
async def test_further_arguments_reach_every_form_of_a_function(reward_file, text):
    config = RewardConfig(function=reward_file(text), kwargs={"bonus": 0.5}, timeout_s=30)
    reward = build_reward(config)
    (score,) = await reward.score(prompt(info={"bonus": 9.0}), [Sampled("a", [1])])
    assert score.value == 0.5, score
    await reward.close()
    if "**" not in text:  # which takes whatever there is
        with pytest.raises(RewardError, match=r"reward.kwargs: no function of reward.function takes bonsu"):
            build_reward(RewardConfig(function=(config.function, "format"), kwargs={"bonus": 1.0, "bonsu": 2.0}))
