"""metrics.jsonl survives crashes, resumes and impatient readers."""

import json
import os
import resource

import numpy as np
import pytest
import torch

from asyncgrpo.recording.events import EventLog, Follower, read_events


def step(n: int, **more):
    return {
        "step": n, "version": f"1.{n}", "reward_mean": n / 10, "loss": 0.0,
        "lags": {"0": 1}, "tokens_trained": 5, "seconds": {"wait_data": 1.0}, **more,
    }  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def steps_in(path) -> list[int]:
    return [event["step"] for event in read_events(path) if event["event"] == "step"]


def test_an_event_is_one_whole_json_line_as_soon_as_it_is_written(path):
    log = EventLog(path, clock=lambda: 12.5)
    log.write("step", **step(1))
    assert json.loads(path.read_text()) == {"event": "step", "time": 12.5, **step(1)}


def test_numbers_of_numpy_and_torch_are_numbers_and_nan_is_null(path):
    log = EventLog(path)
    log.write(
        "step", **step(1, loss=torch.tensor(0.5), grad_norm=np.float32(2), entropy=float("nan"), kl_reference=torch.inf)
    )
    event = next(read_events(path))
    assert (event["loss"], event["grad_norm"], event["entropy"], event["kl_reference"]) == (0.5, 2.0, None, None)


def test_an_unknown_event_or_a_missing_field_is_our_mistake(path):
    log = EventLog(path)
    with pytest.raises(AssertionError, match="'stepp'"):
        log.write("stepp")
    with pytest.raises(AssertionError, match=r"lacks \['lags'"):
        log.write("step", **{key: value for key, value in step(1).items() if key not in ("lags", "seconds")})
    with pytest.raises(AssertionError, match=r"undeclared \['losss'\]"):
        log.write("step", **step(1), losss=0.5)


def test_a_torn_last_line_is_no_event(path):
    EventLog(path).write("step", **step(1))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert steps_in(path) == [1]


def test_opening_again_cuts_a_torn_line_wherever_it_tore(path):
    EventLog(path).write("step", **step(1))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole + whole[:cut])
        EventLog(path).write("step", **step(2))
        assert steps_in(path) == [1, 2]


def test_a_file_that_is_one_torn_line_becomes_empty(path):
    path.parent.mkdir()
    path.write_bytes(b"x" * 200_000)
    EventLog(path)
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_skipped(path, caplog):
    log = EventLog(path)
    log.write("step", **step(1))
    with open(path, "ab") as file:
        file.write(b"\x00\x00garbage\n[1]\n")
    log.write("step", **step(2))
    assert steps_in(path) == [1, 2]
    assert "no event" in caplog.text


def test_a_resume_drops_the_steps_that_will_be_trained_again(path):
    log = EventLog(path)
    for n in range(1, 6):
        log.write("step", **step(n))
        log.write("eval", step=n, version=f"1.{n}", reward_mean=0.1, completions=4)
        log.write("sync", version=f"1.{n}", engines=2, ms=3.0, checksum="ok")
    assert EventLog(path).resume_at(3) == 4
    log.write("step", **step(4, version="2.4"))
    assert steps_in(path) == [1, 2, 3, 4]
    assert [event["step"] for event in read_events(path) if event["event"] == "eval"] == [1, 2, 3]
    assert sum(event["event"] == "sync" for event in read_events(path)) == 5
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_resume_at_the_last_step_leaves_the_file_alone(path):
    log = EventLog(path)
    log.write("step", **step(1))
    before = path.stat().st_ino
    assert log.resume_at(1) == 0 and path.stat().st_ino == before


def test_what_others_write_while_a_resume_replaces_the_file_is_not_lost(path, monkeypatch):
    """The driver goes on writing of faults, restarts and commands while the next learner begins."""
    learner, driver, replace = EventLog(path), EventLog(path), os.replace
    for n in (1, 2):
        learner.write("step", **step(n))

    def late(*names) -> None:
        driver.write("drain", reason="meanwhile")
        replace(*names)

    monkeypatch.setattr(os, "replace", late)
    assert learner.resume_at(1) == 1
    learner.write("step", **step(2, version="2.2"))
    assert [event.get("reason", event.get("version")) for event in read_events(path)] == ["1.1", "meanwhile", "2.2"]


def test_what_a_full_disk_refuses_is_written_once_there_is_room(path):
    log = EventLog(path)
    log.write("drain", reason="before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        log.write("drain", reason="first")
        log.write("drain", reason="second")
        assert [event["reason"] for event in read_events(path)] == ["before"]
        assert path.read_bytes().endswith(b"\n"), "no torn line is left for another writer to append to"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("drain", reason="third")
    assert [event["reason"] for event in read_events(path)] == ["before", "first", "second", "third"]


def test_several_writers_lose_nothing(path):
    learner, driver = EventLog(path), EventLog(path)
    for n in range(1, 51):
        learner.write("step", **step(n))
        driver.write("restart", actor="generator-0", reason="killed")
    assert len(list(read_events(path))) == 100


def test_a_follower_gives_each_event_once_and_waits_for_the_file(path):
    follower = Follower(path)
    assert follower.poll() == []
    log = EventLog(path)
    log.write("step", **step(1))
    log.write("step", **step(2))
    assert [event["step"] for event in follower.poll()] == [1, 2]
    assert follower.poll() == []
    log.write("step", **step(3))
    assert [event["step"] for event in follower.poll()] == [3]


def test_a_follower_waits_for_the_rest_of_a_line(path):
    EventLog(path).write("step", **step(1))
    line = path.read_bytes()
    path.write_bytes(b"")
    follower = Follower(path)
    for cut in range(len(line)):
        with open(path, "ab") as file:
            file.write(line[cut : cut + 1])
        assert [event["step"] for event in follower.poll()] == ([1] if cut == len(line) - 1 else [])


def test_a_follower_begins_anew_after_a_resume(path):
    log, follower = EventLog(path), Follower(path)
    for n in (1, 2, 3):
        log.write("step", **step(n))
    assert len(follower.poll()) == 3
    log.resume_at(1)
    log.write("step", **step(2))
    assert [event.get("step", event["event"]) for event in follower.poll()] == ["rewound", 1, 2]
    follower.close()
