"""A whole run whose reward function fails always. `test_teacher_runs.py` has an outage that ends."""

from pathlib import Path

import pytest

from tests.runs import assert_nothing_left, asyncgrpo, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = ["demo", "--engine", "fake", "--max-lag", "1", "--out", "run", "reward.function=my_reward.py"]
DEMO += ["buffer.prompts_per_step=8", "algorithm.group_size=8"]
JUDGE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise ConnectionError("the judge does not answer")
"""


def test_a_function_that_never_works_ends_the_run_within_a_minute_and_says_so(tmp_path: Path):
    (tmp_path / "my_reward.py").write_text(JUDGE)
    result = asyncgrpo(*DEMO, "--steps", "3", cwd=tmp_path)
    assert result.returncode == 1
    said = " ".join((result.stdout + result.stderr).split())
    assert "reward function my_reward.py never worked:" in said and "calls failed, the last with exception:" in said
    assert f"{tmp_path / 'my_reward.py'}:2: ConnectionError: the judge does not answer" in said
    run = tmp_path / "run"
    (end,), first = events(run, "end"), events(run, "reward_failed")[0]
    assert first["count"] == 1 and first["failure"].endswith("my_reward.py:2: ConnectionError")
    assert end["time"] - first["time"] < 60.0
    assert "rewards paused at generator-0" in result.stdout and "reward failed at generator-" in result.stdout
    assert "the judge does not answer" in (run / "logs" / "generator-0.log").read_text()
    warning, error = result.stderr.splitlines()
    assert warning.startswith("warning: ") and "ground truth of row 0" in warning and error.startswith("error: ")
    assert_nothing_left(tmp_path)
