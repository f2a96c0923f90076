"""Whole runs of several turns: a user's environment whose process is killed, its audit, its replay and its resume."""

import json
import random
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from asyncgrpo.data.demo import make_demo_model
from tests.runs import assert_nothing_left, asyncgrpo, command_of, events, marked, replay, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GAME = """
class Environment:
    '''Asks for the digits of a number, one at a time.'''

    def reset(self, ground_truth):
        self.digits, self.at = str(ground_truth), 0

    def step(self, text):
        right = text == self.digits[self.at]
        self.at += 1
        return "ok" if right else "no", float(right) / len(self.digits), self.at == len(self.digits)
"""
ARGUMENTS = ["train", "--model", "model", "--data", "train.json", "--engine", "torch"]
ARGUMENTS += ["--eval-data", "train.json", "--eval-data", "others.json"]
ARGUMENTS += ["--rollout-n", "8", "--n-gpus", "0", "--out", "run", "--max-lag", "2", "environment.name=game.py"]
ARGUMENTS += ["buffer.prompts_per_step=4", "sampling.max_tokens=32", "data.max_prompt_tokens=32", "run.epochs=null"]
ARGUMENTS += ["buffer.keep_journal=true", "run.eval_every=4", "data.eval_rows=4", "run.checkpoint_every=3"]


def test_a_run_in_an_environment_goes_on_through_kills_and_every_group_is_accounted_for(tmp_path: Path):
    make_demo_model(tmp_path / "model", seed=0)
    (tmp_path / "game.py").write_text(GAME)
    numbers = random.Random(0).sample(range(100, 1000), 200)
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": str(n), "ground_truth": str(n)} for n in numbers]))
    (tmp_path / "others.json").write_text(json.dumps([{"prompt": "9", "ground_truth": "9"}]))
    run, process = tmp_path / "run", start(*ARGUMENTS, "--steps", "10000", cwd=tmp_path)
    wait_until(lambda: len(events(run, "step")) >= 2, "the second step", 200.0)
    kill_the_environment(tmp_path)
    done = len(events(run, "step"))
    wait_until(lambda: len(events(run, "step")) >= done + 4, "steps after the environment was killed", 100.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120.0) == 0, (tmp_path / "output.txt").read_text()
    assert_nothing_left(tmp_path)
    done = events(run, "step")[-1]["step"]
    result = asyncgrpo(*ARGUMENTS, "--steps", str(done + 3), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reward: environment Environment of game.py" in " ".join(result.stdout.split())
    steps = events(run, "step")
    assert [step["step"] for step in steps] == list(range(1, done + 4))
    assert all(step["turns_mean"] > 1 and step["tokens_observed"] > 0 for step in steps)
    assert max(step["logprob_gap_max"] or 0.0 for step in steps) < 1e-4
    assert max(int(lag) for step in steps for lag in step["lags"]) <= 2
    last = events(run, "eval")[-1]
    assert {name: suite["prompts"] for name, suite in last["suites"].items()} == {"train": 4, "others": 1}
    assert last["reward_mean"] is not None
    audit = asyncgrpo("audit", "run", "--json", cwd=tmp_path)
    assert audit.returncode == 0 and json.loads(audit.stdout)["differences"] == []
    code, found = replay(tmp_path)
    assert code == 0 and found["equal"]
    rows = pq.read_table(run / "samples").to_pylist()
    assert any("<user>ok<assistant>" in row["completion"] or "<user>no<assistant>" in row["completion"] for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length", "abort"}


def kill_the_environment(folder: Path) -> None:
    found = [one for one in marked(folder) if "asyncgrpo.environments.hosted" in command_of(one)]
    assert found, "the environment has no process of its own: the test shows nothing"
    for one in found:
        one.kill()
    psutil.wait_procs(found, timeout=30)
