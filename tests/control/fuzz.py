"""Requests that must be refused, by the thousand: every reply is a 4xx with one sentence, and no command is carried out."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from urllib.parse import urlsplit

import msgspec

from asyncgrpo.control.api import LARGEST_BODY
from asyncgrpo.control.client import Command

WAIT_S = 30.0
"""For a reply; longer than the server waits for a request."""
PATIENCE_S = 0.1
"""For a reply, before the server is told that the request ends here."""
PATHS = ("/api/status", "/api/command", "/api/events", "/api/samples", "/api/alerts")
COMMANDS = (
    {"command": "pause"}, {"command": "scale", "generators": 2}, {"command": "set", "settings": {"learner.lr": 1e-6}},
)  # fmt: skip
ODD: tuple[object, ...] = (
    None, True, -1, 0, 2**70, 1e400, float("nan"), "", "pause", "\x00", "é" * 100, "9" * 500, [], [[]], {}, {"a": {}},
    {"command": {}}, "__proto__", "../../etc/passwd", "<script>",
)  # fmt: skip


class Attacker:
    def __init__(self, host: str, token: str, seed: int) -> None:
        self._host, self._token = host, token
        self._random = random.Random(seed)

    def requests(self) -> Iterator[tuple[str, bytes]]:
        kinds: list[tuple[str, Callable[[], bytes]]] = [
            ("no HTTP", lambda: self._bytes(3000) + b"\r\n\r\n"),
            ("flipped bytes", self._flipped),
            ("token", self._wrong_token),
            ("method", self._wrong_method),
            ("path", self._wrong_path),
            ("query", self._wrong_query),
            ("no command", self._wrong_command),
            ("type", lambda: self._post(b'{"command":"pause"}', kind="text/plain")),
            ("long headers", lambda: self._get("/api/status", {"X": "a" * self._random.randrange(9_000, 200_000)})),
            ("many headers", lambda: self._get("/api/status", {f"X-{i}": "a" for i in range(500)})),
            ("long body", lambda: self._post(b'{"command":"' + b"a" * 2 * LARGEST_BODY + b'"}')),
            ("endless body", lambda: self._post(b"{", **{"Content-Length": str(10**15)})),
            ("chunks", self._chunks),
        ]
        while True:
            what, make = self._random.choice(kinds)
            yield what, make()

    def _get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes = b"") -> bytes:
        every = {"Host": self._host, "Authorization": f"Bearer {self._token}", **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items() if value)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape") + body

    def _post(self, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
        return self._get(
            "/api/command", {"Content-Type": kind, "Content-Length": str(len(body))} | headers, "POST", body
        )

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(1, most))

    def _flipped(self) -> bytes:
        """Bytes of the head are changed, the token's first one always: what is left of it may be a good request."""
        request = bytearray(self._post(b'{"command":"pause"}').replace(b"Bearer ", b"Bearer x"))
        for _ in range(self._random.randrange(1, 6)):
            request[self._random.randrange(len(request))] = self._random.randrange(256)
        return bytes(request) + b"\r\n\r\n"

    def _wrong_token(self) -> bytes:
        token = self._random.choice(("", "Bearer", "Bearer null", self._token, f"Basic {self._token}", "Bearer é"))
        token = token or f"Bearer {self._token[:-1]}"
        return self._get(self._random.choice(PATHS), {"Authorization": token, "Content-Length": "0"})

    def _wrong_method(self) -> bytes:
        path = self._random.choice((*PATHS[:1], *PATHS[2:], "/", "/healthz"))
        method = self._random.choice(("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get"))
        return self._get(path, {"Content-Length": "0"}, method)

    def _wrong_path(self) -> bytes:
        odd = ("/api/", "//api/status", "/%2e%2e/%2e%2e/etc/passwd", "/page.js/../../api.py", "/../client.py")
        odd += ("/control.json", "/index.html%00", "/vendor", "/" + "a" * 4000)
        return self._get(self._random.choice(odd))

    def _wrong_query(self) -> bytes:
        good = {"/api/status": (), "/api/alerts": (), "/api/events": ("after", "limit")}
        good |= {"/api/samples": ("step", "only", "sort", "offset", "limit")}
        path = self._random.choice(list(good))
        name = self._random.choice((*good[path], "no_such"))
        value = self._random.choice(("x", "1.5", "-5x", "99999999999999999999999", "", "%00", "[]", "%ff%fe"))
        return self._get(f"{path}?{name}={value}")

    def _wrong_command(self) -> bytes:
        while True:
            body = self._broken_command()
            try:
                msgspec.json.decode(body, type=Command)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return self._post(body)

    def _broken_command(self) -> bytes:
        choose = self._random.choice
        command: dict[str, object] = dict(choose(COMMANDS))
        match self._random.randrange(5):
            case 0:
                return self._bytes(LARGEST_BODY)
            case 1:
                return b"[" * self._random.randrange(1, LARGEST_BODY)
            case 2:
                return json.dumps(choose(ODD)).encode()
            case 3:
                command[choose(("command", "generators", "settings", "more"))] = choose(ODD)
            case 4:
                command["settings"] = {str(choose(ODD)): choose(ODD) for _ in range(self._random.randrange(40))}
        return json.dumps(command).encode()

    def _chunks(self) -> bytes:
        chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
        bad = self._random.choice((b"zz\r\n\r\n", b"-1\r\n", b"fffffffffffffffffff\r\n", chunk * 4))
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        return self._get("/api/command", headers, "POST", bad + b"0\r\n\r\n")


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


def attack(url: str, token: str, *, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    sent: Counter[str] = Counter()
    wrong: list[str] = []
    for what, request in islice(Attacker(urlsplit(url).netloc, token, seed).requests(), count):
        sent[what] += 1
        if (fault := wrong_with(send(url, request))) is not None:
            wrong.append(f"{what}: {fault} to {request[:300]!r}")
    return sent, wrong
