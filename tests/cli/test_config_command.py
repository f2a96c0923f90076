"""`asyncgrpo config` explains, shows, lists and translates settings."""

import io
import json
import shlex

import pytest

from asyncgrpo.config.explain import knobs
from asyncgrpo.config.load import algorithm_names, load_config


def test_explain_prints_one_key_or_all_and_answers_a_misspelt_one_with_the_right_one(asyncgrpo):
    assert "Completions per prompt" in asyncgrpo("config", "explain", "algorithm.group_size").out
    assert len(asyncgrpo("config", "explain").out.splitlines()) == len(knobs())
    ended = asyncgrpo("config", "explain", "buffer.maxlag")
    assert ended.code == 1
    assert "did you mean `buffer.max_lag`?" in ended.err


def test_show_prints_what_load_config_reads_back_and_json_for_scripts(asyncgrpo, tmp_path):
    ended = asyncgrpo("config", "show", "one_node_8gpu", "run.seed=5", "learner.lr=2e-6")
    assert ended.out.startswith("# 1,024 prompts x 5 completions")
    (tmp_path / "copy.yaml").write_text(ended.out)
    assert load_config(tmp_path / "copy.yaml") == load_config("one_node_8gpu", ["run.seed=5", "learner.lr=2e-6"])
    assert json.loads(asyncgrpo("config", "show", "quickstart", "--json").out)["generators"]["count"] == 2


def test_algorithms_are_listed_and_show_lays_one_over_the_file(asyncgrpo):
    lines = asyncgrpo("config", "algorithms").out.splitlines()
    assert [line.split()[0] for line in lines] == algorithm_names() and min(map(len, lines)) > 30
    shown = asyncgrpo("config", "show", "one_node_8gpu", "--algorithm", "icepop", "algorithm.kl_coef=0").out
    assert "\n# algorithm icepop: grpo advantages, reinforce around behaviour, corrections [{" in shown


def test_an_unknown_algorithm_is_answered_with_all_of_them(asyncgrpo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["demo"], ["serve", "quickstart"], ["config", "show", "quickstart"], ["train"]):
        ended = asyncgrpo(*command, "--algorithm", "list")
        assert ended.code == 1
        assert f"There are: {', '.join(algorithm_names())}" in ended.err
    assert list(tmp_path.iterdir()) == []


VERL = ["data.train_files=t.jsonl", "actor_rollout_ref.model.path=m"]
VERL += ["actor_rollout_ref.rollout.n=4", "data.truncation=left"]


def test_from_verl_prints_a_command_that_a_shell_takes_as_it_is(asyncgrpo):
    ended = asyncgrpo("config", "from-verl", *VERL, "trainer.logger=[wandb]")
    assert ended.code == 0
    words = shlex.split(ended.out.replace("\\\n", ""), comments=True)
    assert words[:2] == ["asyncgrpo", "train"]
    config = load_config(None, words[2:])
    assert (config.data.train, config.algorithm.group_size, config.run.loggers) == ("t.jsonl", 4, ("wandb",))
    assert "# No counterpart:\n#   data.truncation=left: longer prompts are dropped, never cut\n" in ended.out


def test_from_verl_prints_a_file_that_load_config_reads(asyncgrpo, tmp_path):
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(VERL) + " $@\n")
    ended = asyncgrpo("config", "from-verl", tmp_path / "run.sh", "--yaml")
    (tmp_path / "ours.yaml").write_text(ended.out)
    assert load_config(tmp_path / "ours.yaml").algorithm.group_size == 4


@pytest.mark.parametrize(
    ("system", "script", "parts"),
    [
        ("verl", "python3 -m x \\\n data.seed=3 data.truncation=left no.such_key=1", ["truncation=left: ", "#   no.such_key: "]),
        ("trl", "trl grpo --seed 3 --min_p 0.1 --num_generation 4", ["#   min_p=0.1: ", "did you mean `num_generations`?\n"]),
    ],
)  # fmt: skip
def test_a_script_from_stdin_is_translated_and_says_why_it_does_not_run(asyncgrpo, monkeypatch, system, script, parts):
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    ended = asyncgrpo("config", f"from-{system}", "-")
    assert ended.code == 1 and "# It does not run yet:\n#   model.path is missing" in ended.out
    assert [part for part in ["run.seed=3\n", *parts] if part not in ended.out] == []


def test_a_script_without_a_key_is_refused(asyncgrpo, tmp_path):
    (tmp_path / "run.sh").write_text("echo hello\n")
    for command, system in (("from-verl", "verl"), ("from-trl", "TRL")):
        ended = asyncgrpo("config", command, tmp_path / "run.sh")
        assert ended.code == 1 and f"run.sh: it has no key of {system}'s\n" in ended.err
