"""`asyncgrpo config`."""

import json

from asyncgrpo.config_help import knobs
from asyncgrpo.config_loading import load_config


def test_explain_prints_one_key_or_all(asyncgrpo):
    assert "answers to each prompt" in asyncgrpo("config", "explain", "algorithm.group_size").out
    assert len(asyncgrpo("config", "explain").out.splitlines()) == len(knobs())


def test_explain_gives_json_to_scripts(asyncgrpo):
    knob = json.loads(asyncgrpo("config", "explain", "buffer.max_lag", "--json").out)[0]
    assert (knob["key"], knob["default"], knob["required"]) == ("buffer.max_lag", 4, False)
    assert len(json.loads(asyncgrpo("config", "explain", "--json").out)) == len(knobs())


def test_explain_answers_a_misspelt_key_with_the_right_one(asyncgrpo):
    ended = asyncgrpo("config", "explain", "buffer.maxlag")
    assert ended.code == 1
    assert "did you mean `buffer.max_lag`?" in ended.err


def test_show_prints_what_load_config_reads_back(asyncgrpo, tmp_path):
    ended = asyncgrpo("config", "show", "one_node_8gpu", "run.seed=5", "learner.lr=2e-6")
    assert ended.out.startswith("# 1,024 prompts x 5 answers")
    (tmp_path / "copy.yaml").write_text(ended.out)
    assert load_config(tmp_path / "copy.yaml") == load_config("one_node_8gpu", ["run.seed=5", "learner.lr=2e-6"])


def test_show_gives_json_to_scripts(asyncgrpo):
    assert json.loads(asyncgrpo("config", "show", "quickstart", "--json").out)["generators"]["count"] == 2


def test_show_says_what_is_wrong_in_one_line(asyncgrpo):
    ended = asyncgrpo("config", "show", "one_node_8gpu", "algorithm.group_size=1")
    assert ended.code == 1
    assert ended.err.startswith("error: command line: GRPO compares the answers to one prompt, so algorithm.group_size")
    assert ended.err.count("\n") == 1
