"""An HTTP server on loopback that speaks OpenAI's chat completions, with an address of its own for each episode.

A client that knows an address may talk to the model in that episode, and no other can guess it. An episode that is over has no
address any more. A field of a request that would change what is sampled is refused by its name, and so is one that is unknown:
nothing that an agent asks for is left out silently.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncgrpo.config.schema import SamplingConfig
from asyncgrpo.environments.base import Access
from asyncgrpo.environments.tools import json_of, read_turn
from asyncgrpo.errors import AsyncGRPOError

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""A message of a conversation, with `role` and `content` and without empty fields."""


class Refused(AsyncGRPOError):
    """A request that is not answered, with the status of HTTP and the code of OpenAI's errors."""

    def __init__(self, status: int, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status, self.code = status, code


# -- a request ---------------------------------------------------------------------------------------------------------

Length = Annotated[int, Meta(ge=1, le=2**31)]


class Chat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for the next turn."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    temperature: float | None = None
    top_p: float | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens of the turn, if the request has a limit."""
        return min((one for one in (self.max_tokens, self.max_completion_tokens) if one is not None), default=None)


_WITHOUT_EFFECT = {
    "model", "seed", "user", "metadata", "store", "parallel_tool_calls", "service_tier", "stream_options",
}  # fmt: skip
_ONLY: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}
"""Fields of which only this value is taken."""


def read_request(body: bytes) -> Chat:
    """A request from its body. Raises Refused."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        fields = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
        for name, only in _ONLY.items():
            if fields.pop(name, only) != only:
                raise Refused(400, f"{name} is refused: the run decides how a turn is sampled and sent; leave it out")
        chat = msgspec.convert(fields, Chat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"this is not a request for a chat completion: {error}") from None
    return msgspec.structs.replace(
        chat, messages=[_message(one, index) for index, one in enumerate(chat.messages)], tools=chat.tools or None
    )


def check_sampling(chat: Chat, sampling: SamplingConfig) -> None:
    """Refuse another temperature or top_p than those of the run, under which log-probs are recorded. Raises Refused."""
    for name in ("temperature", "top_p"):
        ours, theirs = getattr(sampling, name), getattr(chat, name)
        if theirs is not None and theirs != ours:
            raise Refused(400, f"{name} {theirs:g} is refused; leave it out: sampling.{name} is {ours:g}")


_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


def _message(given: Message, index: int) -> Message:
    where = f"messages[{index}]"
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str):
        raise Refused(400, f"{where} has no role")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(400, f"{where} has a part that is not text, and only text is understood")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused(400, f"{where}.content must be a text")
    if unknown := [key for key, value in given.items() if key not in _KEPT and value not in (None, [], {}, "")]:
        raise Refused(400, f"{where} has {', '.join(map(repr, sorted(unknown)))}, which is not understood")
    kept = {key: given[key] for key in _KEPT if given.get(key) not in (None, [], "")}
    if "tool_calls" in kept:
        calls = kept["tool_calls"]
        kept["tool_calls"] = [_tool_call(one, where) for one in (calls if isinstance(calls, list) else [calls])]
    return kept | {"content": content or ""}


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    match given:
        case {"function": {"name": str(name), "arguments": str() | dict() as arguments}}:
            if isinstance(arguments, dict):  # as rows have them
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            return {"id": given.get("id"), "type": "function", "function": function}
    raise Refused(400, f"{where}.tool_calls must have function.name and function.arguments, both texts")


def for_template(messages: Sequence[Message]) -> list[Message]:
    """The messages as chat templates expect them: arguments of tool calls are objects."""
    return [
        one | {"tool_calls": [_with_object(call) for call in one["tool_calls"]]} if "tool_calls" in one else one
        for one in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json_of(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


# -- a reply -----------------------------------------------------------------------------------------------------------


class ChatTurn(NamedTuple):
    """A turn of the model, in reply to a request."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_read: int
    """Tokens that the model had read before it."""
    num_sampled: int


def message_of(text: str, *, has_tools: bool) -> Message:
    """The message of a turn. Tool calls are read where there are tools; a turn with one that is broken is plain text."""
    turn = read_turn(text)
    if not has_tools or not turn.calls or any(call.problem for call in turn.calls):
        return {"role": "assistant", "content": text}
    calls = [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.calls
    ]
    return {"role": "assistant", "tool_calls": calls, "content": turn.text}


def reply_of(turn: ChatTurn, model: str) -> dict[str, Any]:
    message = turn.message | ({"content": turn.message["content"] or None} if "tool_calls" in turn.message else {})
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": turn.num_read,
            "completion_tokens": turn.num_sampled,
            "total_tokens": turn.num_read + turn.num_sampled,
        },
    }


# -- the server --------------------------------------------------------------------------------------------------------


LARGEST_BODY = 16 * 2**20
_HEADERS = {"x-should-retry": "false"}
"""OpenAI's client would retry a request that is refused with 409, or failed."""


Conversation = Callable[[Chat], Awaitable[ChatTurn]]
"""The model in one episode: returns its next turn. Raises Refused."""


class Gateway:
    """The server. It listens on the event loop of the first `open`."""

    def __init__(self, model: str) -> None:
        """
        Args:
            model: its name in replies.
        """
        self._model = model
        self._episodes: dict[str, Conversation] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def open(self, conversation: Conversation) -> Access:
        """Open an address at which this conversation goes on, until `end`."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._start()
        key = secrets.token_urlsafe(24)
        self._episodes[key] = conversation
        port = self._runner.addresses[0][1]
        return Access(base_url=f"http://127.0.0.1:{port}/{key}/v1", api_key=key, model=self._model)

    def end(self, access: Access) -> None:
        del self._episodes[access.api_key]

    async def close(self) -> None:
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
            return _refusal(Refused(400, "the body does not match its headers"))
        except Exception:
            log.exception("a call of an agent failed")
            return _refusal(Refused(500, "the generator could not reply; see its log", "server_error"))

    async def _reply_to(self, request: web.Request) -> web.StreamResponse:
        conversation = self._episodes.get(request.match_info.get("key", ""))
        if conversation is None:
            raise Refused(404, "the episode does not exist, or it is over", "not_found")
        match request.method, request.match_info["what"].rstrip("/"):
            case "GET", "models":
                card = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncgrpo"}
                return _json({"object": "list", "data": [card]})
            case "POST", "chat/completions":
                chat = read_request(await request.read())
                return _json(reply_of(await conversation(chat), self._model))
        raise Refused(404, "only POST chat/completions and GET models are here", "not_found")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=_HEADERS
    )


def _refusal(refused: Refused) -> web.Response:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    body = {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}
    return _json(body, refused.status)
