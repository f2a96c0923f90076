"""The demo learns; trained again from its journal it is bitwise identical, or different where it must be."""

import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from asyncgrpo.journal import history
from asyncgrpo.journal.history import BatchIssued, Delivered
from tests.runs import assert_nothing_left, asyncgrpo, events, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6


class Demo(NamedTuple):
    folder: Path
    run: Path
    output: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    result = asyncgrpo("demo", "--engine", "torch", "--steps", "50", "--out", "run", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_nothing_left(folder)
    return Demo(folder, folder / "run", result.stdout)


def test_it_learns_and_leaves_what_it_promises(demo: Demo):
    run = demo.run
    rewards = [event["reward_mean"] for event in events(run, "step")]
    assert statistics.mean(rewards[:5]) <= 0.3
    assert statistics.mean(rewards[-5:]) >= 0.9
    assert all(event["checksum"] == "ok" and event["engines"] == 2 for event in events(run, "sync"))
    assert max(int(lag) for event in events(run, "step") for lag in event["lags"]) <= 4
    assert events(run, "eval") and events(run, "end")[-1]["status"] == "done"
    for path in ("curves.png", "config.yaml", "final/model.safetensors", "samples", "checkpoints"):
        assert (run / path).exists(), path
    assert "checksum" in demo.output and "samples" in demo.output


def test_people_see_each_step_from_a_checkpoint_on_and_the_verdict(demo: Demo):
    result = asyncgrpo("replay", "run", "--from-step", "40", "--to-step", "42", cwd=demo.folder)
    assert result.returncode == 0, result.stderr
    assert "steps 41 to 42 of 1 start, 96 groups" in result.stdout
    assert "all 2 steps are bitwise identical; so are the weights 1.40, 1.42" in result.stdout
    written = demo.folder / Path(result.stdout.splitlines()[-1].removeprefix("written: ")).parent
    assert {path.name for path in written.iterdir()} == {"metrics.jsonl", "curves.png", "config.yaml"}


def test_another_correction_meets_the_same_stream(demo: Demo):
    code, found = replay(demo.folder, "--with", "algorithm.corrections=[]", "--to-step", "3")
    assert code == 0 and found["with"] == ["algorithm.corrections=[]"] and not found["equal"]
    ours = events(demo.folder / found["folder"], "step")
    theirs = events(demo.run, "step")[:3]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("reward_mean", "reward_std", "lags", "completions", "tokens_trained", "zero_signal_groups"):
            assert mine[name] == other[name], "the stream is the same"
    # In step 1 every ratio is 1 but for rounding, so nothing is truncated; later the two objectives differ.
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert all(mine["grad_norm"] != other["grad_norm"] for mine, other in zip(ours[1:], theirs[1:], strict=True))


def change_one_reward(run: Path, step: int) -> None:
    found = history.read_history(run / "journal").found
    lease_id = next(f.record.lease_ids[0] for f in found if isinstance(f.record, BatchIssued) and f.record.step == step)

    def change(record, body):
        if not isinstance(record, Delivered) or record.lease_id != lease_id:
            return record, [body]
        message, payload = history.unpack_delivered(record, body)
        first, *others = message.rollouts
        score = msgspec.structs.replace(first.score, value=first.score.value + 1.0)
        changed = (msgspec.structs.replace(first, score=score), *others)
        return history.delivered(msgspec.structs.replace(message, rollouts=changed), payload, record.max_lag)

    rewrite(run / "journal", change)


def rewrite(journal: Path, change) -> None:
    """Write the journal again, with all digests right; `change` gives each record and its body anew."""
    for segment in journal.iterdir():
        parts: list = []
        for item in history.scan(data := segment.read_bytes()):
            assert isinstance(item, history.Whole)
            parts += history.pack(*change(item.record, data[item.end - item.body_bytes : item.end]))
        segment.write_bytes(b"".join(map(bytes, parts)))


def test_one_changed_reward_is_found_at_its_step_and_those_before_it_are_bitwise_identical(demo: Demo, tmp_path: Path):
    shutil.copytree(demo.run, tmp_path / "run", ignore=shutil.ignore_patterns("replays"))
    change_one_reward(tmp_path / "run", STEPS - 2)
    code, found = replay(tmp_path, "--to-step", str(STEPS))
    assert code == 1 and not found["equal"]
    different = {step["step"]: step["differences"] for step in found["steps"] if step["differences"]}
    assert sorted(different) == [4, 5, 6]
    assert {"loss", "grad_norm", "reward_mean"} <= set(different[4])
    assert "reward_mean" not in different[5], "only the weights differ from there on"
    assert found["weights"] == {"equal": ["1.0"], "different": ["1.6"]}
    ours, theirs = events(tmp_path / found["folder"], "step"), events(demo.run, "step")
    assert len(ours) == len({step["loss"] for step in ours}) == STEPS, "numbers that never change prove nothing"
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        for name in ("loss", "grad_norm", "lr", "entropy", "reward_mean", "lags", "tokens_trained", "diagnostics"):
            assert mine[name] == other[name], f"step {mine['step']}: {name}"


def test_weights_that_the_run_did_not_begin_with_are_refused(demo: Demo, tmp_path: Path):
    shutil.copytree(demo.run, tmp_path / "run", ignore=shutil.ignore_patterns("replays"))
    shutil.copytree(demo.run / "final", tmp_path / "other")
    rewrite(tmp_path / "run" / "journal", lambda record, body: (with_model(record, str(tmp_path / "other")), [body]))
    result = asyncgrpo("replay", "run", cwd=tmp_path)
    assert result.returncode == 1 and "does not hold the weights that the run published as 1.0" in result.stderr
    assert not list((tmp_path / "run" / "replays").iterdir()), "a replay that trained nothing leaves nothing"


def with_model(record, path: str):
    if not hasattr(record, "config"):
        return record
    return msgspec.structs.replace(record, config=record.config | {"model": record.config["model"] | {"path": path}})
