"""An aiohttp application in a thread of its own, which no client can make slow, large or silent.

Whatever goes wrong with a request that can be read ends in `{"error": "one sentence"}` and a status of 4xx. Bounds:
`CONNECTIONS` at once, a body of `LARGEST_BODY`, `REQUEST_S` for headers and again for the body.
"""

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from aiohttp import web

log = logging.getLogger(__name__)

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
    """Return `value` as JSON."""
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
    except web.RequestPayloadError:
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
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=waiting)
        self._timeout_s = timeout_s
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return or raise what `call` does. Raises Refusal if it is not done in time, or the queue is full."""
        future = concurrent.futures.Future[T]()
        waited = asyncio.wrap_future(future)

        def work() -> None:
            if not future.set_running_or_notify_cancel():  # its caller has gone
                return
            try:
                future.set_result(call())
            except Exception as problem:
                future.set_exception(problem)

        try:
            self._calls.put_nowait(work)
        except queue.Full:
            raise Refusal(429, "this run has too many requests at once; try again later") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waited
        except TimeoutError:
            raise Refusal(
                504, f"the run's driver did not reply within {self._timeout_s:g} s and may still do it"
            ) from None


class _Rejected(asyncio.Protocol):
    """Closes a connection over the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class HttpServer:
    """Serves an application from a daemon thread, whose event loop its handlers must not block."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=REQUEST_S,
            lingering_time=0.2,
            access_log=None,
            auto_decompress=False,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError: the address cannot be bound."""
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result(START_S)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Close every connection and end the thread. A request that is being served gets a second."""
        if self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(3.0)
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(3.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in (left := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _listen(self, host: str, port: int) -> int:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None

        def connection() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < CONNECTIONS else _Rejected()

        self._listener = await self._loop.create_server(connection, host, port)
        return self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._listener.close()
        await self._runner.cleanup()
