"""`asyncgrpo data check` shows what a run would read."""

import json
from pathlib import Path

import pytest

from asyncgrpo.data.demo import make_demo_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {n} + {n}?", "ground_truth": str(2 * n), "data_source": "gsm8k"} for n in range(1, 9)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n")
    return path


def test_a_person_sees_schema_lengths_one_prompt_and_one_score(asyncgrpo, file, reward):
    ended = asyncgrpo("data", "check", file, "--reward-func", reward)
    lines = ended.out.splitlines()
    assert ended.code == 0
    assert "rows             8" in lines
    assert "data_source      gsm8k 8" in lines
    assert "row 0, prompt    What is 1 + 1?" in lines
    assert "row 0, reward    0.25 for `2` as the completion" in lines
    assert "characters: p50 14" in ended.out


def test_with_a_model_lengths_are_tokens_of_the_rendered_prompt(asyncgrpo, file, reward, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_demo_model(tmp_path / "model", seed=0)
    rows = [{"prompt": "1" * n, "ground_truth": n, "data_source": "odd" if n % 2 else "even"} for n in range(1, 101)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = ("data", "check", file, "--reward-func", reward, "--model=~/model", "data.system_prompt=Hm")
    lines = asyncgrpo(*typed, "data.max_prompt_tokens=90").out.splitlines()
    # n digits, two letters and three special tokens
    assert "prompt lengths   tokens: p50 56, p90 96, p99 105, max 105; a run drops 15 above 90" in lines
    assert "data_source      odd 50, even 50" in lines
    assert "row 0, prompt    <system>Hm<user>1<assistant>" in lines
    ended = asyncgrpo(*typed, "data.max_prompt_tokens=2")
    assert ended.code == 1 and "all 100 prompts are longer than data.max_prompt_tokens (2)" in ended.err


TESTS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
RIGHT, HALF = "print(sum(map(int, input().split())))", "print(3)"
CODE = {"prompt": "Add!", "ground_truth": TESTS, "data_source": "code"}
SEVERAL = {"prompt": "Where?", "ground_truth": ["Rome", "Roma"], "data_source": "qa"}
SEARCH = SEVERAL | {"ground_truth": {"target": ["Rome", "Roma"]}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (CODE | {"solution": RIGHT}, f"1 for ````python↵{RIGHT}↵```` as the completion: the row's solution"),
        (CODE | {"extra_info": {"solutions": json.dumps([HALF, RIGHT])}}, "0.5 for `"),
        (CODE, "0 for `pass` as the completion: the ground truth is tests, and the row has no solution, solutions,"),
        (SEVERAL, "1 for `Rome` as the completion: the first of 2 right answers"),
        (SEARCH, "1 for `Rome` as the completion: the first of 2 right answers"),
    ],
)
def test_a_row_is_scored_by_its_solution_or_its_answer(asyncgrpo, file, row, said):
    file.write_text(json.dumps(row) + "\n")
    ended = asyncgrpo("data", "check", file, "reward.code.unsafe=true")
    assert ended.code == 0, ended.err
    assert said in ended.out.partition("row 0, reward    ")[2].replace("\n" + " " * 17, "↵")


def test_a_reward_that_cannot_score_is_an_error_after_the_report(asyncgrpo, file, reward):
    judge = ("reward.function=judge", "reward.judge.url=http://127.0.0.1:1", "reward.judge.timeout_s=2")
    reward.write_text(reward.read_text().replace("0.25", "1 / 0"))
    for how, said in (
        (("--reward-func", reward), "could not be scored (exception: "),
        (judge, "reward.judge.url: http://127.0.0.1:1/v1/chat/completions cannot be reached ("),
        ((), f"error: {file}: no reward rule for data_source 'poetry'"),
    ):
        if not how:
            row = {"question": "Why?", "data_source": "poetry"}
            rows = [row | {"reply": None if n % 2 else "because"} for n in range(8)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            how = ("data.columns.prompt=question", "data.columns.answer=reply")
        ended = asyncgrpo("data", "check", file, *how)
        assert ended.code == 1 and "rows             8" in ended.out
        assert said in ended.err and ended.err.count("\n") == 1
    assert "without answer   4 rows: 1, 3, 5, 7\n" in ended.out and "row 0, answer    because" in ended.out
