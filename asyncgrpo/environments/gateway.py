"""An HTTP server on loopback that speaks OpenAI's chat completions, with an address of its own for each episode.

Who knows an address may talk to the model in that episode, and nobody else can guess it. An episode that is over has no
address any more.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncgrpo.environments.base import Access
from asyncgrpo.environments.chat import Chat, Refused, Said, events_of, read_request, reply_of

log = logging.getLogger(__name__)

LARGEST_BODY = 16 * 2**20
_HEADERS = {"x-should-retry": "false"}
"""The client of OpenAI would repeat a request that is refused with 409, or failed."""


class Conversation(Protocol):
    """What replies in one episode."""

    async def reply(self, chat: Chat) -> Said:
        """The next turn of the model. Raises Refused."""


class Gateway:
    """The server. It listens on the event loop of the first `open`."""

    def __init__(self, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        """
        Args:
            model: its name, for those who ask.
            decode: the text of a token, special ones kept.
        """
        self._model, self._decode = model, decode
        self._episodes: dict[str, Conversation] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def open(self, conversation: Conversation) -> Access:
        """An address at which this conversation goes on, until `end`."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._start()
        key = secrets.token_urlsafe(24)
        self._episodes[key] = conversation
        port = self._runner.addresses[0][1]
        return Access(base_url=f"http://127.0.0.1:{port}/{key}/v1", api_key=key, model=self._model)

    def end(self, access: Access) -> None:
        """The address is of no use any more."""
        del self._episodes[access.api_key]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{key}/v1/{what:.*}", self._handle)
        app.router.add_route("*", "/{rest:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._reply_to(request)
        except Refused as refused:
            return _refusal(refused)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(Refused(413, f"the request is longer than {LARGEST_BODY} bytes"))
        except (web.RequestPayloadError, ConnectionError):
            return _refusal(Refused(400, "the body is not what its headers say"))
        except Exception:
            log.exception("a call of an agent failed")
            return _refusal(Refused(500, "the generator could not reply; its log says why", "server_error"))

    async def _reply_to(self, request: web.Request) -> web.StreamResponse:
        conversation = self._episodes.get(request.match_info.get("key", ""))
        if conversation is None:
            raise Refused(404, "there is no such episode, or it is over", "not_found")
        match request.method, request.match_info["what"].rstrip("/"):
            case "GET", "models":
                card = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncgrpo"}
                return _json({"object": "list", "data": [card]})
            case "POST", "chat/completions":
                chat = read_request(await request.read())
                found = reply_of(await conversation.reply(chat), chat, self._model, self._decode)
                if chat.stream:
                    return web.Response(body=events_of(found, chat), content_type="text/event-stream", headers=_HEADERS)
                return _json(found)
        raise Refused(
            404, "there are POST chat/completions and GET models here, and nothing else of OpenAI's API", "not_found"
        )


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=_HEADERS
    )


def _refusal(refused: Refused) -> web.Response:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    body = {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}
    return _json(body, refused.status)
