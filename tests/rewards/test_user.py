"""A user's function is found, its parameters are understood, and what is wrong with it is said in one sentence."""

import sys

import pytest

from asyncgrpo.config.schema import RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.pool import Call
from asyncgrpo.rewards.user import check_user_function, load_user_function, split_spec
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
