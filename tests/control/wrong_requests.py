"""Requests that must be refused. Every reply is a 4xx with one sentence, or none, and no command is carried out."""

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from asyncgrpo.control.api import LARGEST_BODY
from tests.control.operators import TOKEN

WAIT_S = 30.0
"""For a reply; longer than the server waits for a request."""
PATIENCE_S = 0.1
"""For a reply, before the server is told that the request ends here."""
TOKENS = ("", "Bearer", "Bearer null", TOKEN, f"Basic {TOKEN}", "Bearer é", f"Bearer {TOKEN[:-1]}")
METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get")
PATHS = (
    "/api/", "//api/status", "/%2e%2e/%2e%2e/etc/passwd", "/page.js/../../api.py", "/../client.py", "/control.json",
    "/index.html%00", "/vendor", "/" + "a" * 4000,
)  # fmt: skip
QUERIES = {
    "/api/status": ("no_such",), "/api/alerts": ("no_such",), "/api/events": ("after", "limit"),
    "/api/samples": ("step", "only", "sort", "offset", "limit"),
}  # fmt: skip
VALUES = ("x", "1.5", "-5x", "99999999999999999999999", "", "%00", "[]", "%ff%fe")
COMMANDS: tuple[object, ...] = (
    None, True, -1, 2**70, float("nan"), "", "pause", [], [[]], {}, {"command": {}}, {"command": "\x00"},
    {"command": "scale"}, {"command": "scale", "generators": 2.5}, {"command": "scale", "generators": 2**70},
    {"command": "set"}, {"command": "set", "settings": []}, {"command": "set", "settings": {"__proto__": 1}},
    {"command": "pause", "more": 1},
)  # fmt: skip
CHUNK = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
CHUNKS = (b"zz\r\n\r\n", b"-1\r\n", b"fffffffffffffffffff\r\n", CHUNK * 4)


def request(host: str, line: str, body: bytes = b"", **headers: str) -> bytes:
    every = {"Host": host, "Authorization": f"Bearer {TOKEN}", "Content-Length": str(len(body))}
    every |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items() if value)]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def wrong_requests(host: str) -> Iterator[bytes]:
    rng, ask = random.Random(0), partial(request, host)
    post = partial(ask, "POST /api/command", Content_Type="application/json")
    pause = b'{"command":"pause"}'
    yield from (rng.randbytes(size) + b"\r\n\r\n" for size in (1, 30, 300, 3000))
    for _ in range(40):  # flipped bytes of the head: the token is wrong too, as what is left may be a good request
        flipped = bytearray(post(pause).replace(b"Bearer ", b"Bearer x"))
        for _ in range(rng.randrange(1, 6)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        yield bytes(flipped) + b"\r\n\r\n"
    yield from (ask(f"GET {path}", Authorization=token) for path in QUERIES for token in TOKENS)
    yield from (ask(f"{method} {path}") for path in ("/", "/healthz", *QUERIES) for method in METHODS)
    yield from (ask(f"GET {path}") for path in PATHS)
    yield from (ask(f"GET {path}?{name}={value}") for path in QUERIES for name in QUERIES[path] for value in VALUES)
    yield from (post(json.dumps(command).encode()) for command in COMMANDS)
    yield from map(post, (b"[" * LARGEST_BODY, rng.randbytes(500), b'{"command":"' + b"a" * 2**17 + b'"}'))
    yield ask("POST /api/command", pause, Content_Type="text/plain")
    yield post(b"{", Content_Length=str(10**15))
    yield from (post(bad + b"0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked") for bad in CHUNKS)
    yield ask("GET /api/status", X="a" * 100_000)
    yield request(host, "GET /api/status", b"", **{f"X{number}": "a" for number in range(500)})


def send(url: str, request: bytes, pause_s: float = 0.0) -> bytes:
    """Everything that comes back until the server closes, given `pause_s` between each two bytes."""
    where = urlsplit(url)
    received = bytearray()
    with socket.create_connection((where.hostname, where.port), timeout=WAIT_S) as connection:
        with suppress(OSError):  # it has heard enough
            for part in [request] if not pause_s else (request[i : i + 1] for i in range(len(request))):
                connection.sendall(part)
                time.sleep(pause_s)
        connection.settimeout(PATIENCE_S)
        with suppress(ConnectionError):
            while chunk := _more(connection):
                received += chunk
    return bytes(received)


def _more(connection: socket.socket) -> bytes:
    """What comes next. A server that waits for more of the request is told that there is none."""
    try:
        return connection.recv(65536)
    except TimeoutError:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(WAIT_S)
        return connection.recv(65536)


def wrong_with(received: bytes) -> str | None:
    """What is wrong with a reply to a request that must be refused; None: nothing. No reply at all is a closed door."""
    if not received:
        return None
    head, _, body = received.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if not status or not status[0].startswith(b"4"):
        return f"status {status}"
    if b"application/json" not in head:  # aiohttp's reply to what is not HTTP
        return None
    try:
        said = json.loads(body.split(b"HTTP/1.1 ")[0])  # a second one may follow
    except ValueError:
        return f"no JSON: {body[:100]!r}"
    return None if isinstance(said.get("error"), str) and "\n" not in said["error"] else f"no sentence: {said}"
