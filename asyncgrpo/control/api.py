"""The admin API of a run: its status, events, samples and problems as JSON, commands to it, and the page that shows them.

It runs in the driver and knows nothing of it but an `Operator`. docs/operate.md has the table of the routes. Everything but
the page's own files and `/healthz` asks for the token of the run.
"""

import hmac
import logging
import secrets
import shutil
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
from asyncgrpo.control.client import FILE, Address, Command, Done, Operator, Problems, Status, write_address
from asyncgrpo.control.server import LARGEST_BODY, HttpServer, Refusal, Worker, as_json, body_of, error, reply
from asyncgrpo.errors import CommandRefused, ConfigError, DataError
from asyncgrpo.recording.events import read_tail
from asyncgrpo.recording.health import Problem, View, problems_in
from asyncgrpo.recording.samples import TRAINED, Folder, Only, Sort, search

log = logging.getLogger(__name__)

T = TypeVar("T")
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


class _OfRunbook(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=100)]


# -- the API -----------------------------------------------------------------------------------------------------------


class Api:
    """The admin API of one run, in a thread of its own."""

    def __init__(self, operator: Operator, run_dir: Path, *, bind: str, port: int, token: str) -> None:
        """
        Args:
            bind: address to listen at.
            port: 0 takes a free one.
            token: what a client must send.
        """
        self._operator, self._run_dir = operator, run_dir
        self._bind, self._port = bind, port
        self._expected = f"Bearer {token}".encode()
        self._commands = Worker("control-commands", timeout_s=COMMAND_S)
        self._looks = Worker("control-status", timeout_s=READ_S, waiting=64)
        self._reads = Worker("control-files", timeout_s=READ_S, waiting=64)
        files = {f"/{path.relative_to(_PAGE)}": path for path in _PAGE.rglob("*") if path.suffix in _TYPES}
        self._open: dict[str, Handler] = {path: partial(_file, file) for path, file in files.items()}
        self._open |= {"/": partial(_file, _PAGE / "index.html"), "/healthz": _healthz}
        """Handlers that ask for no token."""
        routes = {path: partial(_reply, kind, answer) for path, (kind, answer) in self._answers().items()}
        app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        for path, do in (self._open | routes).items():
            app.router.add_get(path, do, allow_head=False)
        app.router.add_post("/api/command", self._command)
        self._server = HttpServer(app)

    def start(self) -> str:
        """Listen, and return the URL. Raises ConfigError: the address cannot be bound."""
        try:
            port = self._server.start(self._bind, self._port)
        except OSError as problem:
            where = f"control.bind {self._bind} and control.port {self._port}"
            raise ConfigError(f"{where}: the admin API cannot listen there: {problem.strerror}") from problem
        host = f"[{self._bind}]" if ":" in self._bind else self._bind
        return f"http://{host}:{port}"

    def close(self) -> None:
        """Stop listening. A command that is being carried out goes on."""
        self._server.close()

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

        async def alerts(_: _Nothing) -> Problems:
            return Problems(await reads(partial(problems_of, run_dir, await status())))

        async def runbook(asked: _OfRunbook) -> dict[str, str]:
            return {"text": await reads(partial(read_runbook, asked.name))}

        return {
            "/api/status": (_Nothing, lambda _: status()),
            "/api/events": (_OfEvents, lambda asked: reads(partial(read_tail, file, **asdict(asked)))),
            "/api/samples": (_OfSamples, lambda asked: reads(partial(search, run_dir, **asdict(asked)))),
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
        return as_json(Done(await self._commands(partial(self._operator.carry_out, command))))


async def _reply(kind: type[T], answer: Callable[[T], Awaitable[Any]], request: web.Request) -> web.Response:
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
    api = Api(operator, run_dir, bind=config.bind, port=config.port, token=token)
    url = api.start()
    write_address(run_dir, Address.of_this_process(url, token))
    try:
        yield url
    finally:
        (run_dir / FILE).unlink(missing_ok=True)
        api.close()


# -- problems ----------------------------------------------------------------------------------------------------------


def problems_of(run_dir: Path, status: Status) -> list[Problem]:
    """Return the problems of a run, by its newest events and the status of its driver."""
    events = read_tail(run_dir / "metrics.jsonl", -RECENT_BYTES).events
    view = View(events=events, now=time.time(), free_bytes=shutil.disk_usage(run_dir).free, **of_status(status))
    return problems_in(view)


def of_status(status: Status) -> dict[str, Any]:
    """Return the fields of a `View` that the driver's status has."""
    silent_s = {p.name: float("inf") if p.state == "lost" else p.heard_s or 0.0 for p in status.processes}
    return {"state": status.state, "started": status.started, "silent_s": silent_s}


def read_runbook(name: str) -> str:
    """Return a runbook as Markdown. Raises DataError: it does not come with this installation."""
    pages = {page.stem: page for folder in _RUNBOOKS for page in folder.glob("*.md")}
    if name not in pages:
        raise DataError(f"docs/runbooks/{name}.md does not come with this installation; it is in the repository")
    return pages[name].read_text(encoding="utf-8")
