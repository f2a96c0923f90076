"""Builds the sampler of several turns, and imports it only if the configuration has an environment or an agent."""

import os
from typing import TYPE_CHECKING

from asyncgrpo.config.schema import Config
from asyncgrpo.data.tokenizer import continuation, decoder, opening
from asyncgrpo.engines.base import Engine
from asyncgrpo.environments.build import build_agent, build_environment, environment_scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from asyncgrpo.generators.turns import Sampler


def build_sampler(config: Config, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> "Sampler | None":
    """Build the sampler of several turns that the configuration asks for; None: a completion is one turn.

    Raises:
        ConfigError: the environment or agent cannot be loaded; one sentence.
    """
    decode, continue_ = decoder(tokenizer, keep_special=False), continuation(tokenizer)
    if (agent := build_agent(config.environment)) is not None:
        from asyncgrpo.environments.chat import Gateway
        from asyncgrpo.generators.agents import AgentSampler, Limits

        return AgentSampler(
            engine,
            agent,
            Gateway(os.path.basename(config.model.path.rstrip("/")), decoder(tokenizer, keep_special=True)),
            decode,
            opening(tokenizer),
            continue_,
            limits=Limits(
                config.sampling.temperature,
                config.sampling.top_p,
                config.data.max_prompt_tokens,
                config.environment.max_turns,
            ),
            system_prompt=config.data.system_prompt,
            unfinished_score=0.0 if config.reward.function is None else None,
        )
    if (environment := build_environment(config.environment)) is not None:
        from asyncgrpo.generators.turns import TurnSampler

        return TurnSampler(
            engine,
            environment,
            decode,
            continue_,
            max_turns=config.environment.max_turns,
            scores=environment_scores(config, environment),
        )
    return None
