"""`asyncgrpo eval`: suites of several files, pass@k and parts of rewards, as a table and as JSON."""

import json
import shutil
from pathlib import Path

import pytest

from asyncgrpo.cli.models import find_model, settings_of
from asyncgrpo.config.load import load_config, to_yaml
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.errors import CheckpointError

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    has_digit = any(character.isdigit() for character in solution_str)
    return {"score": float(has_digit), "length": float(len(solution_str))}
"""
ROWS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    make_demo_model(folder / "model", seed=0)
    for name in ("easy", "hard"):
        write_demo_task(folder / "train.jsonl", folder / f"{name}.jsonl", seed=0, rows=2, eval_rows=ROWS)
    (folder / "reward.py").write_text(REWARD)
    return folder


def evaluate(asyncgrpo, files: Path, *arguments: str):
    data = [argument for name in ("easy", "hard") for argument in ("--data", str(files / f"{name}.jsonl"))]
    limits = ("--max-tokens", "4", "--reward-func", str(files / "reward.py"), "data.eval_rows=3")
    return asyncgrpo("eval", str(files / "model"), *data, *limits, *arguments)


def test_every_file_has_its_numbers_and_the_parts_of_its_rewards(asyncgrpo, files):
    ended = evaluate(asyncgrpo, files, "--rollout-n", "4", "--temperature", "1", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert (report["prompts"], report["completions"]) == (2 * ROWS, 8 * ROWS)
    for name in ("easy", "hard"):
        suite = report["suites"][name]
        assert list(suite["numbers"]) == ["reward", "pass@1", "pass@2", "pass@4", "maj@4"]
        value, low, high = suite["numbers"]["pass@1"]
        assert low < value < high or value in (low, high)
        assert value == pytest.approx(suite["numbers"]["reward"][0]), "a reward is 0 or 1"
        assert suite["numbers"]["pass@4"][0] >= suite["numbers"]["pass@2"][0] >= value
        assert 1.0 <= suite["parts"]["length"] <= 4.0


def test_the_table_has_a_row_for_each_file(asyncgrpo, files, caplog):
    ended = evaluate(asyncgrpo, files)
    assert ended.code == 0 and not caplog.messages, (ended.err, caplog.messages)
    head, easy, hard, *rest = ended.out.splitlines()
    assert head.split() == ["suite", "prompts", "reward", "pass@1"]
    assert easy.split()[:2] == ["easy", "3"] and hard.split()[:2] == ["hard", "3"] and " to " in easy
    assert rest[0].startswith("6 completions to 6 prompts, mean reward ")
    assert any("parts of easy: length" in line for line in rest)
    ended = evaluate(asyncgrpo, files, "--rollout-n", "4")
    assert ended.code == 1 and "sampling.eval_temperature (0.0)" in ended.err, "all greedy completions would be alike"


def test_a_model_of_a_run_is_evaluated_as_the_run_does_unless_a_flag_says_otherwise(asyncgrpo, files, tmp_path):
    run, checkpoint = tmp_path, tmp_path / "checkpoints" / "step_000002" / "hf"
    settings = ["sampling.max_tokens=2", "sampling.eval_completions=4", "sampling.eval_temperature=1"]
    settings += [f"reward.function={files / 'reward.py'}", "reward.weights=[0.5]", "reward.code.unsafe=true"]
    settings += ["reward.success=-1", "data.system_prompt='say \\${x}'", "data.max_prompt_tokens=90"]
    settings += ["data.eval_rows=1", "data.eval=t.jsonl"]
    config = load_config(None, [f"model.path={files / 'model'}", "data.train=t.jsonl", "run.steps=7", *settings])
    (run / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(files / "model", run / "final")
    shutil.copytree(files / "model", checkpoint)
    assert settings_of(run / "final") == {}, "no run made it"
    (run / "metrics.jsonl").touch()
    for folder in (run / "final", checkpoint):
        found = settings_of(folder)
        assert found["data.system_prompt"] == "say ${x}" and found["sampling"] == config.sampling
        assert not found["reward"].code.unsafe, "which needs its flag each time"
        assert not [key for key in found if key.startswith(("model", "run", "data.eval"))]

    def report(*arguments: str) -> dict:
        ended = asyncgrpo("eval", str(run), "--data", str(files / "easy.jsonl"), "--json", *arguments)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    whole = report()
    assert whole["completions"] == 4 * ROWS and whole["reward_mean"] <= 0.5
    numbers, parts = (whole["suites"]["eval"][name] for name in ("numbers", "parts"))
    assert numbers["pass@4"][0] == 1.0 and 1.0 <= parts["compute_score/length"] <= 2.0
    (files / "other.py").write_text(REWARD.replace("float(has_digit)", "7.0"))
    other = report("--reward-func", str(files / "other.py"), "--rollout-n", "1", "--success", "8", "--max-tokens", "1")
    assert (other["completions"], other["reward_mean"]) == (ROWS, 7.0), "the weights are of the other function"
    assert other["suites"]["eval"]["numbers"]["pass@1"][0] == 0.0 and other["suites"]["eval"]["parts"]["length"] <= 1.0


def test_why_completions_have_no_score_is_told_once_of_each_kind(asyncgrpo, files, caplog):
    (files / "bad.py").write_text(REWARD.replace("has_digit =", "raise OSError('no judge')  #"))
    ended = evaluate(asyncgrpo, files, "--reward-func", str(files / "bad.py"))
    assert ended.code == 0 and "without a score (exception): 6" in ended.out, ended.err
    (told,) = [one for one in caplog.messages if one.startswith("reward failed")]
    assert told.startswith("reward failed (exception ") and told.endswith("bad.py:3: OSError: no judge")


def test_of_a_run_the_final_model_counts_then_the_newest_whole_checkpoint(tmp_path):
    for folder in ("checkpoints/step_000020/hf", "checkpoints/step_000100/hf", "final"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
        (tmp_path / folder / "model.safetensors").touch()
    (tmp_path / "checkpoints/step_000120/hf").mkdir(parents=True)
    assert find_model(tmp_path) == tmp_path / "final"
    (tmp_path / "final").rename(tmp_path / "elsewhere")
    assert find_model(tmp_path) == tmp_path / "checkpoints/step_000100/hf"
    assert find_model(tmp_path / "checkpoints/step_000020") == tmp_path / "checkpoints/step_000020/hf"
    with pytest.raises(CheckpointError, match="holds no model"):
        find_model(tmp_path / "checkpoints")


def test_a_model_whose_config_is_broken_is_one_sentence(asyncgrpo, files, tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": ')
    (tmp_path / "model.safetensors").touch()
    ended = asyncgrpo("eval", tmp_path, "--data", files / "easy.jsonl")
    assert ended.code == 1
    assert ended.err.startswith("error: ") and "config.json cannot be read as a JSON object" in ended.err
