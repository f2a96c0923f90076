"""The commands to runs that are going on: what they print, what they send, and what they say where nobody replies."""

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo.control import client
from tests.control.operators import TOKEN, FakeOperator, make_run, served


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    operator = FakeOperator(make_run(Path("runs/demo")))
    with served(operator) as url:
        client.write_address(operator.run_dir, client.Address(url=url, token=TOKEN))
        yield operator


def test_status_tells_how_the_run_is(asyncgrpo, operator):
    ended = asyncgrpo("status")
    assert ended.code == 0
    for words in (
        "demo: training",
        "step       12/60, start number 1",
        "reward     0.120",
        "lag        mean 0.88, p50 1, p90 2, max 2 of 2",
        "generators sampling 75%, only scoring 6%, changing weights 6%, idle 12%",
        "a fifth nothing: asyncgrpo scale generators 3 runs/demo",
        "NoProgress: no optimizer step for",
    ):
        assert words in ended.out
    (told,) = json.loads(asyncgrpo("status", "runs/demo", "--json").out)
    assert (told["status"]["step"], told["last_step"]["reward_mean"]) == (12, 0.12)
    assert told["problems"][0]["name"] == "NoProgress"


def test_a_run_that_starts_says_what_it_waits_for_and_nothing_else(asyncgrpo, operator):
    operator.state = "starting"
    said = asyncgrpo("status").out
    assert "demo: starting" in said and "waits for  generator-0, generator-1" in said
    assert "waiting for data" not in said and "process " not in said and "Waiting:" not in said


def test_several_runs_are_told_of(asyncgrpo, operator):
    other = FakeOperator(make_run(Path("runs/other"), steps=3))
    with served(other) as url:
        client.write_address(other.run_dir, client.Address(url=url, token=TOKEN))
        ended = asyncgrpo("status")
        assert ended.out.index("demo: training") < ended.out.index("other: training")
        refused = asyncgrpo("pause")
        assert "several runs are active, give one: runs/demo, runs/other" in refused.err
        assert asyncgrpo("pause", "runs/other").code == 0
    assert (operator.commands, other.commands) == ([], [client.Pause()])


CHANGED = {"learner.lr": 1e-6, "buffer.max_lag": 3}


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["pause"], client.Pause()),
        (["resume", "runs/demo"], client.Resume()),
        (["drain"], client.DrainRun()),
        (["checkpoint"], client.WriteCheckpoint()),
        (["evaluate"], client.Evaluate()),
        (["scale", "generators", 4], client.Scale(generators=4)),
        (["set", "learner.lr=1e-6", "buffer.max_lag=3", "runs/demo"], client.ChangeSettings(settings=CHANGED)),
    ],
)
def test_a_command_reaches_the_driver(asyncgrpo, operator, typed, command):
    ended = asyncgrpo(*typed)
    assert (ended.code, operator.commands) == (0, [command]), ended.err
    assert ended.out.strip().endswith("is done")


def test_the_help_of_set_names_what_can_change(asyncgrpo):
    help = " ".join(asyncgrpo("set", "--help").out.split())
    assert all(key in help for key in client.CHANGEABLE)


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["set", "run.steps=3"], "run.steps cannot change during a run; learner.lr, buffer.max_lag"),
        (["set", "model.path=elsewhere"], "model.path cannot change during a run"),
        (["set", "learner.lr=nan"], "learner.lr=nan: 'nan' is not a number"),
        (["set", "learner.lr=fast"], "learner.lr=fast: 'fast' is not a number"),
        (["status", "runs/none"], "run folder runs/none does not exist"),
        (["top", "runs/none"], "run folder runs/none does not exist"),
        (["pause", "."], ". is not a run folder: it has no metrics.jsonl"),
    ],
)
def test_a_mistake_ends_in_one_sentence(asyncgrpo, operator, typed, why):
    ended = asyncgrpo(*typed)
    assert (ended.code, operator.commands) == (1, [])
    assert ended.err.startswith(f"error: {why}")
    assert ended.err.count("\n") == 1


def test_what_the_driver_refuses_is_said(asyncgrpo, operator):
    ended = asyncgrpo("scale", "generators", 9)
    assert ended.code == 1 and ended.err.startswith("error: runs/demo: generators.max is 8")


def test_a_run_that_has_ended_is_said_to_have(asyncgrpo, operator):
    (operator.run_dir / "control.json").unlink()
    for typed in (["status", "runs/demo"], ["pause", "runs/demo"], ["page", "runs/demo"], ["top", "runs/demo"]):
        ended = asyncgrpo(*typed)
        assert "runs/demo is not active" in ended.err + ended.out
        assert "start it again with the command that started it" in ended.err + ended.out
    ended = asyncgrpo("status")
    assert ended.code == 1 and ended.err.startswith("error: no run in runs/")


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\n\r\n\xff", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
def test_another_server_at_the_port_of_a_driver_that_was_killed_is_no_driver(asyncgrpo, operator, reply: bytes):
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            self.request.sendall(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        client.write_address(operator.run_dir, client.Address(url=url, token="t"))
        ended = asyncgrpo("pause", "runs/demo")
        asyncgrpo("status")
        other.shutdown()
    assert ended.code == 1 and f"does not reply at {url}" in ended.err


def test_a_driver_that_was_killed_is_told_from_one_that_hangs(asyncgrpo, operator):
    url = "http://127.0.0.1:9"  # where nobody listens
    client.write_address(operator.run_dir, client.Address(url=url, token="t", pid=2**22 + 1))
    assert f"its driver, process {2**22 + 1}, is gone" in asyncgrpo("pause", "runs/demo").err
    client.write_address(operator.run_dir, client.Address(url=url, token="t"))
    assert f"process {os.getpid()}, does not reply at {url}" in asyncgrpo("pause", "runs/demo").err
    assert "no run in runs/" in asyncgrpo("status").err, "the address of a killed driver does not count"
    client.write_address(operator.run_dir, client.Address(url=url, token="t", pid=1, host="head-node"))
    assert "belongs to a run on head-node: give the command there" in asyncgrpo("pause", "runs/demo").err


def test_page_prints_an_address_that_keeps_the_token_from_logs_and_top_one_look_without_a_terminal(asyncgrpo, operator):
    url, _, token = asyncgrpo("page").out.strip().partition("#")
    assert token == f"token={TOKEN}"
    assert url.startswith("http://127.0.0.1:")
    assert "demo  step 12/60  training" in asyncgrpo("top").out
