"""OpenAI's chat completions as JSON: what a request may ask, and the reply to it.

A field that would change what is sampled is refused by its name, and so is one that is unknown: nothing that an agent asks
for is left out silently.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncgrpo.environments.toolcalls import read_turn
from asyncgrpo.errors import AsyncGRPOError

Message = dict[str, Any]
"""A message of a conversation, with `role` and `content` and without fields that say nothing."""


class Refused(AsyncGRPOError):
    """A request that is not answered."""

    def __init__(self, status: int, text: str, code: str = "invalid_request") -> None:
        """
        Args:
            status: of HTTP.
            code: as OpenAI's errors have it.
        """
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
    logprobs: bool | None = None
    """Whether the reply has token ids and log-probs."""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    # Taken, and without an effect.
    model: str | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    # Taken only where they ask for nothing: see `_NOTHING`.
    n: int | None = None
    stop: str | list[str] | None = None
    tool_choice: Any = None
    response_format: Any = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens of the turn, if it says so."""
        return min((one for one in (self.max_tokens, self.max_completion_tokens) if one is not None), default=None)


_NOTHING: dict[str, tuple[Any, str]] = {
    "n": (1, "a call samples one turn; the run samples several completions by itself"),
    "stop": ([], "`sampling.stop` of the run says what ends a turn"),
    "tool_choice": ("auto", "the model chooses"),
    "response_format": ({"type": "text"}, "a turn is sampled freely"),
    "top_logprobs": (0, "only the log-prob of what was sampled is known"),
    "frequency_penalty": (0, "the learner knows log-probs without penalties only"),
    "presence_penalty": (0, "the learner knows log-probs without penalties only"),
    "logit_bias": ({}, "the learner knows log-probs without a bias only"),
}
"""The value that asks for nothing, and why another one is refused."""


def read_request(body: bytes) -> Chat:
    """A request from its body. Raises Refused."""
    try:
        chat = msgspec.json.decode(body, type=Chat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"this is no request for a chat completion: {error}") from None
    for name, (nothing, why) in _NOTHING.items():
        value = getattr(chat, name)
        if value is not None and value != nothing:
            raise Refused(400, f"{name} is refused: {why}; leave it out")
    return msgspec.structs.replace(
        chat, messages=[_message(one, index) for index, one in enumerate(chat.messages)], tools=chat.tools or None
    )


def check_sampling(chat: Chat, *, temperature: float, top_p: float) -> None:
    """Refuse another temperature or top_p than those of the run, under which log-probs are recorded. Raises Refused."""
    for name, ours in (("temperature", temperature), ("top_p", top_p)):
        theirs = getattr(chat, name)
        if theirs is not None and theirs != ours:
            raise Refused(
                400,
                f"{name} {theirs:g} is refused: the run samples with {ours:g}; leave it out, or set sampling.{name}",
            )


_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


def _message(given: Message, index: int) -> Message:
    where = f"messages[{index}]"
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str):
        raise Refused(400, f"{where} has no role")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = None if None in parts else "".join(map(str, parts))
        if content is None:
            raise Refused(400, f"{where} has a part that is no text, and only text is understood")
    if not isinstance(content, str | None):
        raise Refused(400, f"{where}.content must be a text")
    if unknown := [key for key, value in given.items() if key not in _KEPT and value not in (None, [], {}, "")]:
        raise Refused(400, f"{where} has {', '.join(map(repr, sorted(unknown)))}, which is not understood")
    kept = {key: given[key] for key in _KEPT if given.get(key) not in (None, [], "")}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_tool_call(one, where) for one in _list(kept["tool_calls"])]
    return kept | {"content": content or ""}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    match given:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
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
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


# -- a reply -----------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """A turn of the model, in reply to a request."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_read: int
    """Tokens that the model had read before it."""
    token_ids: list[int]
    logprobs: list[float]


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


def reply_of(said: Said, chat: Chat, model: str, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """The reply as OpenAI's JSON; with `token_ids` and `logprobs` where they are asked for."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": said.message | {"content": said.message["content"] or None}
        if "tool_calls" in said.message
        else said.message,
        "finish_reason": said.finish_reason,
        "logprobs": None,
    }
    if chat.logprobs:
        choice["token_ids"] = said.token_ids
        texts = [decode([token]) for token in said.token_ids]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, said.logprobs, strict=True)
            ]
        }
    sampled = len(said.token_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": said.num_read,
            "completion_tokens": sampled,
            "total_tokens": said.num_read + sampled,
        },
    }


def events_of(reply: dict[str, Any], chat: Chat) -> bytes:
    """The reply as the events of a stream: the whole turn in one, then how it ended."""
    (choice,) = reply["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index} | call for index, call in enumerate(delta["tool_calls"])]
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    first = choice | {"delta": delta, "finish_reason": None}
    del first["message"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    events = [head | {"choices": [first]}, head | {"choices": [last]}]
    if (chat.stream_options or {}).get("include_usage"):
        events.append(head | {"choices": [], "usage": reply["usage"]})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
