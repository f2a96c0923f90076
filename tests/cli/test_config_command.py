"""`asyncgrpo config`."""

import json

from asyncgrpo.config_files import algorithm_names
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


def test_algorithms_are_listed_with_a_line_each(asyncgrpo):
    lines = asyncgrpo("config", "algorithms").out.splitlines()
    assert [line.split()[0] for line in lines] == algorithm_names()
    assert "one ratio for a whole answer" in next(line for line in lines if line.startswith("gspo "))
    assert list(json.loads(asyncgrpo("config", "algorithms", "--json").out)) == algorithm_names()


def test_show_lays_an_algorithm_over_the_file_and_says_so(asyncgrpo):
    shown = asyncgrpo("config", "show", "one_node_8gpu", "--algorithm", "icepop", "algorithm.kl_coef=0").out
    assert "\n# algorithm icepop: grpo advantages, reinforce around behaviour, token mask(low=0.5, high=5), " in shown


def test_show_refuses_an_algorithm_that_does_not_fit(asyncgrpo):
    ended = asyncgrpo("config", "show", "one_node_8gpu", "--algorithm", "pairwise", "learner.minibatches=2")
    assert ended.code == 1
    assert "algorithm.loss=pairwise compares answers" in ended.err


def test_an_unknown_algorithm_is_answered_with_all_of_them(asyncgrpo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["demo"], ["serve", "quickstart"], ["config", "show", "quickstart"], ["train"]):
        ended = asyncgrpo(*command, "--algorithm", "list")
        assert ended.code == 1
        assert f"There are: {', '.join(algorithm_names())}" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_explain_tells_the_fields_of_a_list_of_mappings(asyncgrpo):
    knob = json.loads(asyncgrpo("config", "explain", "algorithm.corrections", "--json").out)[0]
    assert list(knob["fields"]) == ["kind", "level", "action", "low", "high", "threshold", "estimator"]
    assert knob["default"][0]["high"] == 2.0
