"""A whole run on prompts with images, killed in a later epoch of its curriculum and resumed: each index is one prompt."""

import json
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from asyncgrpo.data.order import Round
from asyncgrpo.journal.history import History, read_history
from tests.runs import assert_nothing_left, asyncgrpo, audited, events, start, wait_until
from tests.vision import make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS, PER_STEP = 20, 5
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if extra_info["index"] < 10 else float(len(solution_str) % 2)
"""
ARGUMENTS = ["train", "--model", "model", "--data", "train.parquet", "--engine", "fake", "--rollout-n", "4"]
ARGUMENTS += ["--n-gpus", "0", "--out", "run", "--max-lag", "2", "reward.function=reward.py"]
ARGUMENTS += ["data.curriculum=success", "run.epochs=null"]
ARGUMENTS += [f"buffer.prompts_per_step={PER_STEP}", "sampling.max_tokens=8", "data.max_prompt_tokens=64"]
ARGUMENTS += ["buffer.keep_journal=true", "run.checkpoint_every=4"]


def test_a_run_with_a_curriculum_goes_on_in_its_order_after_a_kill(tmp_path: Path):
    make_task(tmp_path, rows=PROMPTS)
    (tmp_path / "reward.py").write_text(REWARD)
    run, process = tmp_path / "run", start(*ARGUMENTS, "--steps", "10000", cwd=tmp_path)
    steps = "steps in the third epoch, beyond a checkpoint"
    wait_until(
        lambda: len(done := events(run, "step")) > 2 * PROMPTS / PER_STEP and done[-1]["step"] % 4 > 1, steps, 100.0
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_nothing_left(tmp_path)
    killed_at = events(run, "step")[-1]["step"]
    result = asyncgrpo(*ARGUMENTS, "--steps", str(killed_at + 10), "--lr", "1e-7", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "changed: learner.lr 1e-06 -> 1e-07" in result.stdout and 0 < events(run, "step")[-1]["lr"] <= 1e-7
    assert_nothing_left(tmp_path)

    audited(run)
    written = orders(run)
    meant = prompts_by_index(read_history(run / "journal"))
    assert len({lineage for _, lineage in meant}) == 2
    for (index, lineage), prompt_id in meant.items():
        epoch, place = divmod(index, PROMPTS)
        assert prompt_id == f"train/{written[epoch][place]}", f"{index} in start {lineage}"
    solved = [sum(row < 10 for row in order) for order in written.values()]
    assert solved[0] == 10 and max(solved[1:]) <= 8, "they come less often once they are right"
    for epoch in range(len(written) - 1):
        assert len({*written[epoch], *written[epoch + 1]}) == PROMPTS
    told = events(run, "curriculum")
    assert told[0]["prompts"]["unknown"] == PROMPTS and told[-1]["prompts"]["solved"] >= 9
    assert all(sum(event["places"].values()) == PROMPTS for event in told)
    assert "epoch 2: 20 places; prompts: " in (tmp_path / "output.txt").read_text()
    row = json.loads(asyncgrpo("samples", "run", "--limit", "1", "--json", cwd=tmp_path).stdout)
    (file,) = json.loads(row["images"])
    assert (run / file).is_file() and row["prompt"].count("<|image_pad|>") == 1
    AutoProcessor.from_pretrained(run / "final")
    AutoModelForImageTextToText.from_pretrained(run / "final")


def orders(run: Path) -> dict[int, list[int]]:
    rounds = [msgspec.msgpack.decode(path.read_bytes()[8:], type=Round) for path in (run / "curriculum").iterdir()]
    return {one.number: np.frombuffer(one.order, np.int32).tolist() for one in sorted(rounds, key=lambda r: r.number)}


def prompts_by_index(history: History) -> dict[tuple[int, int], str]:
    """What each start's groups were of, by prompt index and lineage."""
    groups = (history.group(found) for found in history.found if found.body_bytes)
    found = [message for group in groups if group is not None for message in group[:1]]
    return {(m.prompt_index, int(m.lease_id.partition(".")[0])): m.prompt.prompt_id for m in found}
