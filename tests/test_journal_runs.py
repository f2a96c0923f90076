"""A whole run with everything real, killed twice and resumed: nothing lost, nothing twice, nothing skipped."""

import json
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from asyncgrpo.journal.history import BatchIssued, read_history
from tests.runs import assert_nothing_left, asyncgrpo, audited, events, replay, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS = 16, 12
# Small steps, so that the run is far from its end when it is killed, and one epoch lasts for all of them.
ARGUMENTS = ["demo", "--engine", "torch", "--max-lag", "2", "--out", "run", "--steps", str(STEPS)]
ARGUMENTS += ["run.checkpoint_every=3", "run.eval_every=100", f"buffer.prompts_per_step={PROMPTS}"]
ARGUMENTS += ["algorithm.group_size=64"]
# What the guard skips depends on the gradients before the kill, which the run and the replay read from a checkpoint.
ARGUMENTS += ["learner.spike_factor=1.02", "learner.grad_clip=0.001"]


class Killed(NamedTuple):
    """A run that was killed twice and then ran to its end; for reading only."""

    folder: Path
    run: Path
    checkpoints: tuple[int, int]
    """The step of the newest one at each kill."""
    undone: tuple[int, int]
    """Steps after it."""
    output: str
    """By the start that ran to the end."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder, rng = tmp_path_factory.mktemp("killed"), random.Random(1)
    first = kill_after_checkpoint(folder, rng)
    audited(folder / "run")
    second = kill_after_checkpoint(folder, rng)
    result = asyncgrpo(*ARGUMENTS, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_nothing_left(folder)
    checkpoints, undone = zip(first, second, strict=True)
    return Killed(folder, folder / "run", checkpoints, undone, result.stdout)


def kill_after_checkpoint(folder: Path, rng: random.Random) -> tuple[int, int]:
    """Start, wait for a checkpoint of this start, and kill the driver a little later.

    Returns the step of the newest checkpoint, and the steps after it: the learner may go on until Ray has seen the kill.
    """
    run = folder / "run"
    before = len(events(run, "checkpoint"))
    process = start(*ARGUMENTS, cwd=folder)
    wait_until(lambda: len(events(run, "checkpoint")) > before, f"checkpoint {before + 1}", 200.0)
    wait_until(lambda: steps_ahead(run) == 1, "the step after a checkpoint", 60.0)
    time.sleep(rng.uniform(0.0, 0.2))
    assert process.poll() is None, "the run was over before it was killed: the test shows nothing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_nothing_left(folder)
    return events(run, "checkpoint")[-1]["step"], steps_ahead(run)


def steps_ahead(run: Path) -> int:
    """Steps that the newest checkpoint does not have: a crash now undoes them."""
    steps, checkpoints = events(run, "step"), events(run, "checkpoint")
    return steps[-1]["step"] - checkpoints[-1]["step"]


def test_each_start_goes_on_from_the_newest_checkpoint(killed: Killed):
    assert f"resuming from step {killed.checkpoints[1]}" in killed.output
    starts = events(killed.run, "start")
    assert [event["lineage"] for event in starts] == [1, 2, 3]
    assert [event["step"] for event in starts] == [0, *killed.checkpoints]
    assert [event["version"] for event in starts[1:]] == [f"{n}.{step}" for n, step in enumerate(killed.checkpoints, 2)]
    assert [event["step"] for event in events(killed.run, "step")] == list(range(1, STEPS + 1))
    seen: list[str] = []  # of the first epoch, among the steps that count, in whichever process they were trained
    for path in sorted((killed.run / "samples").rglob("*.parquet")):
        seen += sorted(set(pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist()))
    assert len(seen) == len(set(seen)) == STEPS * PROMPTS, "no prompt is trained twice"


def test_it_passes_its_audit_and_trains_what_was_waiting(killed: Killed):
    audit = asyncgrpo("audit", "run", "--json", cwd=killed.folder)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    found = json.loads(audit.stdout)
    assert found["starts"] == 3 and found["step"] == STEPS and found["differences"] == []
    assert found["groups"]["trained"] == STEPS * PROMPTS
    assert max(map(int, found["lags"])) <= 2
    tokens = events(killed.run, "end")[-1]["tokens"]
    assert tokens["generated"] == sum(tokens.values()) - tokens["generated"], tokens
    assert tokens["trained"] == found["tokens"]["trained"] and min(tokens.values()) >= 0
    assert f"{tokens['generated']:,} generated = {tokens['trained']:,} trained + " in killed.output
    starts = events(killed.run, "start")
    assert [event["undone_steps"] for event in starts] == [0, *killed.undone]
    assert any(event["recovered"].get("ready", 0) > 0 for event in starts[1:]), starts


def test_it_is_replayed_along_the_path_that_stands(killed: Killed):
    issued = [f.record for f in read_history(killed.run / "journal").found if isinstance(f.record, BatchIssued)]
    assert len(issued) > STEPS, "no step was undone: the test shows nothing"
    code, found = replay(killed.folder)
    assert code == 0 and found["equal"]
    assert [step["step"] for step in found["steps"]] == list(range(1, STEPS + 1))
    assert all(step["recorded"]["loss"] is not None for step in found["steps"])
    first, second = killed.checkpoints
    path = ["1.0", f"1.{first}", f"2.{first}", f"2.{second}", f"3.{second}", f"3.{STEPS}"]
    landed = {event["version"] for event in events(killed.run, "sync")}  # not after the checkpoint of a kill
    assert found["weights"]["equal"] == [version for version in path if version in landed]
    assert len(landed & set(path)) >= 4
