"""metrics.jsonl survives crashes, resumes and impatient readers; what it holds is declared, and what is declared is written."""

import ast
import contextlib
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import asyncgrpo
from asyncgrpo.recording.events import KINDS, EventLog, Follower, read_events, read_tail


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


def test_numbers_of_numpy_and_torch_are_numbers_and_nan_is_null(path):
    numbers = {"loss": torch.tensor(0.5), "grad_norm": np.float32(2), "entropy": np.nan, "kl_reference": torch.inf}
    EventLog(path).write("step", **step(1, **numbers))
    (event,) = read_events(path)
    assert [event[name] for name in numbers] == [0.5, 2.0, None, None]


def test_an_unknown_event_or_a_missing_field_is_our_mistake(path):
    log = EventLog(path)
    with pytest.raises(AssertionError, match="'stepp'"):
        log.write("stepp")
    with pytest.raises(AssertionError, match=r"lacks \['lags'"):
        log.write("step", **{key: value for key, value in step(1).items() if key not in ("lags", "seconds")})
    with pytest.raises(AssertionError, match=r"undeclared \['losss'\]"):
        log.write("step", **step(1), losss=0.5)


def test_opening_again_cuts_a_torn_line_wherever_it_tore_and_a_damaged_one_is_skipped(path, caplog):
    path.parent.mkdir()
    path.write_bytes(b"x" * 200_000)
    EventLog(path)
    assert path.read_bytes() == b""
    EventLog(path).write("step", **step(1))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert steps_in(path) == [1], "a torn line is no event"
        EventLog(path).write("step", **step(2))
        assert steps_in(path) == [1, 2]
    changes = {b"step": b"\xe2tep", b'"lags"': b'"lagr"', b'{"0":1}': b"[1]"}
    damaged = [whole.replace(*change) for change in changes.items()]
    assert whole not in damaged
    path.write_bytes(whole + b"\x00\x00garbage\n[1]\n" + b"".join(damaged) + whole)
    assert steps_in(path) == [1, 1] and "invalid line" in caplog.text


def test_a_resume_drops_the_steps_that_will_be_trained_again(path):
    log = EventLog(path)
    for n in range(1, 6):
        log.write("step", **step(n))
        log.write("eval", step=n, version=f"1.{n}", reward_mean=0.1, completions=4)
    before = path.stat().st_ino
    assert log.resume_at(5) == 0 and path.stat().st_ino == before, "nothing is dropped"
    assert EventLog(path).resume_at(3) == 4
    log.write("step", **step(4, version="2.4"))
    assert steps_in(path) == [1, 2, 3, 4]
    assert [event["step"] for event in read_events(path) if event["event"] == "eval"] == [1, 2, 3]


def test_what_others_write_while_a_resume_replaces_the_end_is_not_lost(path, monkeypatch):
    """The driver goes on writing of faults, restarts and commands while the next learner begins."""
    learner, driver, replace = EventLog(path), EventLog(path), os.replace
    for n in (1, 2):
        learner.write("step", **step(n))
    others = []

    def late(*names) -> None:
        others.append(threading.Thread(target=driver.write, args=("drain",), kwargs={"reason": "meanwhile"}))
        others[0].start()
        replace(*names)

    monkeypatch.setattr(os, "replace", late)
    assert learner.resume_at(1) == 1
    others[0].join()
    learner.write("step", **step(2, version="2.2"))
    assert [event.get("reason", event.get("version")) for event in read_events(path)] == ["1.1", "meanwhile", "2.2"]


@pytest.mark.parametrize("at", ["os.fsync", "os.replace"])
def test_a_resume_that_was_killed_has_changed_nothing(path, monkeypatch, at):
    log = EventLog(path)
    for n in (1, 2, 3):
        log.write("step", **step(n))
        log.write("sync", version=f"1.{n}", engines=2, ms=3.0, checksum="ok")

    def killed(*arguments):
        raise KeyboardInterrupt

    before = path.read_bytes()
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(at, killed)
        log.resume_at(1)
    assert path.read_bytes() == before
    EventLog(path).resume_at(1, before.index(b'{"event":"step"', 1))
    assert steps_in(path) == [1]
    assert [event["version"] for event in read_events(path) if event["event"] == "sync"] == ["1.1", "1.2", "1.3"]


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
        with pytest.raises(OSError):
            log.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.sync() == path.stat().st_size
    assert [event["reason"] for event in read_events(path)] == ["before", "first", "second"]
    log.write("drain", reason="third")
    assert [event["reason"] for event in read_events(path)] == ["before", "first", "second", "third"]


def test_a_follower_waits_for_the_rest_of_a_line(path):
    EventLog(path).write("step", **step(1))
    line = path.read_bytes()
    path.unlink()
    follower = Follower(path)
    assert list(follower.poll()) == [], "there is no file yet"
    for cut in range(len(line)):
        with open(path, "ab") as file:
            file.write(line[cut : cut + 1])
        assert [event["step"] for event in follower.poll()] == ([1] if cut == len(line) - 1 else [])
    EventLog(path).write("step", **step(2))
    assert [event["step"] for event in follower.poll()] == [2], "each once"


def test_a_long_file_is_read_from_near_its_end_and_in_parts(path, monkeypatch):
    log = EventLog(path)
    for n in range(1, 101):
        log.write("step", **step(n))
    newest = [event["step"] for event in Follower(path, 2_000).poll()]
    assert newest == list(range(newest[0], 101)) and 5 < len(newest) < 20
    monkeypatch.setattr("asyncgrpo.recording.events.LARGEST_BYTES", 1_000)
    parts = [read_tail(path)]
    while parts[-1].next < parts[-1].size:
        parts.append(read_tail(path, parts[-1].next, file=parts[-1].file))
    assert [event["step"] for part in parts for event in part.events] == list(range(1, 101)) and len(parts) > 5


def test_a_resume_is_seen_though_the_file_has_grown_again(path):
    """Its length says nothing: a fast run writes more than was dropped before anyone looks."""
    log, follower, from_the_end = EventLog(path), Follower(path), Follower(path, 250)
    for n in (1, 2, 3):
        log.write("step", **step(n))
    assert [event["step"] for event in follower.poll()] == [1, 2, 3]
    assert [event["step"] for event in from_the_end.poll()] == [3]
    tail = read_tail(path)
    log.resume_at(1)
    for n in (2, 3, 4, 5):
        log.write("step", **step(n, version=f"2.{n}"))
    assert [event.get("step", event["event"]) for event in follower.poll()] == ["rewound", 1, 2, 3, 4, 5]
    assert [event.get("step", event["event"]) for event in from_the_end.poll()] == ["rewound", 5]
    again = read_tail(path, tail.next, file=tail.file)
    assert again.rewound and [event["version"] for event in again.events] == ["1.1", "2.2", "2.3", "2.4", "2.5"]


PACKAGE = Path(asyncgrpo.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def writes(tree: ast.AST) -> Iterator[tuple[int, str, set[str], bool]]:
    """Each `...events.write("kind", field=...)`, which the buffer calls `_emit`.

    Its line, kind, fields, and whether there are more behind `**`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"(events\.write|\._emit)$", ast.unparse(node.func)):
            assert isinstance(node.args[0], ast.Constant), f"line {node.lineno}: which event?"
            names = {keyword.arg for keyword in node.keywords}
            yield node.lineno, str(node.args[0].value), {name for name in names if name}, None in names


CALLS = [(path.relative_to(PACKAGE), *call) for path, tree in TREES.items() for call in writes(tree)]


def test_every_event_in_the_code_is_declared_with_its_fields():
    assert len(CALLS) > 15
    for path, line, kind, fields, has_more in CALLS:
        where = f"{path}:{line}, {kind}"
        assert kind in KINDS and fields <= KINDS[kind].fields.keys(), f"{where}: not declared"
        assert has_more or KINDS[kind].needed <= fields, f"{where}: a field is missing"


def test_every_declared_event_and_field_is_written_somewhere():
    assert KINDS.keys() == {kind for _, _, kind, _, _ in CALLS}
    nodes = [node for path, tree in TREES.items() if path.stem != "events" for node in ast.walk(tree)]
    names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names |= {node.arg for node in nodes if isinstance(node, ast.keyword)}
    assert {(kind, name) for kind, declared in KINDS.items() for name in declared.fields if name not in names} == set()
