"""Whole runs of several turns: an environment whose process is killed, and an agent; their audit, replay and resume."""

import json
import random
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from asyncgrpo.data.demo import make_demo_model
from tests.runs import assert_nothing_left, asyncgrpo, audited, command_of, events, marked, replay, start, wait_until

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
ARGUMENTS = ["train", "--model", "model", "--data", "train.json", "--eval-data", "train.json", "--engine", "torch"]
ARGUMENTS += ["--rollout-n", "8", "--n-gpus", "0", "--out", "run", "--max-lag", "2", "environment.name=game.py"]
ARGUMENTS += ["buffer.prompts_per_step=4", "sampling.max_tokens=32", "data.max_prompt_tokens=32", "run.epochs=null"]
ARGUMENTS += ["buffer.keep_journal=true", "run.eval_every=4", "data.eval_rows=4", "run.checkpoint_every=3"]


def test_a_run_in_an_environment_goes_on_through_kills_and_every_group_is_accounted_for(tmp_path: Path):
    make_demo_model(tmp_path / "model", seed=0)
    (tmp_path / "game.py").write_text(GAME)
    numbers = random.Random(0).sample(range(100, 1000), 200)
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": str(n), "ground_truth": str(n)} for n in numbers]))
    run, process = tmp_path / "run", start(*ARGUMENTS, "--steps", "10000", cwd=tmp_path)
    wait_until(lambda: len(events(run, "step")) >= 2, "the second step", 200.0)
    kill_the_environment(tmp_path)
    done = len(events(run, "step"))
    wait_until(lambda: len(events(run, "step")) >= done + 2, "steps after the environment was killed", 100.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120.0) == 0, (tmp_path / "output.txt").read_text()
    assert_nothing_left(tmp_path)
    done = events(run, "step")[-1]["step"]
    result = asyncgrpo(*ARGUMENTS, "--steps", str(done + 2), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reward: environment Environment of game.py" in " ".join(result.stdout.split())
    steps = events(run, "step")
    assert [step["step"] for step in steps] == list(range(1, done + 3))
    assert all(step["turns_mean"] > 1 and step["tokens_observed"] > 0 for step in steps)
    assert max(step["logprob_gap_max"] or 0.0 for step in steps) < 1e-4
    assert max(int(lag) for step in steps for lag in step["lags"]) <= 2
    assert events(run, "eval")[-1]["reward_mean"] is not None
    audited(run)
    rows = pq.read_table(run / "samples").to_pylist()
    assert any("<user>ok<assistant>" in row["completion"] or "<user>no<assistant>" in row["completion"] for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length", "abort"}


def kill_the_environment(folder: Path) -> None:
    found = [one for one in marked(folder) if "asyncgrpo.environments.hosted" in command_of(one)]
    assert found, "the environment has no process of its own: the test shows nothing"
    for one in found:
        one.kill()
    psutil.wait_procs(found, timeout=30)


AGENT = """
from openai import AsyncOpenAI

async def run(base_url, api_key, messages, extra_info):
    messages = [{"role": "user", "content": "more"}] * extra_info["more"] + messages  # than the row has
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        first = await model.chat.completions.create(model="m", messages=messages, max_tokens=6)
        messages = [*messages, first.choices[0].message, {"role": "user", "content": "9"}]
        second = await model.chat.completions.create(model="m", messages=messages, max_tokens=6)
    return {"score": float("7" in second.choices[0].message.content), "calls": 2}
"""


def test_an_agent_is_trained_audited_and_replayed(tmp_path: Path):
    make_demo_model(tmp_path / "model", seed=0)
    rows = [{"prompt": f"{i:03d}", "ground_truth": str(i), "extra_info": {"more": i % 2}} for i in range(40)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "agent.py").write_text(AGENT)
    result = asyncgrpo(
        *["train", "--model", "model", "--data", "train.json", "--engine", "torch", "--steps", "2", "--rollout-n", "4"],
        *["--n-gpus", "0", "--out", "run", "environment.agent=agent.py", "buffer.prompts_per_step=4"],
        *["sampling.max_tokens=32", "data.max_prompt_tokens=32", "learner.tokens_per_microbatch=1024"],
        *["algorithm.filter_zero_signal=false", "run.checkpoint_every=2"],
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agent run of agent.py" in " ".join(result.stdout.split())
    steps = events(tmp_path / "run", "step")
    assert len(steps) == 2 and all(step["failures"] == {} and step["reward_parts"]["calls"] == 2.0 for step in steps)
    read = set()
    for file in (tmp_path / "run" / "samples").rglob("step_*.parquet"):
        for row in pq.read_table(file).to_pylist():
            number = int(json.loads(row["ground_truth"]))
            opening = f"{'<user>more' * (number % 2)}<user>{number:03d}<assistant>"
            text = row["prompt"] + row["completion"]
            assert text.startswith(opening) and "<user>9<assistant>" in text.removeprefix(opening)
            assert number % 2 or row["prompt"] == opening
            read.add((number % 2, row["prompt"]))
    assert (1, "<user>") in read, "the prompt of a group is what all its completions began with"
    audited(tmp_path / "run")
    code, found = replay(tmp_path, "--to-step", "2")
    assert code == 0 and found["equal"] is True
    assert_nothing_left(tmp_path)
