"""Agent functions are called as they say, many at once; what goes wrong in one is the failure of its episode only."""

import asyncio
from pathlib import Path

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import EnvironmentConfig
from asyncgrpo.environments.base import Access, EnvironmentFailed
from asyncgrpo.environments.build import build_agent
from asyncgrpo.environments.chat import Chat, ChatTurn, Gateway
from asyncgrpo.environments.hosted import AGENT, Hosted, check_environment
from asyncgrpo.errors import ConfigError
from asyncgrpo.types import Score
from tests.environments.test_environments import task
from tests.runs import wait_until

AGENTS = Path(__file__).with_name("my_agents.py")
ACCESS = Access(base_url="u", api_key="k", model="m")


def hosted(name: str, *, timeout_s: float = 20.0) -> Hosted:
    spec = f"{AGENTS}:{name}"
    return Hosted(AGENT + spec, processes=1, timeout_s=timeout_s, ready=check_environment(AGENT + spec))


async def test_an_agent_is_called_by_the_names_it_takes():
    host = hosted("run")
    assert host.about == "agent run of my_agents.py"
    assert await host.run(task(), ACCESS) == Score(value=1.0, parts={"knows": 1.0})
    await host.close()


async def test_agents_that_are_not_async_call_the_model_at_the_same_time():
    at_once = 0

    class Model:
        async def reply(self, chat: Chat) -> ChatTurn:
            nonlocal at_once
            at_once += 1
            while at_once < 20:
                await asyncio.sleep(0.01)
            return ChatTurn({"role": "assistant", "content": chat.messages[0]["content"] * 2}, "stop", 1, 1)

    gateway, host = Gateway("m"), hosted("asks")
    access = [await gateway.open(Model().reply) for _ in range(20)]
    found = await asyncio.gather(*(host.run(task(), one) for one in access))
    assert found == [Score(value=4.0)] * 20
    await host.close()
    await gateway.close()


async def test_what_goes_wrong_is_the_failure_of_its_episode_only():
    host = hosted("does")
    assert await host.run(task(do="nothing"), ACCESS) is None
    with pytest.raises(EnvironmentFailed, match=r"my_agents.py:\d+: ValueError: no such tool"):
        await host.run(task(do="raise"), ACCESS)
    for what, failure in (("nan", "not_finite"), ("text", "bad_type")):
        found = await host.run(task(do=what), ACCESS)
        assert found is not None and found.failure == failure
    with pytest.raises(EnvironmentFailed, match="process exited with code 3"):
        await host.run(task(do="exit"), ACCESS)
    assert await host.run(task(do="nothing"), ACCESS) is None, "in another process"
    await host.close()


async def test_an_agent_that_does_not_return_is_given_up_and_one_that_is_not_wanted_is_cancelled(tmp_path):
    host = hosted("does", timeout_s=1.0)
    with pytest.raises(EnvironmentFailed, match="run did not return within 1 s"):
        await host.run(task(do="hang"), ACCESS)
    await host.close()
    host, file = hosted("waits"), tmp_path / "file"
    running = asyncio.ensure_future(host.run(task(file=str(file)), ACCESS))
    await asyncio.to_thread(wait_until, lambda: file.exists() and file.read_text() == "waits", "start of it", 20.0)
    running.cancel()
    await asyncio.to_thread(wait_until, lambda: file.read_text() == "cancelled", "end of it", 20.0)
    await host.close()


def test_a_whole_call_has_the_time_of_twenty_steps_and_there_is_an_agent_or_an_environment():
    host = build_agent(EnvironmentConfig(agent=str(AGENTS), timeout_s=2.0))
    assert host is not None and host.timeout_s == 40.0
    assert build_agent(EnvironmentConfig()) is None
    with pytest.raises(ConfigError, match="a completion has one environment"):
        load_config(None, ["environment.agent=a.py", "environment.name=guess", "model.path=m", "data.train=d"])
