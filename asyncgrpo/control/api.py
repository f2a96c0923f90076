"""The admin API of a run: its status, events, samples and problems as JSON, commands to it, and the page that shows them.

It runs in the driver and knows nothing of it but an `Operator`. docs/operate.md has the table of the routes. Everything but
the page's own files and `/healthz` asks for the token of the run.
"""

import hmac
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import asdict

from asyncgrpo.config.schema import ControlConfig
from asyncgrpo.control.client import FILE, Address, write_address
from asyncgrpo.control.operator import Command, Done, Operator
from asyncgrpo.control.problems import Problems, fetch, problems, read_runbook
from asyncgrpo.control.server import LARGEST_BODY, HttpServer, Refusal, Worker, as_json, body_of, error, reply
from asyncgrpo.errors import CommandRefused, ConfigError, DataError
from asyncgrpo.metrics import PREFIX, targets_path
from asyncgrpo.recording.events import read_tail
from asyncgrpo.recording.samples import TRAINED, Folder, Only, Sort, search

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMMAND_S = 60.0
"""Deadline of a command."""
READ_S = 20.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PAGE = Path(__file__).parent / "page"
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


class Page(Struct, frozen=True):
    """A runbook."""

    text: str


# -- the API -----------------------------------------------------------------------------------------------------------


class Api:
    """The admin API of one run, in a thread of its own."""

    def __init__(self, operator: Operator, run_dir: Path, *, bind: str, port: int, token: str) -> None:
        """
        Args:
            bind: address to listen at. On loopback only requests that name loopback are served (DNS rebinding).
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
            app.router.add_get(path, do, allow_head=False, expect_handler=_no_continue)
        app.router.add_post("/api/command", self._command, expect_handler=_no_continue)
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
        """Serve a request that names this host and has the token. Anything else gets one sentence."""
        try:
            self._check_host(request)
            if request.match_info.handler not in self._open.values():
                self._check_token(request)
            return await handler(request)
        except Refusal as refusal:
            return error(refusal.status, str(refusal))
        except CommandRefused as refused:
            return error(409, str(refused))
        except DataError as problem:
            return error(404, str(problem))
        except web.HTTPMethodNotAllowed as wrong:
            allowed = ", ".join(sorted(wrong.allowed_methods))
            return error(405, f"{request.path[:100]} is asked with {allowed}, not with {request.method[:20]}")
        except web.HTTPNotFound:
            return error(404, f"there is nothing at {request.path[:100]!r}")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error(500, "the run's driver failed; see its log")

    def _check_host(self, request: web.Request) -> None:
        """A page elsewhere whose name was made to resolve to us (DNS rebinding) names its own host."""
        named = request.headers.getall("Host", [])
        try:
            host, origin = urlsplit(f"//{','.join(named)}"), urlsplit(request.headers.get("Origin", ""))
            hosts = host.hostname
            same = not request.headers.get("Origin") or origin.netloc == host.netloc
        except ValueError:
            raise Refusal(400, "the header Host is malformed") from None
        if len(named) != 1 or hosts is None:
            raise Refusal(400, "one header Host is needed")
        if self._bind in LOOPBACK and hosts not in LOOPBACK:
            raise Refusal(403, f"this is 127.0.0.1, not {hosts[:100]!r}")
        if not same:
            raise Refusal(403, "requests of pages of another origin are not served")

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
            return Problems(await reads(partial(problems, run_dir, await status())))

        async def runbook(asked: _OfRunbook) -> Page:
            return Page(await reads(partial(read_runbook, asked.name)))

        return {
            "/api/status": (_Nothing, lambda _: status()),
            "/api/events": (_OfEvents, lambda asked: reads(partial(read_tail, file, **asdict(asked)))),
            "/api/samples": (_OfSamples, lambda asked: reads(partial(search, run_dir, **asdict(asked)))),
            "/api/groups": (_Nothing, lambda _: reads(partial(groups_now, run_dir))),
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


async def _no_continue(request: web.Request) -> None:
    """Do not reply to the header `Expect` before the token is checked."""


async def _healthz(request: web.Request) -> web.Response:
    return as_json({"ok": True})


async def _file(path: Path, request: web.Request) -> web.Response:
    return reply(path.read_bytes(), _TYPES[path.suffix])


def _query(request: web.Request, kind: type[T]) -> T:
    """The parameters of a request. Raises Refusal."""
    query = request.query
    if len(query) != len(set(query)):
        raise Refusal(400, "a parameter is given twice")
    try:
        return msgspec.convert(dict(query), type=kind, strict=False)
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


# -- where groups are --------------------------------------------------------------------------------------------------

BUFFER_S = 2.0
"""Deadline of the buffer's reply."""

_LINE = re.compile(rf'^{PREFIX}(\w+)(?:{{state="(\w+)"}})? (\S+)$', re.MULTILINE)


class Groups(Struct, frozen=True, kw_only=True):
    """Groups by where they are now; None where the buffer did not reply."""

    leased: int | None = None
    """Being generated and scored."""
    ready: int | None = None
    """Waiting in the buffer."""
    taken: int | None = None
    """In the learner."""
    slots: int | None = None
    """That may be leased, ready or taken at once."""
    wanted: int | None = None
    """That admission wants under way."""
    places: int | None = None
    """That the generators may work on at once."""


_NAMES = {
    ("buffer_groups", "leased"): "leased",
    ("buffer_groups", "ready"): "ready",
    ("buffer_groups", "taken"): "taken",
    ("buffer_slots", ""): "slots",
    ("groups_wanted", ""): "wanted",
    ("generator_places", ""): "places",
}


def groups_now(run_dir: Path) -> Groups:
    """Count groups by the metrics that the buffer exports: the driver has no such count. Nothing is known while it starts."""
    targets = targets_path(run_dir)
    try:
        entries = json.loads(targets.read_text(encoding="utf-8"))
        address = next(entry["targets"][0] for entry in entries if entry["labels"]["role"] == "buffer")
        token = targets.with_name("token")
        word = token.read_text(encoding="utf-8").strip() if token.exists() else None
        return groups_in(fetch(f"http://{address}/metrics", token=word, timeout_s=BUFFER_S).decode())
    except (OSError, ValueError, StopIteration):
        return Groups()


def groups_in(text: str) -> Groups:
    """Read the counts out of what a buffer exports."""
    found = {_NAMES.get((name, state)): value for name, state, value in _LINE.findall(text)}
    return Groups(**{name: round(float(value)) for name, value in found.items() if name is not None})
