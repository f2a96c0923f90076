"""The admin API of a run: its status, events, samples and problems as JSON, commands to it, and the page that shows them.

It runs in the driver and knows nothing of it but an `Operator`. docs/operate.md has the table of the routes. Everything but
the page's own files and `/healthz` asks for the token of the run.

The server is an aiohttp application in a thread of its own, which no client can make slow, large or silent. Whatever goes wrong
with a request that can be read ends in `{"error": "one sentence"}` and a status of 4xx. Bounds: `CONNECTIONS` at once, a body of
`LARGEST_BODY`, `REQUEST_S` for headers and again for the body.
"""

import asyncio
import concurrent.futures
import hmac
import logging
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import asdict

from asyncgrpo.config.schema import ControlConfig
from asyncgrpo.control.client import FILE, Address, Command, Operator, Status, write_address
from asyncgrpo.data.images import FOLDER as IMAGES
from asyncgrpo.data.images import preview
from asyncgrpo.errors import CommandRefused, ConfigError, DataError
from asyncgrpo.recording.events import read_tail
from asyncgrpo.recording.health import Problem, View, problems_in
from asyncgrpo.recording.samples import TRAINED, Folder, Only, Sort, search

log = logging.getLogger(__name__)
logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it logs a traceback for bytes that are no HTTP

# -- a server in a thread ----------------------------------------------------------------------------------------------

T = TypeVar("T")

CONNECTIONS = 64
"""Most open connections; further ones are closed."""
LARGEST_BODY = 64 * 2**10
REQUEST_S = 10.0
"""Deadline of the headers, and again of the body."""
START_S = 30.0
"""Deadline of a start."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "asyncgrpo",
    "X-Content-Type-Options": "nosniff",
}


class Refusal(Exception):
    """The reply to a request that is not served."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def reply(body: bytes, content_type: str = "application/json", status: int = 200) -> web.Response:
    """Return a reply with the headers that every reply has."""
    return web.Response(body=body, status=status, content_type=content_type, charset="utf-8", headers=_HEADERS)


def as_json(value: Any) -> web.Response:
    return reply(msgspec.json.encode(value))


def error(status: int, text: str) -> web.Response:
    """Return the reply to a request that is not served. The connection is closed after it."""
    response = reply(msgspec.json.encode({"error": text}), status=status)
    response.force_close()
    return response


async def body_of(request: web.Request) -> bytes:
    """Read the body of a request, whole. Raises Refusal."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await request.read()
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {REQUEST_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, f"the body is longer than {LARGEST_BODY} bytes") from None
    except (web.RequestPayloadError, ConnectionError):  # the client may have gone
        raise Refusal(400, "the body does not match its headers") from None


class Worker:
    """One daemon thread that makes calls one after another, for callers that may not block.

    An executor would not do: Python waits at its exit for the threads of one, also for a call that never returns.
    """

    def __init__(self, name: str, *, waiting: int = 8, timeout_s: float) -> None:
        """
        Args:
            waiting: calls that may wait for their turn.
            timeout_s: deadline of a call. One that has begun goes on without its caller.
        """
        self._calls: queue.Queue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = queue.Queue(
            maxsize=waiting
        )
        self._timeout_s = timeout_s
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():  # its caller has gone
                continue
            try:
                future.set_result(call())
            except Exception as problem:
                future.set_exception(problem)

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return or raise what `call` does. Raises Refusal if it is not done in time, or the queue is full."""
        future = concurrent.futures.Future[T]()
        try:
            self._calls.put_nowait((future, call))
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except queue.Full:
            raise Refusal(429, "this run has too many requests at once; try again later") from None
        except TimeoutError:
            raise Refusal(
                504, f"the run's driver did not reply within {self._timeout_s:g} s and may still do it"
            ) from None


class _Rejected(asyncio.Protocol):
    """Closes a connection over the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@contextmanager
def listening(app: web.Application, bind: str, port: int) -> Iterator[str]:
    """Serve an application during the block, from a daemon thread, whose event loop its handlers must not block.

    At the end every connection is closed; a request that is being served gets a second.

    Args:
        port: 0 takes a free one.
    Yields:
        The URL.
    Raises:
        ConfigError: the address cannot be bound.
    """
    started = concurrent.futures.Future[tuple[int, Callable[[], object]]]()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(app, bind, port, started)), name="control", daemon=True)
    thread.start()
    try:
        port, end = started.result(START_S)
    except OSError as problem:
        where = f"control.bind {bind} and control.port {port}"
        raise ConfigError(f"{where}: the admin API cannot listen there: {problem.strerror}") from problem
    try:
        yield f"http://[{bind}]:{port}" if ":" in bind else f"http://{bind}:{port}"
    finally:
        end()
        thread.join(5.0)


async def _serve(
    app: web.Application, bind: str, port: int, started: concurrent.futures.Future[tuple[int, Callable[[], object]]]
) -> None:
    """Serve until the function is called that `started` gets with the port."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    runner = web.AppRunner(
        app,
        handle_signals=False,
        shutdown_timeout=1.0,
        keepalive_timeout=REQUEST_S,
        lingering_time=0.2,
        access_log=None,
        auto_decompress=False,
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connection() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < CONNECTIONS else _Rejected()

    try:
        listener = await loop.create_server(connection, bind, port)
    except OSError as problem:
        started.set_exception(problem)
        return
    started.set_result((listener.sockets[0].getsockname()[1], partial(loop.call_soon_threadsafe, ended.set)))
    await ended.wait()
    listener.close()
    await runner.cleanup()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMMAND_S = 60.0
"""Deadline of a command."""
READ_S = 20.0
RECENT_BYTES = 2**20
"""Bytes of `metrics.jsonl` that are read from its end for problems: some hundred steps."""
_PAGE = Path(__file__).parent / "page"
_PACKAGE = Path(__file__).parent.parent
_RUNBOOKS = (_PACKAGE.parent / "docs" / "runbooks", _PACKAGE / "runbooks")
"""Of a checkout, and of an installed package."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

# -- parameters of requests --------------------------------------------------------------------------------------------


class _Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """No parameter."""


class _OfEvents(Struct, frozen=True, forbid_unknown_fields=True):
    after: Annotated[int, Meta(ge=-(2**53), le=2**53)] = 0
    file: Annotated[str, Meta(max_length=20)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2_000


class _OfSamples(Struct, frozen=True, forbid_unknown_fields=True, rename={"text": "search"}):
    step: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    folder: Folder = TRAINED
    text: Annotated[str, Meta(max_length=500)] = ""
    only: Only = "all"
    sort: Sort = "file"
    offset: Annotated[int, Meta(ge=0, le=2**31)] = 0
    limit: Annotated[int, Meta(ge=1, le=200)] = 20


class _OfImage(Struct, frozen=True, forbid_unknown_fields=True):
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]


class _OfRunbook(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=100)]


# -- the API -----------------------------------------------------------------------------------------------------------


class Api:
    """The admin API of one run."""

    def __init__(self, operator: Operator, run_dir: Path, *, token: str) -> None:
        self._operator, self._run_dir = operator, run_dir
        self._expected = f"Bearer {token}".encode()
        self._commands = Worker("control-commands", timeout_s=COMMAND_S)
        self._looks = Worker("control-status", timeout_s=READ_S, waiting=64)
        self._reads = Worker("control-files", timeout_s=READ_S, waiting=64)
        files = {f"/{path.relative_to(_PAGE)}": path for path in _PAGE.rglob("*") if path.suffix in _TYPES}
        self._open: dict[str, Handler] = {path: partial(_file, file) for path, file in files.items()}
        self._open |= {"/": partial(_file, _PAGE / "index.html"), "/healthz": _healthz}
        """Handlers that ask for no token."""
        routes = {path: partial(_answer_to, kind, answer) for path, (kind, answer) in self._answers().items()}
        self.app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        for path, do in (self._open | routes).items():
            self.app.router.add_get(path, do, allow_head=False)
        self.app.router.add_post("/api/command", self._command)

    # -- one request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve a request that has the token. Anything else gets one sentence."""
        try:
            if request.match_info.handler not in self._open.values():
                self._check_token(request)
            return await handler(request)
        except Refusal as refusal:
            return error(refusal.status, str(refusal))
        except CommandRefused as refused:
            return error(409, str(refused))
        except DataError as problem:
            return error(404, str(problem))
        except web.HTTPException as wrong:
            return error(wrong.status, f"{request.method[:20]} {request.path[:100]}: {wrong.reason}")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error(500, "the run's driver failed; see its log")

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not given:
            raise Refusal(401, "a token is needed: `asyncgrpo page RUN` prints the address with it")
        if not hmac.compare_digest(given, self._expected):
            raise Refusal(401, "the token is not that of this run: `asyncgrpo page RUN` prints the address with it")

    # -- the routes

    def _answers(self) -> dict[str, tuple[type, Callable[[Any], Awaitable[Any]]]]:
        """Return the parameters of each route, and the coroutine that answers them."""
        run_dir, file = self._run_dir, self._run_dir / "metrics.jsonl"
        reads, status = self._reads, partial(self._looks, self._operator.status)

        async def alerts(_: _Nothing) -> dict[str, list[Problem]]:
            return {"problems": await reads(partial(problems_of, run_dir, await status()))}

        async def runbook(asked: _OfRunbook) -> dict[str, str]:
            return {"text": await reads(partial(read_runbook, asked.name))}

        async def image(asked: _OfImage) -> dict[str, str]:
            return {"url": await reads(partial(preview, run_dir / IMAGES / asked.digest))}

        return {
            "/api/status": (_Nothing, lambda _: status()),
            "/api/events": (_OfEvents, lambda asked: reads(partial(read_tail, file, **asdict(asked)))),
            "/api/samples": (_OfSamples, lambda asked: reads(partial(search, run_dir, **asdict(asked)))),
            "/api/image": (_OfImage, image),
            "/api/alerts": (_Nothing, alerts),
            "/api/runbook": (_OfRunbook, runbook),
        }

    async def _command(self, request: web.Request) -> web.Response:
        _query(request, _Nothing)
        if request.content_type != "application/json":
            raise Refusal(415, "a command is sent as application/json")
        try:
            command: Command = msgspec.json.decode(await body_of(request), type=Command)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise Refusal(400, f"this is not a command: {problem}") from None
        return as_json({"done": await self._commands(partial(self._operator.carry_out, command))})


async def _answer_to(kind: type[T], answer: Callable[[T], Awaitable[Any]], request: web.Request) -> web.Response:
    return as_json(await answer(_query(request, kind)))


async def _healthz(request: web.Request) -> web.Response:
    return as_json({"ok": True})


async def _file(path: Path, request: web.Request) -> web.Response:
    return reply(path.read_bytes(), _TYPES[path.suffix])


def _query(request: web.Request, kind: type[T]) -> T:
    """The parameters of a request. Raises Refusal."""
    try:
        return msgspec.convert(dict(request.query), type=kind, strict=False)
    except msgspec.ValidationError as problem:
        raise Refusal(400, f"{request.path}: {problem}") from None


@contextmanager
def serving(operator: Operator, run_dir: Path, config: ControlConfig) -> Iterator[str | None]:
    """The admin API of a run while the block runs, and `RUN/control.json` where clients find it.

    Yields the URL, without the token; None where `control.port` is null. Raises ConfigError: it cannot listen.
    """
    if config.port is None:
        yield None
        return
    token = secrets.token_urlsafe(32)
    with listening(Api(operator, run_dir, token=token).app, config.bind, config.port) as url:
        write_address(run_dir, Address(url=url, token=token))
        try:
            yield url
        finally:
            (run_dir / FILE).unlink(missing_ok=True)


# -- problems ----------------------------------------------------------------------------------------------------------


def problems_of(run_dir: Path, status: Status) -> list[Problem]:
    """Return the problems of a run, by its newest events and the status of its driver."""
    events = read_tail(run_dir / "metrics.jsonl", -RECENT_BYTES).events
    view = View(events=events, now=time.time(), free_bytes=shutil.disk_usage(run_dir).free, **of_status(status))
    return problems_in(view)


def of_status(status: Status) -> dict[str, Any]:
    """Return the fields of a `View` that the driver's status has."""
    silent_s = {process.name: process.heard_s or 0.0 for process in status.processes}
    return {"state": status.state, "started": status.started, "silent_s": silent_s}


def read_runbook(name: str) -> str:
    """Return a runbook as Markdown. Raises DataError: it does not come with this installation."""
    pages = {page.stem: page for folder in _RUNBOOKS for page in folder.glob("*.md")}
    if name not in pages:
        raise DataError(f"docs/runbooks/{name}.md does not come with this installation; it is in the repository")
    return pages[name].read_text(encoding="utf-8")
