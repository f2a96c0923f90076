"""Environments reply as their classes say; what goes wrong in one fails its episode by name, and nothing else."""

import asyncio
from pathlib import Path

import psutil
import pytest

from asyncgrpo.config.schema import EnvironmentConfig
from asyncgrpo.environments.base import EnvironmentFailed, Reply, Task, task_of
from asyncgrpo.environments.build import build_agent, build_environment
from asyncgrpo.environments.hosted import Hosted, check_environment
from asyncgrpo.environments.tools import calculate
from asyncgrpo.errors import ConfigError
from tests.rewards.conftest import prompt
from tests.runs import command_of, wait_until

GAMES = Path(__file__).with_name("games.py")


def task(**info) -> Task:
    return task_of(prompt(7, text="go", info=info), 11)


def said(text: str, role: str = "user") -> tuple[dict[str, str], ...]:
    return ({"role": role, "content": text},)


def hosted(name: str = "Environment", *, processes: int = 1, timeout_s: float = 20.0) -> Hosted:
    spec = f"{GAMES}:{name}"
    return Hosted(spec, processes=processes, timeout_s=timeout_s, ready=check_environment(spec))


def processes_of(_: Hosted) -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "asyncgrpo.environments" in command_of(one)]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*48", "1776"),
        ("7/2", "3.5"),
        ("7//2 + 7%2", "4"),
        ("1/0", "error: division by zero"),
        ("2**999999999", "error: not an arithmetic expression"),
        ("__import__('os')", "error: not an arithmetic expression"),
        ("1" * 300, "error: too long"),
        ("", "error: not an arithmetic expression"),
        ("(" * 90 + "1" + ")" * 90, "1"),
    ],
)
def test_the_calculator_calculates_and_nothing_else(expression, value):
    assert calculate(expression) == value


def built_in(name: str) -> Hosted:
    environment = build_environment(EnvironmentConfig(name=name))
    assert isinstance(environment, Hosted)
    return environment


async def test_a_turn_that_ends_with_an_equals_sign_is_calculated_and_any_other_is_the_answer():
    environment = built_in("calculator")
    episode = environment.episode(task())
    assert await episode.reset() == Reply()
    assert await episode.step("I need\n6*7 =\n") == Reply(messages=said("42"))
    assert await episode.step("so it is 42") == Reply(done=True)
    assert not environment.scores
    await environment.close()


async def test_guesses_are_answered_until_the_number_is_found():
    environment = built_in("guess")
    episode = environment.episode(task())
    await episode.reset()
    assert await episode.step("3") == Reply(messages=said(">"), reward=0.0)
    assert await episode.step(" 9 ") == Reply(messages=said("<"), reward=0.0)
    assert await episode.step("7") == Reply(reward=0.8, done=True)
    for lost in ("", "seven", "77", "-1", "²"):
        episode = environment.episode(task())
        await episode.reset()
        assert await episode.step(lost) == Reply(reward=0.0, done=True)
    with pytest.raises(EnvironmentFailed, match="invalid literal"):  # a row that does not fit
        await environment.episode(task_of(prompt("no number"), 0)).reset()
    await environment.close()


async def test_classes_of_users_reply_in_every_form_there_is():
    async def play(name: str, *turns: str) -> list[Reply]:
        host = hosted(name)
        episode = host.episode(task(turns=2))
        replies = [await episode.reset(), *[await episode.step(turn) for turn in turns]]
        await episode.close()
        await host.close()
        return replies

    found = await asyncio.gather(
        play("Environment", "a", "b"),
        play("Async", "abc"),
        play("Gymnasium", "on", "end"),
        play("Naughty", "print"),
        play("Bound", "a"),
    )
    assert found[0] == [
        Reply(messages=said("go 7?")),
        Reply(messages=said("heard a"), reward=0.25),
        Reply(messages=said("heard b"), reward=0.25, done=True),
    ]
    assert found[1] == [Reply(messages=said("go", "tool")), Reply(messages=said("ABC"), reward=1.0, done=True)]
    assert found[2] == [Reply(messages=said("11")), Reply(reward=1.5), Reply(reward=1.5, done=True)]
    assert found[3] == [Reply(), Reply(messages=said("fine"), reward=0.0)]
    assert found[4] == [Reply(messages=said("7 1")), Reply(done=True)]


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("raise", r"games.py:\d+: ValueError: no such place"),
        ("next", r"games.py:\d+: RuntimeError: StopIteration"),
        ("long", r"games.py:\d+: ValueError: x+$"),
        ("nan", "the reward nan is not a finite number"),
        ("done", "done must be true or false, not str 'False'"),
        ("text", "a reward must be a number, not str '0.5'"),
        ("string", r"step returned str 'only a text'; it must return \(observation, reward, done\)"),
        ("huge", "an observation of 2,097,152 characters"),
        ("deep", "an observation is a text or messages"),
    ],
)
async def test_a_bad_reply_fails_its_episode_by_name_and_the_process_lives_on(turn, why, bad_and_good):
    bad, good = bad_and_good
    with pytest.raises(EnvironmentFailed, match=why):
        await bad.step(turn)
    assert await good.step("on") == Reply(messages=said("fine"), reward=0.0)


async def test_a_text_with_half_a_pair_is_escaped(bad_and_good):
    assert (await bad_and_good[0].step("name")).messages == said("no \\udcff.txt")


async def test_an_environment_that_is_given_up_while_it_is_made_is_closed():
    host = hosted("SlowToMake")
    first, second = host.episode(task()), host.episode(task())
    beginning = asyncio.ensure_future(first.reset())
    while not host._processes:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)  # it is being made
    beginning.cancel()
    await first.close()
    await second.reset()
    assert (await second.step("how many?")).messages == said("1")
    await host.close()


async def two_in(host: Hosted):
    """Two episodes that have begun, in one process."""
    episodes = host.episode(task()), host.episode(task())
    for one in episodes:
        await one.reset()
    return episodes


@pytest.fixture
async def bad_and_good():
    host = hosted("Naughty")
    yield await two_in(host)
    await host.close()
    wait_until(lambda: not processes_of(host), "end of the environment's process", 30.0)


async def test_a_process_that_dies_fails_its_episodes_and_is_replaced():
    host = hosted("Naughty")
    first, second = await two_in(host)
    with pytest.raises(EnvironmentFailed, match="process exited with code 3"):
        await first.step("exit")
    with pytest.raises(EnvironmentFailed, match="process"):
        await second.step("on")
    for one in (first, second):
        await one.close()
    third = host.episode(task())
    await third.reset()
    assert (await third.step("on")).messages == said("fine")
    assert len(processes_of(host)) == 1
    await host.close()
    assert processes_of(host) == []


async def test_a_method_that_hangs_fails_its_episode_and_the_others_end_in_peace():
    host = hosted("Naughty", timeout_s=1.0)
    late, other = await two_in(host)
    (process,) = processes_of(host)
    with pytest.raises(EnvironmentFailed, match="step did not return within 1 s"):
        await late.step("hang")
    await late.close()
    assert (await other.step("on")).messages == said("fine"), "it lives in the same process"
    new = host.episode(task())
    await new.reset()
    assert len(processes_of(host)) == 2, "which takes no new episodes"
    await other.close()
    assert process not in processes_of(host)
    await host.close()
    assert processes_of(host) == []


async def test_episodes_are_spread_over_processes():
    host = hosted(processes=2)
    episodes = [host.episode(task()) for _ in range(4)]
    await asyncio.gather(*(one.reset() for one in episodes))
    assert len(processes_of(host)) == 2 and [len(one.episodes) for one in host._processes] == [2, 2]
    await host.close()


MINE = {what: GAMES.with_name(f"my_{what}.py") for what in ("agents", "tools")}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"name": "chess"}, "environment.name: unknown environment chess; there are calculator, guess, FILE.py"),
        ({"name": f"{GAMES}:Missing"}, "games.py has no class Missing; name one with games.py:NAME, such as Environment,"),
        ({"name": f"{GAMES}:NoStep"}, r"NoStep has no method step\(self, text\)"),
        ({"name": f"{GAMES}:OddStep"}, r"OddStep.step cannot be called as step\(text\)"),
        ({"name": f"{GAMES}:OddStatic"}, r"OddStatic.step cannot be called as step\(text\): missing a required argument"),
        ({"name": f"{GAMES}:OddReset"}, "OddReset.reset takes weather; there are prompt, messages"),
        ({"name": "guess", "tools": ("calculator",)}, "environment.name and environment.tools are both given"),
        ({"tools": ("hammer.py",)}, "environment.tools: hammer.py is not one of calculator, FILE.py:FUNCTION"),
        ({"tools": (f"{MINE['tools']}:missing",)}, "environment.tools: .*my_tools.py has no function missing"),
        ({"tools": ("calculator", "calculator")}, "environment.tools: .*names calculator twice"),
        ({"tools": (f"{MINE['tools']}:twice",)}, "my_tools.py: twice is a partial, and a tool is a function"),
        ({"agent": f"{MINE['agents']}:missing"}, "environment.agent: .*my_agents.py has no function missing; .* such as run"),
        ({"agent": f"{MINE['agents']}:alone"}, "alone takes no base_url, so it cannot reach the model that is trained"),
        ({"agent": f"{MINE['agents']}:odd"}, "odd takes weather; there are base_url, api_key, model, prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_environment_a_tool_or_an_agent_is_said_in_a_sentence(config, why):
    with pytest.raises(ConfigError, match=why):
        build_environment(EnvironmentConfig(**config)) or build_agent(EnvironmentConfig(**config))
