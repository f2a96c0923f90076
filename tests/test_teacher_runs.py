"""A whole run whose teacher cannot load, dies and freezes."""

import signal
from pathlib import Path

import psutil
import pytest

from asyncgrpo.control.client import ProcessStatus, RunClient
from asyncgrpo.data.demo import make_demo_model
from tests.runs import assert_nothing_left, audited, command_of, events, shared_memory, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = ["demo", "--engine", "fake", "--max-lag", "1", "--out", "run", "--algorithm", "distill"]
DEMO += ["buffer.prompts_per_step=8", "algorithm.group_size=8", "data.eval=null", "run.checkpoint_every=1000"]
DEMO += ["reward.weights=[0]", "teacher.top_k=8", "teacher.timeout_s=1"]


def wait_for_steps(run: Path) -> None:
    trained = len(events(run, "step"))
    wait_until(lambda: len(events(run, "step")) > trained + 3, "step", 240.0)


def status_of_teacher(run: Path) -> ProcessStatus:
    (teacher,) = [one for one in RunClient(run).status().processes if one.name == "teacher-0"]
    return teacher


def test_a_teacher_is_replaced_when_it_cannot_load_or_dies_and_no_outage_of_it_loses_anything(tmp_path: Path):
    pytest.importorskip("sglang")
    make_demo_model(tmp_path / "teacher", seed=5)
    weights, run = tmp_path / "teacher" / "model.safetensors", tmp_path / "run"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    process = start(*DEMO, "--steps", "10000", "teacher.path=teacher", cwd=tmp_path)
    wait_until(lambda: bool(events(run, "restart")), "restart", 150.0)
    weights.write_bytes(whole)
    wait_for_steps(run)
    below = psutil.Process(status_of_teacher(run).pid).children()
    own = [one for one in below if "tracker import" not in command_of(one)]  # titles are not always set
    scheduler = min(own, key=psutil.Process.create_time)
    files = [path.name for path in shared_memory([scheduler.parent(), scheduler])]
    assert files and all("asyncgrpo-" in name for name in files), "by their mark what a killed one leaves is removed"
    paused = len(events(run, "rewards_paused"))
    scheduler.suspend()
    wait_until(lambda: len(events(run, "rewards_paused")) > paused, "pause", 60.0)
    scheduler.resume()
    wait_for_steps(run)
    scheduler.kill()
    wait_until(lambda: len(events(run, "restart")) > 1, "restart", 60.0)
    wait_until(lambda: status_of_teacher(run).state == "working", "teacher", 120.0)  # ready groups train meanwhile
    wait_for_steps(run)
    teacher = status_of_teacher(run)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0, (tmp_path / "output.txt").read_text()
    unreadable, died = events(run, "restart")
    assert (unreadable["actor"], unreadable["count"]) == ("teacher-0", 1)
    assert "SafetensorError" in unreadable["reason"]
    assert (died["actor"], died["count"]) == ("teacher-0", 2)
    assert (teacher.state, teacher.restarts) == ("working", 2)
    steps, outages = events(run, "step"), events(run, "rewards_paused")
    assert all(step["kl_reference"] > 0 and step["zero_signal_groups"] == 0 for step in steps)
    assert all(step["reward_mean"] == 0 and step["reward_parts"] for step in steps), "the reward is measured alone"
    assert [event["dropped"] for event in [*steps, *events(run, "end")] if event.get("dropped")] == [], (
        "nobody pays for it"
    )
    assert all(event["reason"].startswith(("teacher: ", "timeout: ")) for event in outages)
    assert {event["actor"] for event in outages} == {event["actor"] for event in events(run, "rewards_resumed")}
    audited(run)
    assert_nothing_left(tmp_path)
