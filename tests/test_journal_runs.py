"""A whole run with everything real, killed and resumed, and then audited: nothing lost, nothing twice, nothing skipped."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.runs import assert_nothing_left, asyncgrpo, events, start, wait_until

pytestmark = pytest.mark.slow


def kill_after_checkpoint(arguments: list[str], folder: Path, checkpoints: int, rng: random.Random) -> None:
    """Start, wait for so many checkpoints in all, and kill the driver a little later."""
    run = folder / "run"
    process = start(*arguments, cwd=folder)
    wait_until(lambda: len(events(run, "checkpoint")) >= checkpoints, f"checkpoint {checkpoints}", 200.0)
    at = len(events(run, "step"))
    wait_until(lambda: len(events(run, "step")) != at, "another step", 60.0)
    time.sleep(rng.uniform(0.0, 0.5))
    assert process.poll() is None, "the run was over before it was killed: the test shows nothing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_nothing_left(folder)


def test_a_run_killed_twice_passes_its_audit_and_trains_what_was_waiting(tmp_path: Path):
    arguments = ["demo", "--engine", "torch", "--max-lag", "2", "--out", "run", "--steps", "40"]
    arguments += ["run.checkpoint_every=4", "run.eval_every=100", "buffer.prompts_per_step=12"]
    arguments += ["algorithm.group_size=64"]
    rng, run = random.Random(1), tmp_path / "run"
    kill_after_checkpoint(arguments, tmp_path, 1, rng)
    killed = asyncgrpo("audit", "run", cwd=tmp_path)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    kill_after_checkpoint(arguments, tmp_path, 3, rng)
    result = asyncgrpo(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr

    audited = asyncgrpo("audit", "run", "--json", cwd=tmp_path)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    found = json.loads(audited.stdout)
    assert found["starts"] == 3 and found["step"] == 40 and found["differences"] == []
    assert found["groups"]["trained"] == 40 * 12
    assert max(map(int, found["lags"])) <= 2
    tokens = events(run, "end")[-1]["tokens"]
    assert tokens["generated"] == sum(tokens.values()) - tokens["generated"], tokens
    assert tokens["trained"] == found["tokens"]["trained"] and min(tokens.values()) >= 0
    assert f"{tokens['generated']:,} generated = {tokens['trained']:,} trained + " in result.stdout
    starts = events(run, "start")
    assert [event["lineage"] for event in starts] == [1, 2, 3]
    assert sum(event["undone_steps"] for event in starts) > 0
    assert any(event["recovered"].get("ready", 0) > 0 for event in starts[1:]), starts
