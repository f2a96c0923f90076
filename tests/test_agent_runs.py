"""Whole runs in which an agent calls the model that is trained."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncgrpo.data.demo import make_demo_model
from tests.runs import assert_nothing_left, asyncgrpo, events, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
        *["train", "--model", "model", "--data", "train.json", "--engine", "torch", "--steps", "4", "--rollout-n", "4"],
        *["--n-gpus", "0", "--out", "run", "environment.agent=agent.py", "buffer.prompts_per_step=4"],
        *["sampling.max_tokens=32", "data.max_prompt_tokens=32", "learner.tokens_per_microbatch=1024"],
        *["algorithm.filter_zero_signal=false", "run.checkpoint_every=4"],
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agent run of agent.py" in " ".join(result.stdout.split())
    steps = events(tmp_path / "run", "step")
    assert len(steps) == 4 and all(step["failures"] == {} and step["reward_parts"]["calls"] == 2.0 for step in steps)
    read = set()
    for file in (tmp_path / "run" / "samples").rglob("step_*.parquet"):
        for row in pq.read_table(file).to_pylist():
            number = int(json.loads(row["ground_truth"]))
            opening = f"{'<user>more' * (number % 2)}<user>{number:03d}<assistant>"
            text = row["prompt"] + row["completion"]
            assert text.startswith(opening) and "<user>9<assistant>" in text.removeprefix(opening)
            read.add((number % 2, row["prompt"]))
    assert (1, "<user>") in read and len(read) > 4, "the prompt of a group is what all its completions began with"
    audit = asyncgrpo("audit", "run", cwd=tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    code, found = replay(tmp_path, "--to-step", "4")
    assert code == 0 and found["equal"] is True
    assert_nothing_left(tmp_path)
