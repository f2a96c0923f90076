"""The admin API: what it tells, what it takes, and that it takes nothing else."""

import asyncio
import base64
import io
import json
import socket
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from asyncgrpo.config.schema import ControlConfig
from asyncgrpo.control import api
from asyncgrpo.control.api import serving
from asyncgrpo.control.client import Pause, Resume, fetch, read_address
from asyncgrpo.errors import CommandRefused, ConfigError, RunNotAlive
from tests.control.operators import TOKEN, FakeOperator, make_run, served
from tests.control.wrong_requests import send, wrong_requests, wrong_with


@pytest.fixture
def operator(tmp_path: Path) -> FakeOperator:
    return FakeOperator(make_run(tmp_path / "demo"))


@pytest.fixture
def url(operator: FakeOperator) -> Iterator[str]:
    with served(operator) as url:
        yield url


def ask(url: str, path: str, body: object = None, token: str | None = TOKEN) -> tuple[int, dict]:
    encoded = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return 200, json.loads(fetch(f"{url}{path}", token=token, body=encoded, timeout_s=20.0))
    except urllib.error.HTTPError as problem:
        return problem.code, json.loads(problem.read())


def test_what_is_no_command_is_refused(url: str, operator: FakeOperator):
    for body, why in (
        (b"{", "truncated"),
        ({"command": "fly"}, "'fly'"),
        ({"command": "scale", "generators": 0}, ">= 1"),
        ({"command": "set", "settings": {"run.steps": 3}}, "run.steps cannot change"),
    ):
        code, reply = ask(url, "/api/command", body)
        assert code == 400 and why in reply["error"] and operator.commands == []


def test_what_the_driver_refuses_is_a_conflict_and_its_failure_no_bad_request(url: str, operator: FakeOperator):
    operator.failure = CommandRefused("it is draining")
    assert ask(url, "/api/command", {"command": "pause"}) == (409, {"error": "it is draining"})
    operator.failure = RuntimeError("a bug, with a secret")
    code, reply = ask(url, "/api/command", {"command": "pause"})
    assert (code, "secret" in reply["error"]) == (500, False)
    operator.failure = None
    assert ask(url, "/api/command", {"command": "pause"})[0] == 200


def test_a_command_that_hangs_holds_up_no_look(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncgrpo.control.api.COMMAND_S", 0.3)
    operator.released.clear()
    hung: list[tuple[int, dict]] = []
    with served(operator) as url:

        def pause() -> None:
            hung.append(ask(url, "/api/command", {"command": "pause"}))

        asks = [threading.Thread(target=pause) for _ in "12"]
        for thread in asks:
            thread.start()
        assert ask(url, "/api/status")[0] == 200
        for thread in asks:
            thread.join()
        assert [code for code, _ in hung] == [504, 504]
        operator.released.set()
        assert ask(url, "/api/command", {"command": "resume"})[0] == 200
    assert operator.commands == [Pause(), Resume()], "the second pause was given up before its turn"


@pytest.mark.parametrize("token", [None, TOKEN[:-1], TOKEN + "x", "é"])
def test_without_the_token_there_is_nothing(url: str, operator: FakeOperator, token: str | None):
    code, reply = ask(url, "/api/status", token=token)
    assert code == 401 and "asyncgrpo page RUN" in reply["error"]
    assert ask(url, "/api/command", {"command": "pause"}, token=token)[0] == 401 and operator.commands == []
    assert ask(url, "/api/no-such", token=token)[0] == 401, "not even which pages there are"
    assert ask(url, "/api/samples")[0] == 404, "there are none yet"


def test_the_page_and_its_health_are_open_and_a_page_elsewhere_gets_no_leave_to_read(url: str):
    assert ask(url, "/healthz", token=None) == (200, {"ok": True})
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head, _, page = send(url, request).partition(b"\r\n\r\n")
    assert b"<!doctype html>" in page
    assert b"Access-Control" not in head
    assert b"default-src 'none'; script-src 'self'" in head
    assert b"unsafe" not in head


def test_who_is_slow_is_shown_out(operator: FakeOperator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "REQUEST_S", 0.3)
    head = f"POST /api/command HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    with served(operator) as url:
        began = time.monotonic()
        assert send(url, head, pause_s=0.02) == b"", "of its headers"
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10.0) as slow:
            slow.sendall(head + b'Content-Type: application/json\r\nContent-Length: 19\r\n\r\n{"comm')
            assert b"the body did not come within 0.3 s" in slow.recv(65536)
        assert time.monotonic() - began < 10.0
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
    monkeypatch.setattr(api, "REQUEST_S", 2.0)
    with served(operator) as url:
        where = (urlsplit(url).hostname, urlsplit(url).port)
        crowd = [socket.create_connection(where, 5.0) for _ in range(3)]
        time.sleep(0.1)
        assert socket.create_connection(where, 5.0).recv(1000) == b""
        crowd[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # those that were there first still are
            crowd[0].recv(1)
        deadline, status = time.monotonic() + 30.0, 0
        while status != 200:  # until the idle ones are shown out
            assert time.monotonic() < deadline
            time.sleep(0.2)
            with suppress(OSError):
                status = ask(url, "/healthz")[0]
        for one in crowd:
            one.close()


def test_hundreds_of_wrong_requests_change_nothing(url: str, operator: FakeOperator, caplog):
    for request in wrong_requests(urlsplit(url).netloc):
        assert wrong_with(send(url, request)) is None, request[:300]
    assert ask(url, "/api/status")[0] == 200 and operator.commands == []
    assert caplog.text == "", "whoever reaches the port could fill the screen with tracebacks"


def test_events_are_followed_by_their_place_in_the_file(url: str, operator: FakeOperator):
    last = ask(url, "/api/events?after=-1500")[1]
    assert last["events"][-1]["step"] == 12 and 1 <= len(last["events"]) <= 4, "the end of a long file is read first"
    first = ask(url, "/api/events?limit=10")[1]
    assert len(first["events"]) == 10
    assert ask(url, f"/api/events?after={first['next']}&file=another")[1]["rewound"]
    assert first["events"][0]["event"] == "start"
    rest = ask(url, f"/api/events?after={first['next']}&file={first['file']}")[1]
    assert [e["step"] for e in rest["events"] if e["event"] == "step"][-1] == 12
    assert rest["next"] == rest["size"] == (operator.run_dir / "metrics.jsonl").stat().st_size
    with open(operator.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"event":"of another release","time":1.0,"step":13}\n')
    assert ask(url, f"/api/events?after={rest['next']}&file={rest['file']}")[1]["events"][0]["step"] == 13


def test_the_address_is_there_while_it_serves_and_only_for_its_user(operator: FakeOperator):
    run = operator.run_dir
    with serving(operator, run, ControlConfig()) as url:
        address = read_address(run)
        assert address.token not in repr(address)
        assert (run / "control.json").stat().st_mode & 0o777 == 0o600
        assert address.url == url
        assert ask(address.url, "/api/status", token=address.token)[0] == 200
    with pytest.raises(RunNotAlive, match=r"is not active: it has no control\.json"):
        read_address(run)
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(f"{url}/healthz", timeout_s=2.0)


def test_with_no_port_there_is_no_api_and_a_port_that_is_taken_is_named(operator: FakeOperator):
    with serving(operator, operator.run_dir, ControlConfig(port=None)) as url:
        assert url is None and not (operator.run_dir / "control.json").exists()
    with served(operator) as url, pytest.raises(ConfigError, match=r"control\.port \d+: the admin API cannot listen"):
        port = int(url.rpartition(":")[2])
        with serving(operator, operator.run_dir, ControlConfig(port=port)):
            pass


def test_an_image_of_a_prompt_is_shown_as_a_png_to_who_has_the_token(url: str, operator: FakeOperator):
    folder, digest = operator.run_dir / "images", "0" * 32
    folder.mkdir()
    Image.new("RGB", (900, 600), "red").save(folder / digest, "TIFF")
    code, reply = ask(url, f"/api/image?digest={digest}")
    assert code == 200
    shown = Image.open(io.BytesIO(base64.b64decode(reply["url"].removeprefix("data:image/png;base64,"))))
    assert (shown.format, shown.size) == ("PNG", (512, 341))
    assert ask(url, f"/api/image?digest={digest}", token=None)[0] == 401
    assert ask(url, f"/api/image?digest={'1' * 32}")[0] == 404
    assert ask(url, "/api/image?digest=../metrics.jsonl")[0] == 400
