"""Environments that a server of OpenEnv holds (https://github.com/meta-pytorch/OpenEnv, openenv-core 0.3).

A session is a WebSocket, `{url}/ws`: `{"type": "reset" | "step" | "close", "data": ...}` is answered with an observation or an
error. `GET {url}/schema` has the fields of an action. With one text field a turn of the model is that text; otherwise a turn is
the action as a JSON object. The model reads why the server rejects an action.
"""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import msgspec

from asyncgrpo.config.reach import check_service, fetch
from asyncgrpo.environments.base import EnvironmentFailed, Reply, Task, reply_of_step
from asyncgrpo.errors import ConfigError

CHECK_S = 4.0
"""Deadline of the schema of actions."""
AGAIN_S = 0.2
"""Before a server that had no free session is asked for one again."""
_LARGEST = 8 * 2**20


class _Refused(Exception):
    """The server rejects this action; it may take another one."""


class _Full(Exception):
    """All sessions are taken."""


class OpenEnv:
    """The environment of one server. Use it from one event loop."""

    scores = True

    def __init__(self, url: str, *, timeout_s: float, text_field: str | None) -> None:
        """
        Args:
            timeout_s: of one reset or step; a reset may wait as long for a free session.
            text_field: of `text_field_at`.
        """
        self.url, self.timeout_s, self.text_field = url.rstrip("/"), timeout_s, text_field
        self.about = f"environment at {self.url}"
        self._http: aiohttp.ClientSession | None = None

    def episode(self, task: Task) -> "_Session":
        """An episode for one completion: a session of its own."""
        return _Session(self, task)

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        if self._http is None:  # here, because it belongs to the event loop
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return await self._http.ws_connect(f"{self.url}/ws", max_msg_size=_LARGEST)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class _Session:
    def __init__(self, of: OpenEnv, task: Task) -> None:
        self._of, self._task = of, task
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self) -> Reply:
        """Begin. The server gets the seed and the row's `extra_info`, of which it takes what its reset knows."""
        async with self._within("reset"):
            while True:
                self._socket = await self._of.connect()
                try:
                    return await self._ask("reset", {"seed": self._task["seed"], **self._task["info"]})
                except _Full:
                    await self._socket.close()
                    await asyncio.sleep(AGAIN_S)
                except _Refused as refused:
                    raise EnvironmentFailed(f"{self._of.url} does not take this row: {refused}") from refused
        raise AssertionError

    async def step(self, text: str) -> Reply:
        field = self._of.text_field
        try:
            action = {field: text} if field is not None else msgspec.json.decode(text, type=dict[str, Any])
            async with self._within("step"):
                return await self._ask("step", action)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            problem = f"an action is a JSON object: {error}"
        except _Refused as error:
            problem = str(error)
        return Reply(messages=({"role": "user", "content": f"error: {problem}"},), reward=0.0)

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._socket.send_str('{"type": "close"}')
                await asyncio.wait_for(self._socket.close(), AGAIN_S)

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> Any:
        try:
            async with asyncio.timeout(self._of.timeout_s):
                yield
        except TimeoutError:
            late = f"{self._of.url} did not reply to {what} within {self._of.timeout_s:g} s"
            raise EnvironmentFailed(f"{late}; has it a session for every completion (max_concurrent_envs)?") from None
        except (aiohttp.ClientError, OSError, TypeError) as error:  # TypeError: an answer that is not text
            raise EnvironmentFailed(f"{self._of.url}: {str(error) or type(error).__name__}") from error

    async def _ask(self, kind: str, data: dict[str, Any]) -> Reply:
        assert self._socket is not None
        await self._socket.send_str(json.dumps({"type": kind, "data": data}, default=str))
        try:
            answer = msgspec.json.decode(await self._socket.receive_str(), type=_Answer)
        except msgspec.MsgspecError as error:
            raise EnvironmentFailed(f"{self._of.url} does not follow the protocol of OpenEnv: {error}") from error
        data = answer.data
        if answer.type == "observation":
            return reply_of_step((_text_of(data.get("observation")), data.get("reward"), data.get("done")))
        text, code = str(data.get("message", ""))[:500], data.get("code")
        if code == "CAPACITY_REACHED":
            raise _Full(text)
        if code == "VALIDATION_ERROR":
            problems = [one.get("msg", "") for one in data.get("errors", ()) if isinstance(one, dict)]
            raise _Refused("; ".join([text, *map(str, problems)])[:500])
        raise EnvironmentFailed(f"{self._of.url}: {code}: {text}")


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any] = {}


def _text_of(observation: Any) -> str:
    """Return the text of an observation with one field, or else all of it as JSON."""
    if isinstance(observation, dict) and len(observation) == 1:
        (only,) = observation.values()
        if isinstance(only, str):
            return only
    return json.dumps(observation, ensure_ascii=False) if observation else ""


def text_field_at(url: str) -> str | None:
    """Return the only field of an action, if that is a text; None: actions are JSON objects. Blocks until the server replies.

    Raises:
        ConfigError: the server does not reply, or is not OpenEnv; one sentence.
    """
    check_service(url, "environment.name")
    try:
        schema = fetch(f"{url.rstrip('/')}/schema", timeout_s=CHECK_S, limit=_LARGEST)
        fields = dict(json.loads(schema)["action"]["properties"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"environment.name: no OpenEnv server replies at {url}: {error}; start it first") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"environment.name: {url} is not an OpenEnv server: it has no schema of actions") from error
    fields.pop("metadata", None)
    return next(iter(fields)) if len(fields) == 1 and next(iter(fields.values())).get("type") == "string" else None
