"""A user's function is found, each common form is called as its project calls it, and what is wrong is said in one sentence."""

import asyncio
import sys

import pytest

from asyncgrpo.config.schema import DataConfig, RewardConfig
from asyncgrpo.data.loading import recognise
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one, scores_of_call
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.pool import Call, call_of
from asyncgrpo.rewards.user import check_user_function, load_user_function, split_spec
from asyncgrpo.types import Prompt
from tests.rewards.conftest import prompt, workers_of
from tests.runs import wait_until

pytestmark = pytest.mark.usefixtures("_imports_are_put_back")
CALL = Call(prompt=prompt(source="math", info={"level": 3}, text="6 * 7?"), completions=("it is 42",))
VERL = ("math", "it is 42", "42", {"level": 3})


@pytest.mark.parametrize(
    ("parameters", "seen"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", VERL),
        ("solution_str, ground_truth", ("it is 42", "42")),
        ("*, ground_truth, solution_str", ("42", "it is 42")),
        ("prompt, completion, answer, info", ("6 * 7?", "it is 42", "42", {"level": 3})),
        ("completion, threshold=0.5", ("it is 42", 0.5)),
        ("solution_str, ground_truth, **rest", ("it is 42", "42", {"data_source": "math", "extra_info": {"level": 3}})),
        ("completion, **rest", ("it is 42", {"prompt": "6 * 7?", "answer": "42", "info": {"level": 3}})),
    ],
)
def test_a_function_gets_what_its_parameters_name(reward_file, parameters, seen):
    names = [part.split("=")[0].strip(" *") for part in parameters.split(",")]
    values = ", ".join(name for name in names if name not in ("", "/"))
    function = load_user_function(reward_file(f"def compute_score({parameters}):\n    return ({values},)"))
    assert function(CALL) == seen


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "solution_strs, ground_truths, tokenizer",
        "source, truth, solution, extra, /",
        "solution_str, ground_truth, tokenizer",
    ],
)
def test_parameters_that_nobody_can_give_are_refused(reward_file, parameters):
    with pytest.raises(RewardError, match=r"my_reward.py: compute_score\(.*expected compute_score\(data_source"):
        load_user_function(reward_file(f"def compute_score({parameters}): return 1.0"))


def test_a_file_has_callables_neighbours_and_dataclasses(reward_file):
    reward_file("BONUS = 0.25", "my_neighbour.py")
    path = reward_file(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import my_neighbour\n"
        "@dataclass\n"
        "class Rubric:\n    bonus: float\n"
        "    def __call__(self, completion): return len(completion) * self.bonus\n"
        "def compute_score(completion): return Rubric(my_neighbour.BONUS).bonus\n"
        "judge, f = Rubric(1.0), lambda completion: 0.5\n"
    )
    assert [load_user_function(f"{path}{name}")(CALL) for name in ("", ":f", ":judge")] == [0.25, 0.5, 8]


def test_a_file_may_be_named_like_a_module_that_is_there(reward_file):
    function = load_user_function(reward_file("import json\ndef compute_score(completion): return 1.0", "msgspec.py"))
    assert function(CALL) == 1.0
    assert hasattr(sys.modules["msgspec"], "Struct")


@pytest.mark.parametrize(
    ("text", "spec", "sentence"),
    [
        (None, "nowhere.py", "reward file .*/nowhere.py does not exist"),
        ("def score(x): pass\ndef judge(x): pass", "r.py", "no function compute_score; .*NAME, such as score, judge"),
        ("lower = str.lower\ndef score(x): pass", "r.py", "no function compute_score; .*NAME, such as score$"),
        ("def compute_score(answer): return 1.0", "r.py:judge", "r.py has no function judge; .*such as compute_score"),
        ("x = 1\ndef compute_score(:\n", "r.py", r"r.py cannot be imported: .*SyntaxError: .*line 2"),
        (
            "import os\nimport no_such_module",
            "r.py",
            "cannot be imported: .*r.py:2: ModuleNotFoundError: .*no_such_module",
        ),
        ("x = '\0'", "r.py", "r.py cannot be imported: .*source code string cannot contain null bytes$"),
        ("just text", "r.txt", "r.txt is not a Python file"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(reward_file, tmp_path, text, spec, sentence):
    if text is not None:
        reward_file(text, split_spec(spec)[0].name)
    with pytest.raises(RewardError, match=sentence) as caught:
        load_user_function(f"{tmp_path}/{spec}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", r"my_reward\.py cannot be imported: .*my_reward\.py:1: ZeroDivisionError"),
        ("import sys; sys.exit()", r"my_reward\.py:1: SystemExit"),
        ("import os; os._exit(5)", r"exited with code 5 while it loaded .*my_reward.py"),
        ("while True: pass", r"my_reward.py was not imported within 1 s.*raise reward.timeout_s"),
    ],
)
def test_a_file_is_imported_in_a_worker_and_what_goes_wrong_is_one_sentence(reward_file, capfd, text, said):
    with pytest.raises(RewardError, match=said):
        timeout_s = 1 if "while" in text else 30
        check_user_function(reward_file(text), RewardConfig(timeout_s=timeout_s), import_timeout_s=1, trial=None)
    assert capfd.readouterr().err == "" and "my_reward" not in sys.modules
    wait_until(lambda: not workers_of(), lambda: f"end of {workers_of()}", 30.0)  # SIGKILL takes its time under load


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("return float(answer == completion)", ""),
        ("return 'good'", "bad_type"),
        ("raise ValueError('no tag')", "my_reward.py:2: ValueError: no tag"),
        ("import os; os._exit(5)", "exited with code 5"),
        ("while True: pass", "no score after 1 s"),
    ],
)
def test_a_function_that_cannot_score_the_ground_truth_is_warned_of(reward_file, caplog, body, warned):
    path = reward_file(f"def compute_score(completion, answer):\n    {body}")
    check_user_function(path, RewardConfig(timeout_s=1), import_timeout_s=60, trial=prompt(text="6 * 7?"))
    assert warned in caplog.text and bool(warned) == bool(caplog.text)


def test_a_name_is_split_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_spec("r.py") == (tmp_path / "r.py", "compute_score")
    assert split_spec("/a/b:c/r.py") == (tmp_path / "/a/b:c/r.py", "compute_score")
    assert split_spec("/a/r.py:judge") == (tmp_path / "/a/r.py", "judge")


# -- each common form, recognised by its parameters -------------------------------------------------------------------------

TURNS = ({"role": "user", "content": "6 * 7?"},)
INFO = {"level": 3, "split": "train"}
ANSWERS = [Sampled("it is 42", [5, 6]), Sampled("41", [7])]
TEXT = prompt(source="gsm8k", info=INFO, text="6 * 7?")
CHAT = prompt(source="gsm8k", info=INFO, turns=TURNS)


@pytest.fixture
def given(reward_file):
    """What a function with these parameters is given for two completions of a prompt."""

    def call(parameters: str, of: Prompt = TEXT):
        names = ", ".join(part.split("=")[0].strip(" *") for part in parameters.split(","))
        function = load_user_function(reward_file(f"def f({parameters}):\n    return ({names},)", "f.py") + ":f")
        assert function.takes_groups
        return function(call_of(of, ANSWERS, is_group=True))

    return call


def test_trl_gives_texts_where_the_prompt_is_a_text_and_turns_where_it_is_a_chat(given, reward_file):
    assert given("prompts, completions") == (["6 * 7?"] * 2, ["it is 42", "41"])
    turns = [[{"role": "assistant", "content": text}] for text in ("it is 42", "41")]
    assert given("prompts, completions", CHAT) == ([list(TURNS)] * 2, turns)
    by_keyword = load_user_function(reward_file("def compute_score(prompt): return prompt"))
    assert by_keyword(call_of(TEXT, ANSWERS[:1])) == by_keyword(call_of(CHAT, ANSWERS[:1])) == "6 * 7?"


def test_trl_gives_each_column_and_the_token_ids_for_each_completion(given):
    assert given("completions, level") == (["it is 42", "41"], [3, 3])
    assert given("completions, ground_truth, data_source") == (["it is 42", "41"], ["42", "42"], ["gsm8k"] * 2)
    assert given("completion_ids, **kwargs")[0] == [[5, 6], [7]]
    (kwargs,) = given("completions, **kwargs")[1:]
    assert kwargs["prompts"] == ["6 * 7?"] * 2 and kwargs["split"] == ["train"] * 2 and kwargs["answer"] == ["42"] * 2
    assert "completions" not in kwargs


def test_a_column_that_the_row_does_not_have_is_its_default_or_named(given):
    assert given("completions, hints=None")[1] is None
    with pytest.raises(RewardError, match=r"no column hints, which the function takes"):
        given("completions, hints")


def test_verls_batch_form_gives_a_list_of_each(given):
    everything = (["gsm8k"] * 2, ["it is 42", "41"], ["42"] * 2, [INFO] * 2)
    assert given("data_sources, solution_strs, ground_truths, extra_infos") == everything
    assert given("solution_strs, ground_truths") == everything[1:3]


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
def test_the_columns_of_every_schema_reach_trls_functions(given, rows, columns, answer):
    record = recognise(rows, DataConfig(train="", columns=columns).columns, "f.jsonl").to_record(rows[0], 0)
    row = Prompt(prompt_id="train/0", token_ids=(1,), answer=record.answer, source=record.source, info=record.info)
    assert given(f"completions, {answer}, difficulty", row)[1:] == (["42", "42"], [2, 2])
    if columns:
        assert given("completions, label", row)[1] == ["42", "42"]


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
def test_further_arguments_reach_every_form_of_a_function(reward_file, text):
    function = load_user_function(reward_file(text), {"bonus": 0.5})
    call = call_of(prompt(info={"bonus": 9.0}), [Sampled("a", [1])], is_group=function.takes_groups)
    assert function(call) == ([0.5] if function.takes_groups else 0.5)


async def test_further_arguments_reach_the_worker_and_one_that_no_function_takes_is_refused(reward_file):
    path = reward_file("def compute_score(completion, bonus): return bonus")
    reward = build_reward(RewardConfig(function=path, kwargs={"bonus": 0.5}, timeout_s=30))
    assert (await score_one(reward, prompt(), "")).value == 0.5
    await reward.close()
    with pytest.raises(RewardError, match=r"reward.kwargs: no function of reward.function takes bonsu"):
        build_reward(RewardConfig(function=(path, "format"), kwargs={"bonus": 1.0, "bonsu": 2.0}))
