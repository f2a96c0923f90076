"""Whole runs in which processes die or hang: each is replaced, the run ends well, and its audit finds no difference."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from asyncgrpo.control.client import RunClient
from tests.runs import assert_nothing_left, asyncgrpo, audited, command_of, events, marked, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = ["--engine", "torch", "--out", "run", "run.checkpoint_every=4", "run.eval_every=100"]
SMALL = ["buffer.prompts_per_step=12", "algorithm.group_size=64", "cluster.silent_timeout_s=8"]


def actors(mark: Path, role: str) -> list[psutil.Process]:
    """Living processes of a role, the oldest first: one that stands by is younger than the one that works."""
    found = [process for process in marked(mark) if f"ray::{role}" in command_of(process)]
    return sorted(found, key=lambda process: process.create_time())


def steps(run: Path) -> int:
    return len(events(run, "step"))


def test_learner_and_buffer_are_replaced_while_the_engines_live_on_and_then_a_generator_that_hangs(tmp_path: Path):
    run = tmp_path / "run"
    process = start("demo", *QUICK, *SMALL, "--max-lag", "1", "--steps", "1000", cwd=tmp_path)
    wait_until(lambda: steps(run) >= 6, "sixth step", 200.0)
    kill_the_warm_process(tmp_path)  # what starts from here on does without
    engines = {p.pid for p in actors(tmp_path, "GeneratorActor")}
    actors(tmp_path, "LearnerActor")[0].kill()
    wait_until(lambda: len(events(run, "start")) >= 2 and steps(run) >= 10, "step of a second learner", 120.0)
    actors(tmp_path, "BufferActor")[0].send_signal(signal.SIGSTOP)
    wait_until(lambda: len(events(run, "start")) >= 3, "third start", 120.0)
    assert engines == {p.pid for p in actors(tmp_path, "GeneratorActor")} != set()

    at = steps(run)
    wait_until(lambda: steps(run) > at, "step of a third learner", 120.0)
    os.kill(actors(tmp_path, "GeneratorActor")[0].pid, signal.SIGSTOP)
    wait_until(lambda: len(restarts(run)) >= 3, "restart of a generator", 60.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 0, (tmp_path / "output.txt").read_text()

    (learner, died), (buffer, hung), (generator, silent) = restarts(run)
    assert [learner, buffer, generator[:-1]] == ["learner-0", "buffer", "generator-"]
    assert "died" in died and "no heartbeat" in hung and "no heartbeat" in silent
    trained = [e["step"] for e in events(run, "step")]
    assert trained == list(range(1, len(trained) + 1))
    assert {e["lineage"] for e in events(run, "start")} == {1, 2, 3}
    audited(run)
    assert_nothing_left(tmp_path)


def kill_the_warm_process(mark: Path) -> None:
    found = [each for each in marked(mark) if "forkserver import main" in command_of(each) and each.children()]
    (server,) = found
    assert len(server.children()) == 4, "buffer, learner and two generators are its forks"
    server.kill()


def restarts(run: Path) -> list[tuple[str, str]]:
    return [(event["actor"], event["reason"]) for event in events(run, "restart") if "count" in event]


def test_a_frozen_generator_is_replaced_as_soon_as_a_publication_misses_it_and_a_run_that_gives_up_loses_no_step(
    tmp_path: Path,
):
    """Long before it has been silent for `cluster.silent_timeout_s`: what the learner finds, buffer and driver know. When it
    may not start again, there is no checkpoint yet: the learner writes one of all its steps."""
    run = tmp_path / "run"
    limits = ["cluster.silent_timeout_s=500", "weights.timeout_s=4", "generators.restarts=1"]
    limits += ["run.checkpoint_every=100000", "run.eval_every=100000"]
    process = start("demo", *QUICK[:4], *SMALL[:2], *limits, "--max-lag", "1", "--steps", "10000", cwd=tmp_path)
    wait_until(lambda: steps(run) >= 3, "third step", 200.0)
    os.kill(actors(tmp_path, "GeneratorActor")[0].pid, signal.SIGSTOP)
    wait_until(lambda: bool(events(run, "restart")), "restart", 50.0)
    wait_until(lambda: bool(left_out(run)), "publication that says whom it missed", 50.0)
    (frozen,) = left_out(run)
    (restart,) = events(run, "restart")
    assert restart["actor"] == frozen and re.match(r"no heartbeat for \d+ s, and \S+ has lost it", restart["reason"])
    assert all(event["engines"] == 1 for event in events(run, "sync") if "left_out" in event)
    wait_until(lambda: events(run, "sync")[-1]["engines"] == 2, "both engines", 100.0)
    wait_until(lambda: bool(reasons(run, frozen)), "word of it at the buffer", 10.0)
    (reason,) = reasons(run, frozen)
    assert not reason.startswith(("silent", "no heartbeat")), "the buffer was told, and did not find it out by itself"
    wait_until(lambda: pid_of(run, frozen) is not None, "its first heartbeat at the driver", 10.0)
    os.kill(pid_of(run, frozen), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    output, last = (tmp_path / "output.txt").read_text(), events(run, "step")[-1]["step"]
    said = f"checkpoint of step {last} written; the same command goes on from there"
    assert f", without {frozen}" in output and said in output
    assert [event["step"] for event in events(run, "checkpoint")] == [last]
    assert [event["step"] for event in events(run, "step")] == list(range(1, last + 1))
    (end,) = events(run, "end")
    assert end["status"] == "failed" and frozen in end["reason"] and said in end["reason"]
    assert list((run / "logs").glob("learner-0.stacks"))
    assert len(events(run, "restart")) == 1 and not events(run, "stall")
    audited(run)
    assert_nothing_left(tmp_path)


def pid_of(run: Path, actor: str) -> int | None:
    (pid,) = [process.pid for process in RunClient(run).status().processes if process.name == actor]
    return pid


def reasons(run: Path, generator: str) -> list[str]:
    said = "".join(path.read_text() for path in (run / "logs").glob("buffer*.log"))
    return re.findall(rf"lost generator {generator} \((.+)\);", said)


def left_out(run: Path) -> set[str]:
    """Whom publications have missed. The learner writes it down after its step, the driver acts on it at once."""
    return {name for event in events(run, "sync") for name in event.get("left_out", ())}


FAULTS = ["kill generator", "pause buffer", "partition network", "freeze learner", "full disk", "reset network"]
FAULTS.append("kill buffer")


def test_chaos_is_survived_and_audited(tmp_path: Path):
    """As many faults as are listed: drawn ones are more on a slower machine, which recovers more slowly from each."""
    chaos = ["--chaos", "1200", "--faults", ",".join(FAULTS), "--seed", "3"]
    result = asyncgrpo("demo", "--engine", "torch", "--out", "run", "--steps", "45", *chaos, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "run"
    struck = [f"{event['fault']} {event['actor'].partition('-')[0]}" for event in events(run, "fault")]
    assert struck == FAULTS[: len(struck)] and len(struck) >= 4 and events(run, "recovered")
    assert "no difference" in result.stdout and re.search(r"faults +\d+ injected, \d+ survived", result.stdout)
    assert max(int(lag) for event in events(run, "step") for lag in event["lags"]) <= 2
    assert_nothing_left(tmp_path)
