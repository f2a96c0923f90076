"""Builds the environment or agent that a configuration names."""

import json

from asyncgrpo.config.schema import Config, EnvironmentConfig, changed
from asyncgrpo.environments.hosted import AGENT, AGENT_CALLS, Hosted, Ready, check_environment
from asyncgrpo.environments.openenv import OpenEnv, text_field_at
from asyncgrpo.environments.tools import BUILTIN, SPEC
from asyncgrpo.errors import ConfigError, RewardError
from asyncgrpo.guests import START_TIMEOUT_S

Environment = Hosted | OpenEnv
"""An environment makes an `episode` for each completion.

Its `scores` is true if the sum of its rewards is the score of a completion; otherwise a reward scores it, as without
environment. `about` describes it in messages. An episode begins with `reset`, called once; `step` replies to a turn of the
model; `close` ends it, finished or not, and releases what it holds. All raise EnvironmentFailed.
"""


def build_environment(config: EnvironmentConfig) -> Environment | None:
    """The environment, or None where a completion is one turn. Blocks while a user's file is imported.

    Raises:
        ConfigError: the environment is unknown, or its class cannot be used; one sentence.
    """
    if config.name is None and not config.tools:
        return None
    if config.name is not None and config.tools:
        raise ConfigError("environment.name and environment.tools are both given; leave one of them out")
    if config.url is not None:
        return OpenEnv(config.url, timeout_s=config.timeout_s, text_field=text_field_at(config.url))
    if config.name is not None and config.name not in BUILTIN and not config.files:
        known = f"{', '.join(BUILTIN)}, FILE.py, FILE.py:CLASS and openenv:http://HOST:PORT"
        raise ConfigError(f"environment.name: unknown environment {config.name}; there are {known}")
    key, spec = _key_and_spec(config)
    ready = _checked(key, spec, config)
    return Hosted(spec, processes=config.processes, timeout_s=config.timeout_s, ready=ready)


def build_agent(config: EnvironmentConfig) -> Hosted | None:
    """The agent that calls the model, or None where there is none. Blocks while its file is imported.

    Raises:
        ConfigError: the file or function does not exist, or it takes something unknown; one sentence.
    """
    if config.agent is None:
        return None
    spec = AGENT + config.agent
    ready = _checked("environment.agent", spec, config)
    return Hosted(spec, processes=config.processes, timeout_s=AGENT_CALLS * config.timeout_s, ready=ready)


def environment_scores(config: Config, environment: Environment | None) -> bool:
    """Return True if the environment's rewards are the score: it has some, and `reward.function` is not set."""
    return environment is not None and environment.scores and config.reward.function is None


def with_tools(config: Config) -> Config:
    """Return `config` with the tools that the model may call in `data.chat_template_kwargs`, unless it has some.

    Raises:
        ConfigError: a tool cannot be described; one sentence.
    """
    given = config.data.chat_template_kwargs
    if not config.environment.tools or "tools" in given:
        return config
    tools = _checked(*_key_and_spec(config.environment), config.environment, with_schemas=True).tools
    return changed(config, {"data.chat_template_kwargs": given | {"tools": tools}})


def _key_and_spec(config: EnvironmentConfig) -> tuple[str, str]:
    """Return the key that names the environment, and its specification for `hosted.load`."""
    if config.name is not None:
        return "environment.name", config.name
    return "environment.tools", SPEC + json.dumps(config.tools)


def _checked(key: str, spec: str, config: EnvironmentConfig, *, with_schemas: bool = False) -> Ready:
    timeout_s = max(START_TIMEOUT_S, config.timeout_s)
    try:
        return check_environment(spec, timeout_s=timeout_s, with_schemas=with_schemas)
    except RewardError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from error
