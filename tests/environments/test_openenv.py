"""A server that speaks OpenEnv's protocol is an environment; what goes wrong with it fails its episode by name.

The server here does what openenv-core 0.3's does: sessions on WebSockets, `max_concurrent_envs` of them at once.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from asyncgrpo.config.schema import EnvironmentConfig
from asyncgrpo.environments.base import EnvironmentFailed, Reply, task_of
from asyncgrpo.environments.build import build_environment
from asyncgrpo.environments.openenv import OpenEnv, text_field_at
from asyncgrpo.errors import ConfigError
from tests.environments.test_environments import said
from tests.rewards.conftest import prompt

TASK = task_of(prompt(info={"number": 7}), 3)


class Server:
    """Guess a number: `{"text": ...}` is an action."""

    def __init__(self, sessions: int = 8, **fields: str) -> None:
        self.sessions, self.open, self.resets = sessions, 0, list[dict[str, Any]]()
        self.fields = fields or {"text": "string"}

    async def schema(self, request: web.Request) -> web.Response:
        properties = {name: {"type": kind} for name, kind in self.fields.items()} | {"metadata": {"type": "object"}}
        return web.json_response({"action": {"properties": properties}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open == self.sessions:
            await socket.send_json({"type": "error", "data": {"message": "all taken", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        try:
            async for message in socket:
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                await socket.send_str(await self.answer(asked["type"], asked["data"]))
        finally:
            self.open -= 1
        return socket

    async def answer(self, kind: str, data: dict[str, Any]) -> str:
        if kind == "reset":
            self.resets.append(data)
            return self.seen("guess")
        text = data.get("text", data.get("number"))
        match text:
            case "refused":
                return self.error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "text is no digit"}])
            case "boom":
                return self.error("EXECUTION_ERROR", "boom")
            case "nonsense":
                return "[1]"
            case "hang":
                await asyncio.sleep(1000)
        hit = str(text) == str(self.resets[-1]["number"])
        return self.seen("yes" if hit else "no", reward=float(hit), done=hit)

    def seen(self, text: str, **more: Any) -> str:
        return json.dumps({"type": "observation", "data": {"observation": {"text": text}, "done": False} | more})

    def error(self, code: str, message: str, **more: Any) -> str:
        return json.dumps({"type": "error", "data": {"code": code, "message": message} | more})


@asynccontextmanager
async def served(server: Server, timeout_s: float = 10.0) -> AsyncIterator[OpenEnv]:
    app = web.Application()
    app.add_routes([web.get("/schema", server.schema), web.get("/ws", server.session)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = EnvironmentConfig(name=f"openenv:http://127.0.0.1:{runner.addresses[0][1]}/", timeout_s=timeout_s)
    made = await asyncio.to_thread(build_environment, config)
    assert isinstance(made, OpenEnv) and config.files == ()
    yield made
    await made.close()
    await runner.cleanup()


async def test_an_episode_is_a_session_of_the_server():
    server = Server()
    async with served(server) as environment:
        episode = environment.episode(TASK)
        assert await episode.reset() == Reply(messages=said("guess"))
        assert server.resets == [{"seed": 3, "number": 7}] and server.open == 1
        assert await episode.step("3") == Reply(messages=said("no"), reward=0.0)
        found = await episode.step("refused")
        assert found == Reply(messages=said("error: Invalid message; text is no digit"), reward=0.0)
        assert await episode.step("7") == Reply(messages=said("yes"), reward=1.0, done=True)
        await episode.close()
        while server.open:
            await asyncio.sleep(0.01)


async def test_actions_of_several_fields_are_json():
    async with served(Server(number="integer", text="string")) as environment:
        episode = environment.episode(TASK)
        await episode.reset()
        for no_object in ("seven", "[7]"):
            assert "an action is a JSON object" in (await episode.step(no_object)).messages[0]["content"]
        assert (await episode.step('{"number": 7}')).done
        await episode.close()


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("boom", "EXECUTION_ERROR: boom"),
        ("nonsense", "does not follow the protocol of OpenEnv"),
        ("hang", "did not reply to step within 0.5 s"),
    ],
)
async def test_what_goes_wrong_fails_the_episode_by_name(turn, why):
    async with served(Server(), timeout_s=0.5) as environment:
        episode = environment.episode(TASK)
        await episode.reset()
        with pytest.raises(EnvironmentFailed, match=why):
            await episode.step(turn)
        await episode.close()


async def test_an_episode_waits_for_a_free_session():
    async with served(Server(sessions=1)) as environment:
        first, second = environment.episode(TASK), environment.episode(TASK)
        await first.reset()
        waiting = asyncio.ensure_future(second.reset())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await first.close()
        assert await waiting == Reply(messages=said("guess"))
        await second.close()
    async with served(Server(sessions=0), timeout_s=0.5) as environment:
        with pytest.raises(EnvironmentFailed, match=r"did not reply to reset within 0.5 s.*max_concurrent_envs"):
            await environment.episode(TASK).reset()


async def test_a_server_that_goes_away_fails_its_episodes_by_name():
    async with served(Server()) as environment:
        episode = environment.episode(TASK)
        await episode.reset()
    with pytest.raises(EnvironmentFailed, match="http:"):
        await episode.step("3")
    with pytest.raises(EnvironmentFailed, match="http:"):
        await OpenEnv(environment.url, timeout_s=1.0, text_field="text").episode(TASK).reset()
    with pytest.raises(ConfigError, match=r"environment.name: http://127.0.0.1.* cannot be reached .*start the"):
        build_environment(EnvironmentConfig(name=f"openenv:{environment.url}"))


async def test_a_server_that_speaks_no_http_is_refused_in_a_sentence():
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"no OpenEnv server replies at .*SSH"):
            await asyncio.to_thread(text_field_at, url)
