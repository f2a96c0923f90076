"""A whole run on prompts with images: killed, resumed, and read afterwards."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.runs import assert_nothing_left, asyncgrpo, events, start, wait_until
from tests.vision import make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = [
    *["train", "--model", "model", "--data", "train.parquet", "--reward-func", "my_reward.py", "--out", "run"],
    *["--engine", "fake", "--n-gpus", "0", "--steps", "8", "--rollout-n", "4", "--max-lag", "1"],
    *["data.max_prompt_tokens=64", "sampling.max_tokens=8", "buffer.prompts_per_step=4", "run.checkpoint_every=2"],
]


def test_a_run_with_images_is_killed_resumed_and_read(tmp_path: Path):
    make_task(tmp_path, rows=32)
    run = tmp_path / "run"
    process = start(*TRAIN, "run.steps=500", cwd=tmp_path)
    wait_until(lambda: len(events(run, "step")) >= 3, "third step", 120.0)
    process.kill()
    process.wait()
    wait_until(lambda: bool(list(run.glob("checkpoints/step_*/state.json"))), "checkpoint", 5.0)

    done = events(run, "step")[-1]["step"]
    resumed = asyncgrpo(*TRAIN, f"run.steps={done + 2}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert events(run, "end")[-1]["status"] == "done"
    assert asyncgrpo("audit", "run", cwd=tmp_path).returncode == 0
    row = json.loads(asyncgrpo("samples", "run", "--limit", "1", "--json", cwd=tmp_path).stdout)
    (file,) = json.loads(row["images"])
    assert (run / file).is_file() and row["prompt"].count("<|image_pad|>") == 1
    AutoProcessor.from_pretrained(run / "final")
    AutoModelForImageTextToText.from_pretrained(run / "final")
    assert_nothing_left(tmp_path)
