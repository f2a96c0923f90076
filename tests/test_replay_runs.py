"""A whole run with everything real, trained again from its journal: equal to the bit, or different where it must be."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from asyncgrpo.journal.format import BatchIssued, Delivered, Whole, delivered, pack, scan, unpack_delivered
from asyncgrpo.journal.history import read_history
from tests.runs import assert_nothing_left, asyncgrpo, events
from tests.test_journal_runs import kill_after_checkpoint

pytestmark = pytest.mark.slow

STEPS = 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo with 20 steps and checkpoints at 10 and 20."""
    folder = tmp_path_factory.mktemp("recorded")
    arguments = ["demo", "--engine", "torch", "--out", "run", "--steps", str(STEPS)]
    result = asyncgrpo(*arguments, "run.checkpoint_every=10", "run.eval_every=100", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def replay(folder: Path, *arguments: str) -> tuple[int, dict]:
    """Exit code and what `--json` says."""
    result = asyncgrpo("replay", "run", *arguments, "--json", cwd=folder)
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    assert_nothing_left(folder)
    return result.returncode, json.loads(result.stdout)


def test_every_step_of_a_demo_is_equal_to_the_bit(recorded: Path):
    code, found = replay(recorded)
    assert code == 0 and found["equal"] is True
    assert found["weights"] == {"equal": ["1.0", f"1.{STEPS}"], "different": []}
    ours, theirs = events(recorded / found["folder"], "step"), events(recorded / "run", "step")
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "lr", "entropy", "reward_mean", "lags", "tokens_trained", "diagnostics"):
            assert mine[name] == other[name], f"step {mine['step']}: {name}"
    assert len({step["loss"] for step in ours}) == STEPS, "numbers that never change prove nothing"


def test_from_a_checkpoint_on_as_well(recorded: Path):
    code, found = replay(recorded, "--from-step", "10", "--to-step", "14")
    assert code == 0 and [step["step"] for step in found["steps"]] == [11, 12, 13, 14]
    assert found["weights"]["equal"] == ["1.10", "1.14"]


def test_people_see_each_step_and_the_verdict(recorded: Path):
    result = asyncgrpo("replay", "run", "--to-step", "2", "--name", "short", cwd=recorded)
    assert result.returncode == 0, result.stderr
    assert "steps 1 to 2 of 1 start, 96 groups" in result.stdout
    assert "all 2 steps are equal to the bit; so are the weights 1.0, 1.2" in result.stdout
    written = recorded / "run" / "replays" / "short"
    assert {path.name for path in written.iterdir()} == {"metrics.jsonl", "curves.png", "config.yaml"}
    again = asyncgrpo("replay", "run", "--name", "short", cwd=recorded)
    assert again.returncode == 1 and "is there already" in again.stderr


def test_another_correction_meets_the_same_stream(recorded: Path):
    code, found = replay(recorded, "--with", "algorithm.corrections=[]", "--to-step", "5")
    assert code == 0 and found["with"] == ["algorithm.corrections=[]"] and not found["equal"]
    ours = events(recorded / found["folder"], "step")
    theirs = events(recorded / "run", "step")[:5]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("reward_mean", "reward_std", "lags", "completions", "tokens_trained", "zero_signal_groups"):
            assert mine[name] == other[name], "the stream is the same"
    # In step 1 every ratio is 1 but for rounding, so nothing is truncated; later the two objectives differ.
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert all(mine["grad_norm"] != other["grad_norm"] for mine, other in zip(ours[1:], theirs[1:], strict=True))


def change_one_reward(run: Path, step: int) -> str:
    """Give the first completion of the first group of `step` another reward, with all digests right. Returns its lease."""
    history = read_history(run / "journal")
    manifest = next(f.record for f in history.found if isinstance(f.record, BatchIssued) and f.record.step == step)
    for segment in history.segments:
        parts: list = []
        for item in scan(segment.path.read_bytes()):
            assert isinstance(item, Whole)
            record, body = item.record, [item.body]
            if isinstance(record, Delivered) and record.lease_id == manifest.lease_ids[0]:
                message, payload = unpack_delivered(record, item.body)
                first, *others = message.rollouts
                score = msgspec.structs.replace(first.score, value=first.score.value + 1.0)
                changed = (msgspec.structs.replace(first, score=score), *others)
                record, body = delivered(msgspec.structs.replace(message, rollouts=changed), payload)
            parts += pack(record, body)
        segment.path.write_bytes(b"".join(map(bytes, parts)))
    return manifest.lease_ids[0]


def test_one_changed_reward_is_found_at_its_step(recorded: Path, tmp_path: Path):
    shutil.copytree(recorded / "run", tmp_path / "run", ignore=shutil.ignore_patterns("replays"))
    change_one_reward(tmp_path / "run", 7)
    code, found = replay(tmp_path, "--to-step", "9")
    assert code == 1 and not found["equal"]
    different = {step["step"]: step["differences"] for step in found["steps"] if step["differences"]}
    assert sorted(different) == [7, 8, 9]
    assert {"loss", "grad_norm", "reward_mean"} <= set(different[7])
    assert "reward_mean" not in different[8], "only the weights differ from there on"
    assert found["weights"] == {"equal": ["1.0"], "different": ["1.9"]}
    said = asyncgrpo("replay", "run", "--to-step", "7", cwd=tmp_path)
    assert said.returncode == 1 and "1 of 7 steps differ, the first is step 7: reward_mean was" in said.stdout


def test_weights_that_the_run_did_not_begin_with_are_refused(recorded: Path, tmp_path: Path):
    shutil.copytree(recorded / "run", tmp_path / "run", ignore=shutil.ignore_patterns("replays"))
    shutil.copytree(recorded / "run" / "final", tmp_path / "other")
    for journal in (tmp_path / "run" / "journal").iterdir():
        rewrite_model_path(journal, str(tmp_path / "other"))
    result = asyncgrpo("replay", "run", cwd=tmp_path)
    assert result.returncode == 1 and "does not hold the weights that the run published as 1.0" in result.stderr
    assert not list((tmp_path / "run" / "replays").iterdir()), "a replay that trained nothing leaves nothing"


def rewrite_model_path(segment: Path, model: str) -> None:
    parts: list = []
    for item in scan(segment.read_bytes()):
        assert isinstance(item, Whole)
        record = item.record
        if hasattr(record, "config"):
            config = record.config | {"model": record.config["model"] | {"path": model}}
            record = msgspec.structs.replace(record, config=config)
        parts += pack(record, [item.body])
    segment.write_bytes(b"".join(map(bytes, parts)))


@pytest.mark.timeout(900)
def test_a_run_killed_and_resumed_is_replayed_along_the_path_that_stands(tmp_path: Path):
    arguments = ["demo", "--engine", "torch", "--out", "run", "--steps", "60", "run.checkpoint_every=4"]
    # What the guard skips depends on the gradients before the kill, which the run and the replay read from a checkpoint.
    arguments += [
        "run.eval_every=100",
        "learner.spike_factor=1.02",
        "learner.grad_clip=0.001",
        "learner.max_skips=1000",
        "buffer.prompts_per_step=12",
    ]
    arguments += ["algorithm.group_size=64"]
    kill_after_checkpoint(arguments, tmp_path, 1, random.Random(2))
    killed, _ = replay(tmp_path)
    assert killed == 0, "a run that was killed can be replayed up to its end"
    result = asyncgrpo(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr

    handed = [f.record for f in read_history(tmp_path / "run" / "journal").found if isinstance(f.record, BatchIssued)]
    assert len(handed) > 60, "no step was undone: the test shows nothing"
    code, found = replay(tmp_path)
    assert code == 0 and found["equal"]
    assert [step["step"] for step in found["steps"]] == list(range(1, 61))
    assert all(step["recorded"]["loss"] is not None for step in found["steps"])
    parent = events(tmp_path / "run", "start")[1]["step"]
    assert found["weights"]["equal"] == ["1.0", f"1.{parent}", f"2.{parent}", "2.60"]


def test_two_ranks_add_up_in_the_same_order(tmp_path: Path):
    arguments = ["demo", "--engine", "torch", "--out", "run", "--steps", "6", "learner.ranks=2", "run.eval_every=100"]
    result = asyncgrpo(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    code, found = replay(tmp_path)
    assert code == 0 and found["equal"] and len(found["steps"]) == 6
    assert found["weights"]["equal"] == ["1.0", "1.6"]
