"""The report of `asyncgrpo data check` on a file."""

import json

import pytest

from asyncgrpo.cli.models import check_file
from asyncgrpo.config.schema import DataConfig


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1" * n, "ground_truth": n, "data_source": "odd" if n % 2 else "even"} for n in range(1, 101)]
    rows[0]["ground_truth"] = "one"
    rows[4]["ground_truth"] = None
    rows[6]["ground_truth"] = ""
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_with_a_model_lengths_are_tokens_of_the_rendered_prompt(file, demo_model):
    report = check_file(file, str(demo_model), DataConfig(train=file, max_prompt_tokens=90, system_prompt="Hm"))
    assert (report["rows"], report["schema_name"], report["unit"]) == (100, "plain", "tokens")
    assert report["prompt_text"] == "<system>Hm<user>1<assistant>"
    assert report["prompt_tokens"] == 6
    # n digits, two letters and three special tokens
    assert report["lengths"] == {"p50": 56, "p90": 96, "p99": 105, "max": 105}
    assert report["over_long"] == 15
    assert report["sources"] == {"odd": 50, "even": 50}
    assert (report["answers_missing"], report["first_missing"]) == (2, [4, 6])
    assert report["answer"] == "one"
    assert report["score"] is None


def test_prompts_that_are_all_too_long_are_a_problem_as_in_a_run(file, demo_model):
    report = check_file(file, str(demo_model), DataConfig(train=file, max_prompt_tokens=2))
    assert report["problem"].startswith(f"{file}: all 100 prompts are longer than data.max_prompt_tokens (2)")
