"""Builds what samples completions of several turns: an environment's, or an agent's."""

import os
from typing import TYPE_CHECKING

from asyncgrpo.config.schema import Config
from asyncgrpo.data.tokenizer import continuation, decoder, opening
from asyncgrpo.engines.base import Engine
from asyncgrpo.environments.build import build_agent, build_environment, environment_scores
from asyncgrpo.environments.chat import Gateway
from asyncgrpo.generators.agents import AgentSampler, Limits
from asyncgrpo.generators.turns import Sampler, TurnSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_sampler(config: Config, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> Sampler | None:
    """What samples completions beside the engine; None: a completion is one turn.

    Raises:
        ConfigError: the environment or agent cannot be loaded; one sentence.
    """
    return _agent_sampler(config, engine, tokenizer) or _turn_sampler(config, engine, tokenizer)


def _turn_sampler(config: Config, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> Sampler | None:
    """What samples completions in an environment; None: there is none."""
    environment = build_environment(config.environment)
    if environment is None:
        return None
    return TurnSampler(
        engine,
        environment,
        decoder(tokenizer, keep_special=False),
        continuation(tokenizer),
        max_turns=config.environment.max_turns,
        scores=environment_scores(config, environment),
    )


def _agent_sampler(config: Config, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> Sampler | None:
    """What samples completions for an agent; None: there is none."""
    agent = build_agent(config.environment)
    if agent is None:
        return None
    return AgentSampler(
        engine,
        agent,
        Gateway(os.path.basename(config.model.path.rstrip("/")), decoder(tokenizer, keep_special=True)),
        decoder(tokenizer, keep_special=False),
        opening(tokenizer),
        continuation(tokenizer),
        limits=Limits(
            config.sampling.temperature,
            config.sampling.top_p,
            config.data.max_prompt_tokens,
            config.environment.max_turns,
        ),
        system_prompt=config.data.system_prompt,
        unfinished_score=0.0 if config.reward.function is None else None,
    )
