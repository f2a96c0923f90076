"""A whole run that is steered from outside: paused, changed, scaled up and down, asked for a checkpoint, and ended."""

import json
from pathlib import Path

import pytest

from asyncgrpo.control.client import (
    ChangeSettings,
    DrainRun,
    Evaluate,
    Pause,
    Resume,
    RunClient,
    Scale,
    Status,
    WriteCheckpoint,
)
from asyncgrpo.errors import CommandRefused, RunNotAlive
from tests.runs import assert_nothing_left, audited, events, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOW_ENOUGH = ["generators.extra={seconds_per_token: 0.02, median_tokens: 6, sigma: 0.3}"]
SLOW_ENOUGH += ["buffer.prompts_per_step=16"]
SETTINGS = ["--engine", "fake", "--steps", "5000", "--out", "run", "generators.count=1", "run.checkpoint_every=1000"]


def steps(run: Path) -> int:
    return len(events(run, "step"))


def generators(status: Status) -> dict[str, str]:
    return {p.name: p.state for p in status.processes if p.name.startswith("generator")}


def test_a_run_is_steered_and_its_audit_finds_no_difference(tmp_path: Path):
    run = tmp_path / "run"
    process = start("demo", *SETTINGS, *SLOW_ENOUGH, cwd=tmp_path)
    wait_until(lambda: steps(run) >= 3, "third step", 200.0)
    client = RunClient(run)
    send = client.send
    assert send(Pause()).startswith("paused") and client.status().state == "paused"
    send(WriteCheckpoint())
    wait_until(lambda: len(events(run, "checkpoint")) == 1, "checkpoint in a pause", 60.0)
    before = len(events(run, "eval"))
    send(Evaluate())
    at = steps(run)
    with pytest.raises(CommandRefused, match="paused already"):
        send(Pause())
    assert steps(run) == at, "nothing is trained in a pause"
    send(Resume())
    wait_until(lambda: len(events(run, "eval")) > before, "evaluation", 60.0)

    send(ChangeSettings(settings={"learner.lr": 1e-4, "buffer.max_lag": 3, "generators.groups_in_flight": 40}))
    wait_until(lambda: events(run, "step")[-1]["max_lag"] == 3, "step under the other bound", 60.0)
    # The buffer may know of it before the learner.
    wait_until(lambda: bool(events(run, "lr_changed")), "other rate", 60.0)
    (changed,) = events(run, "lr_changed")
    at = int(changed["version"].split(".")[1])
    wait_until(lambda: steps(run) > at + 1, "step at the other rate", 60.0)
    rates = [event["lr"] for event in events(run, "step")]
    assert max(rates[at:]) <= 1e-4 < rates[at - 1]

    assert send(Scale(generators=3)).startswith("3 generators: 2 more, ")
    three = {f"generator-{i}": "working" for i in range(3)}
    wait_until(lambda: generators(client.status()) == three, "three generators", 120.0)
    wait_until(lambda: events(run, "sync")[-1]["engines"] == 3, "publication to three", 60.0)
    assert send(Scale(generators=1)).startswith("1 generator: 2 fewer, ")
    wait_until(lambda: generators(client.status()) == {"generator-0": "working"}, "one generator", 120.0)
    at = steps(run)
    wait_until(lambda: steps(run) >= at + 3, "step with one", 60.0)
    assert len(json.loads((tmp_path / "prometheus" / "run.json").read_text())) == 4, "who left is not asked any more"

    assert send(DrainRun()).startswith("draining")
    assert process.wait(timeout=200) == 0, (tmp_path / "output.txt").read_text()
    with pytest.raises(RunNotAlive):
        RunClient(run)
    assert events(run, "restart") == []
    assert [e["refused"] for e in events(run, "command")].count(True) == 1
    audited(run)
    assert_nothing_left(tmp_path)
