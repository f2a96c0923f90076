"""The admin API: what it tells, what it takes, and that it takes nothing else."""

import asyncio
import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from asyncgrpo.config.schema import ControlConfig
from asyncgrpo.control import api
from asyncgrpo.control.api import serving
from asyncgrpo.control.client import Address, Pause, Resume, fetch, read_address
from asyncgrpo.errors import CommandRefused, ConfigError, RunNotAlive
from tests.control.fuzz import attack, send, wrong_with
from tests.control.operators import TOKEN, FakeOperator, make_run, served


@pytest.fixture
def operator(tmp_path: Path) -> FakeOperator:
    return FakeOperator(make_run(tmp_path / "demo"))


def ask(url: str, path: str, body: object = None, token: str | None = TOKEN) -> tuple[int, dict]:
    encoded = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return 200, json.loads(fetch(f"{url}{path}", token=token, body=encoded, timeout_s=20.0))
    except urllib.error.HTTPError as problem:
        return problem.code, json.loads(problem.read())


def test_it_tells_the_status(operator: FakeOperator):
    with served(operator) as url:
        code, status = ask(url, "/api/status")
    assert (code, status["run"], status["step"], status["state"]) == (200, "demo", 12, "training")
    assert status["advice"][0]["command"] == "scale generators 3"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "Input data was truncated"),
        (b"\xff\xfe", "malformed"),
        ({}, "missing required field `command`"),
        ({"command": "fly"}, "Invalid value 'fly'"),
        ({"command": "pause", "hard": True}, "unknown field `hard`"),
        ({"command": "scale", "generators": "3"}, "Expected `int`, got `str`"),
        ({"command": "scale", "generators": 0}, ">= 1"),
        ({"command": "set", "settings": {}}, "length >= 1"),
        ({"command": "set", "settings": {"run.steps": 3}}, "run.steps cannot change while a run goes on; learner.lr"),
    ],
)
def test_what_is_no_command_is_refused(operator: FakeOperator, body: object, why: str):
    with served(operator) as url:
        code, reply = ask(url, "/api/command", body)
    assert code == 400
    assert why in reply["error"]
    assert operator.commands == []


def test_what_the_driver_refuses_is_a_conflict(operator: FakeOperator):
    with served(operator) as url:
        assert ask(url, "/api/command", {"command": "scale", "generators": 9}) == (
            409,
            {"error": "generators.max is 8, so 9 generators are too many"},
        )
        operator.failure = CommandRefused("it is draining")
        assert ask(url, "/api/command", {"command": "pause"}) == (409, {"error": "it is draining"})


def test_a_driver_that_fails_is_no_bad_request(operator: FakeOperator):
    operator.failure = RuntimeError("a bug, with a secret")
    with served(operator) as url:
        code, reply = ask(url, "/api/command", {"command": "pause"})
        assert (code, "secret" in reply["error"]) == (500, False)
        operator.failure = None
        assert ask(url, "/api/command", {"command": "pause"})[0] == 200


def test_a_command_that_hangs_holds_up_no_look(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncgrpo.control.api.COMMAND_S", 0.3)
    operator.released.clear()
    with served(operator) as url:
        hung: list[tuple[int, dict]] = []
        asks = [
            threading.Thread(target=lambda: hung.append(ask(url, "/api/command", {"command": "pause"}))) for _ in "12"
        ]
        for thread in asks:
            thread.start()
        assert ask(url, "/api/status")[0] == 200
        for thread in asks:
            thread.join()
        assert [code for code, _ in hung] == [504, 504]
        operator.released.set()
        assert ask(url, "/api/command", {"command": "resume"})[0] == 200
    assert operator.commands == [Pause(), Resume()], "the second pause was given up before its turn"


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "é"])
def test_without_the_token_there_is_nothing(operator: FakeOperator, token: str | None):
    with served(operator) as url:
        code, reply = ask(url, "/api/status", token=token)
        assert ask(url, "/api/command", {"command": "pause"}, token=token)[0] == 401
        assert ask(url, "/api/no-such", token=token)[0] == 401, "not even which pages there are"
    assert code == 401
    assert "asyncgrpo page RUN" in reply["error"]
    assert operator.commands == []


def test_the_page_and_its_health_are_open(operator: FakeOperator):
    with served(operator) as url:
        assert ask(url, "/healthz", token=None) == (200, {"ok": True})
        assert b"<!doctype html>" in fetch(url, timeout_s=5.0)


def test_a_page_elsewhere_gets_no_leave_to_read(operator: FakeOperator):
    with served(operator) as url:
        head = send(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").partition(b"\r\n\r\n")[0]
    assert b"Access-Control" not in head
    assert b"default-src 'none'; script-src 'self'" in head
    assert b"unsafe" not in head


# -- who takes their time, and who comes in crowds ---------------------------------------------------------------------


def test_who_is_slow_is_shown_out(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "REQUEST_S", 0.3)
    head = f"POST /api/command HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    typed = b"Content-Type: application/json\r\nContent-Length: 19\r\n\r\n"
    with served(operator) as url:
        began = time.monotonic()
        assert send(url, head, pause_s=0.02) == b"", "of its headers"
        assert wrong_with(send(url, head + typed + b'{"comm', pause_s=0.0)) is None
        assert time.monotonic() - began < 10.0
    assert operator.commands == []


def test_a_body_that_does_not_come_ends_in_a_sentence(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "REQUEST_S", 0.3)
    import socket
    from urllib.parse import urlsplit

    with served(operator) as url, socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10.0) as slow:
        head = f"POST /api/command HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 19\r\n\r\n".encode() + b'{"comm')
        assert b"the body did not come within 0.3 s" in slow.recv(65536)


def test_a_body_without_a_length_is_bounded_too(operator: FakeOperator):
    head = f"POST /api/command HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(operator) as url:
        received = send(url, head.encode() + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 4 + b"0\r\n\r\n")
    assert b" 413 " in received.split(b"\r\n")[0]
    assert operator.commands == []


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """SGLang makes uvloop the default of the process that imports it."""
    before = asyncio.get_event_loop_policy()
    policy = asyncio.DefaultEventLoopPolicy
    if request.param == "uvloop":
        policy = pytest.importorskip("uvloop").EventLoopPolicy
    asyncio.set_event_loop_policy(policy())
    yield request.param
    asyncio.set_event_loop_policy(before)


@pytest.mark.usefixtures("event_loop_kind")
def test_a_crowd_is_turned_away_and_then_served(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "CONNECTIONS", 3)
    monkeypatch.setattr(api, "REQUEST_S", 3.0)
    import socket
    from urllib.parse import urlsplit

    with served(operator) as url:
        where = (urlsplit(url).hostname, urlsplit(url).port)
        crowd = [socket.create_connection(where, 5.0) for _ in range(3)]
        time.sleep(0.1)
        assert socket.create_connection(where, 5.0).recv(1000) == b""
        deadline, status = time.monotonic() + 30.0, 0
        while status != 200:  # until the idle ones are shown out
            assert time.monotonic() < deadline
            time.sleep(0.2)
            with suppress(OSError):
                status = ask(url, "/healthz")[0]
        for one in crowd:
            one.close()


def test_thousands_of_wrong_requests_change_nothing(operator: FakeOperator):
    with served(operator) as url:
        sent, wrong = attack(url, TOKEN, count=1_000)
        assert ask(url, "/api/status")[0] == 200
    assert wrong == []
    assert operator.commands == []
    assert len(sent) == 12


# -- what it reads -----------------------------------------------------------------------------------------------------


def test_events_are_followed_by_their_place_in_the_file(operator: FakeOperator):
    with served(operator) as url:
        first = ask(url, "/api/events?limit=10")[1]
        assert len(first["events"]) == 10
        assert first["events"][0]["event"] == "start"
        rest = ask(url, f"/api/events?after={first['next']}&file={first['file']}")[1]
        assert [e["step"] for e in rest["events"] if e["event"] == "step"][-1] == 12
        assert rest["next"] == rest["size"] == (operator.run_dir / "metrics.jsonl").stat().st_size
        with open(operator.run_dir / "metrics.jsonl", "a") as file:
            file.write('{"event":"step","time":1.0,"st')
        assert ask(url, f"/api/events?after={rest['next']}&file={rest['file']}")[1]["events"] == [], "a torn line waits"
        with open(operator.run_dir / "metrics.jsonl", "a") as file:
            file.write('ep":13}\n')
        assert ask(url, f"/api/events?after={rest['next']}&file={rest['file']}")[1]["events"][0]["step"] == 13


def test_another_file_is_known_even_if_it_is_longer(operator: FakeOperator):
    file = operator.run_dir / "metrics.jsonl"
    with served(operator) as url:
        before = ask(url, "/api/events")[1]
        longer = file.with_suffix(".tmp")
        longer.write_text(2 * file.read_text().replace('"time":', '"time":7').replace('"time": ', '"time": 7'))
        longer.rename(file)
        after = ask(url, f"/api/events?after={before['next']}&file={before['file']}")[1]
    assert (after["rewound"], len(after["events"])) == (True, 2 * len(before["events"]))


def test_the_end_of_a_long_file_is_read_first(operator: FakeOperator):
    with served(operator) as url:
        last = ask(url, "/api/events?after=-1500")[1]
    assert last["events"][-1]["step"] == 12
    assert 1 <= len(last["events"]) <= 4


def test_without_samples_it_says_so(operator: FakeOperator):
    with served(operator) as url:
        code, reply = ask(url, "/api/samples")
    assert (code, "holds no samples" in reply["error"]) == (404, True)


def test_problems_are_told_with_their_runbooks(operator: FakeOperator):
    with served(operator) as url:
        problems = ask(url, "/api/alerts")[1]["problems"]
    assert problems[0]["name"] == "NoProgress", "the recorded steps are long ago"
    assert problems[0]["runbook"] == "docs/runbooks/NoProgress.md"


# -- where it is found -------------------------------------------------------------------------------------------------


def test_the_address_is_there_while_it_serves_and_only_for_its_user(operator: FakeOperator):
    run = operator.run_dir
    with serving(operator, run, ControlConfig()) as url:
        address = read_address(run)
        assert (run / "control.json").stat().st_mode & 0o777 == 0o600
        assert address.url == url
        assert ask(address.url, "/api/status", token=address.token)[0] == 200
    with pytest.raises(RunNotAlive, match=r"is not going on: it has no control\.json"):
        read_address(run)


def test_with_no_port_there_is_no_api(operator: FakeOperator):
    with serving(operator, operator.run_dir, ControlConfig(port=None)) as url:
        assert url is None
        assert not (operator.run_dir / "control.json").exists()


def test_a_port_that_is_taken_is_named(operator: FakeOperator):
    with served(operator) as url, pytest.raises(ConfigError, match=r"control\.port \d+: the admin API cannot listen"):
        port = int(url.rpartition(":")[2])
        with serving(operator, operator.run_dir, ControlConfig(port=port)):
            pass


def test_a_token_is_shown_nowhere():
    assert "secret" not in repr(Address.of_this_process("http://127.0.0.1:1", "secret"))
