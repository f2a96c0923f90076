"""Whole runs whose reward function fails: always, or for a while."""

import signal
import time
from pathlib import Path

import pytest

from tests.runs import assert_nothing_left, asyncgrpo, events, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = ["demo", "--engine", "fake", "--max-lag", "1", "--out", "run", "reward.function=my_reward.py"]
DEMO += ["buffer.prompts_per_step=8", "algorithm.group_size=8"]
JUDGE = """\
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({down!r}):
        raise ConnectionError("the judge does not answer")
    return len(solution_str) % 3
"""


def write_judge(folder: Path) -> Path:
    """A reward function that raises while the file exists that is returned."""
    down = folder / "down"
    (folder / "my_reward.py").write_text(JUDGE.format(down=str(down)))
    return down


def test_a_function_that_never_works_ends_the_run_within_a_minute_and_says_so(tmp_path: Path):
    write_judge(tmp_path).touch()
    result = asyncgrpo(*DEMO, "--steps", "3", cwd=tmp_path)
    assert result.returncode == 1
    said = " ".join((result.stdout + result.stderr).split())
    assert "reward function my_reward.py never worked:" in said and "calls failed, the last with exception:" in said
    assert f"{tmp_path / 'my_reward.py'}:5: ConnectionError: the judge does not answer" in said
    run = tmp_path / "run"
    (end,), first = events(run, "end"), events(run, "reward_failed")[0]
    assert first["count"] == 1 and first["failure"].endswith("my_reward.py:5: ConnectionError")
    assert end["time"] - first["time"] < 60.0
    assert "rewards paused at generator-0" in result.stdout and "reward failed at generator-" in result.stdout
    assert "the judge does not answer" in (run / "logs" / "generator-0.log").read_text()
    warning, error = result.stderr.splitlines()
    assert warning.startswith("warning: ") and "ground truth of row 0" in warning and error.startswith("error: ")
    assert_nothing_left(tmp_path)


def test_an_outage_pauses_the_run_and_drops_no_prompt(tmp_path: Path):
    down = write_judge(tmp_path)
    run = tmp_path / "run"
    settings = ["run.checkpoint_every=1000", "run.eval_every=1000"]
    process = start(*DEMO, "--steps", "10000", *settings, cwd=tmp_path)
    wait_until(lambda: len(events(run, "step")) >= 2, "second step", 120.0)
    down.touch()
    wait_until(lambda: bool(events(run, "rewards_paused")), "pause", 30.0)
    time.sleep(1.0)
    down.unlink()
    paused, trained = events(run, "rewards_paused")[0]["actor"], len(events(run, "step"))
    wait_until(lambda: paused in {event["actor"] for event in events(run, "rewards_resumed")}, "end of the pause", 60.0)
    wait_until(lambda: len(events(run, "step")) > trained + 2, "step after the outage", 60.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0, (tmp_path / "output.txt").read_text()
    dropped = [event["dropped"] for event in [*events(run, "step"), *events(run, "end")] if event.get("dropped")]
    assert dropped == [], "no prompt pays for the outage"
    assert_nothing_left(tmp_path)
