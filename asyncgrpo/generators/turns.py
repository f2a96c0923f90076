"""Completions of several turns: the model samples a turn, the environment replies, and the model reads the reply.

A completion is one growing sequence of tokens. Each turn is a request to the engine, whose prompt is the exact token ids so
far, so sampled text is never tokenized again. The token ids of a reply are an `Observation` between the sampled tokens.
Each turn keeps the versions of the weights that sampled it.
"""

import asyncio
import logging
import os
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from asyncgrpo.config.schema import Config
from asyncgrpo.data.tokenizer import continuation, decoder, opening
from asyncgrpo.engines.base import Engine
from asyncgrpo.environments.base import EnvironmentFailed, task_of
from asyncgrpo.environments.build import Environment, build_agent, build_environment, environment_scores
from asyncgrpo.errors import DataError, RequestError
from asyncgrpo.generators.rollout import Activities, Decode, Played
from asyncgrpo.rewards.base import IN_ENVIRONMENT, LARGEST, failed, kind_of
from asyncgrpo.rewards.breaker import Tally
from asyncgrpo.types import Completion, FinishReason, KeptTokens, Observation, Prompt, Sampling, Score, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


# -- a completion while it grows ---------------------------------------------------------------------------------------

TURN_STRIDE = 2**48
"""Distance between the seeds of two turns: larger than the range of seeds in a group."""


class Transcript:
    """A growing sequence of tokens: a prompt, sampled turns, and observations between them."""

    def __init__(self, request_id: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        """
        Args:
            request_id: of the completion. Each turn is a request of its own.
            sampling: `max_tokens` bounds all turns and observations together.
        """
        self._request_id, self._sampling, self._seed = request_id, sampling, seed
        self.context, self._start = list(prompt), len(prompt)
        """Tokens that the model has read or sampled, prompt included; how many are of the prompt."""
        self.turns: list[Completion] = []
        self._spans: list[VersionSpan] = []
        self._observations: list[Observation] = []
        self._sampled = 0
        self.turn_id = ""
        """Request id of the newest turn."""

    @property
    def room(self) -> int:
        """Tokens that may follow."""
        return self._sampling.max_tokens - (len(self.context) - self._start)

    def of_prompt(self, prompt: Sequence[int]) -> "Transcript":
        """Return an empty transcript of this completion for another prompt."""
        return Transcript(self._request_id, prompt, self._sampling, self._seed)

    @property
    def last_token(self) -> int | None:
        """The last sampled token; None: nothing was sampled."""
        return next((int(turn.token_ids[-1]) for turn in reversed(self.turns) if len(turn.token_ids)), None)

    async def sample(self, engine: Engine, max_tokens: int | None = None) -> Completion:
        """Sample the next turn. Raises the engine's exceptions.

        Args:
            max_tokens: of this turn, capped by `room`.
        """
        self.turn_id = f"{self._request_id}.{len(self.turns)}"
        room = self.room if max_tokens is None else min(self.room, max_tokens)
        sampling, context = msgspec.structs.replace(self._sampling, max_tokens=room), tuple(self.context)
        seed = self._seed + len(self.turns) * TURN_STRIDE
        known = sum(map(len, self._routes()))
        turns = engine.generate(self.turn_id, context, 1, sampling, seed, routes_from=known)
        (turn,) = [one async for one in turns]
        self.turns.append(turn)
        for span in turn.spans:
            start, end = span.start + self._sampled, span.end + self._sampled
            if self._spans and self._spans[-1].version == span.version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(span.version, start, end))
        self._sampled += len(turn.token_ids)
        self.context += turn.token_ids.tolist()
        return turn

    def observe(self, token_ids: Sequence[int]) -> bool:
        """Append an observation. Return False, without appending, if no room for a turn would remain."""
        if len(token_ids) >= self.room:
            return False
        if token_ids:
            self._observations.append(Observation(self._sampled, np.array(token_ids, np.int32)))
            self.context += token_ids
        return True

    def completion(self, index: int, reason: FinishReason) -> Completion:
        """Return the transcript as a completion."""
        return Completion(
            index=index,
            token_ids=np.concatenate([np.empty(0, np.int32), *(turn.token_ids for turn in self.turns)]),
            logprobs=np.concatenate([np.empty(0, np.float32), *(turn.logprobs for turn in self.turns)]),
            spans=tuple(self._spans),
            finish_reason=reason,
            observations=tuple(self._observations),
            kept=self._kept(),
            routes=np.concatenate(routes) if (routes := self._routes()) else None,
        )

    def _routes(self) -> list[np.ndarray]:
        """Return the recorded experts, in order: a turn has those of the tokens that no earlier one has."""
        return [turn.routes for turn in self.turns if turn.routes is not None]

    def _kept(self) -> KeptTokens | None:
        kept = [turn.kept for turn in self.turns if len(turn.token_ids)]
        if not kept or any(one is None for one in kept):
            return None
        return KeptTokens(*(np.concatenate(parts) for parts in zip(*filter(None, kept), strict=True)))


# -- environments ------------------------------------------------------------------------------------------------------

Continue = Callable[[Sequence[dict[str, Any]], int | None], tuple[int, ...]]
"""See `data.tokenizer.continuation`."""
S = TypeVar("S", bound="Sampler")


@dataclass(eq=False, kw_only=True)
class Sampler:
    """Samples completions of several turns with one engine: in an environment, or for an agent."""

    engine: Engine
    decode: Decode
    continue_: Continue
    tally: Tally = field(default_factory=Tally)
    """Failure counts, which limit logging."""

    def of(self, prompt: Prompt, activities: Activities | None = None) -> "Turns":
        """Return the source of completions of a prompt.

        Args:
            activities: counts completions that wait for an environment or agent as scoring instead of sampling.
        """
        return Turns(self, prompt, activities or Activities())

    def play(self, turns: "Turns", index: int, transcript: Transcript) -> "Play[Any]":
        """Return completion `index` of a request, with an empty transcript for its prompt."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every process."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class TurnSampler(Sampler):
    """Samples completions in an environment."""

    environment: Environment
    max_turns: int
    """Maximum number of turns of the model per completion."""
    scores: bool
    """True if the environment's rewards are the score."""

    def play(self, turns: "Turns", index: int, transcript: Transcript) -> "Play[Any]":
        """See `Sampler`."""
        return _EnvironmentPlay(self, turns, index, transcript)

    async def close(self) -> None:
        """End every process of the environment."""
        await self.environment.close()


class Turns:
    """Samples the completions of one prompt turn by turn: in place of an engine."""

    def __init__(self, sampler: Sampler, prompt: Prompt, activities: Activities) -> None:
        self.sampler, self.activities = sampler, activities
        self.prompt, self.task = prompt, task_of(prompt, zlib.crc32(prompt.prompt_id.encode()))
        self._playing: dict[str, list[Play[Any]]] = {}

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        num_completions: int,
        sampling: Sampling,
        seed: int,
        images: tuple[str, ...] = (),
    ) -> AsyncIterator[Completion]:
        """See `Engine.generate`. There are no images. `max_tokens` bounds all turns and observations of a completion together.

        Completions that their environment scored, or that failed there, are `Played`.
        """
        plays = [
            self.sampler.play(self, i, Transcript(f"{request_id}.{i}", prompt, sampling, seed + i))
            for i in range(num_completions)
        ]
        self._playing[request_id] = plays
        tasks = [asyncio.create_task(play.run()) for play in plays]
        refused: RequestError | None = None
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    yield await done
                except RequestError as error:
                    refused = error
            if refused is not None:
                raise refused
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            del self._playing[request_id]

    async def abort(self, request_id: str) -> None:
        """End a request early: its completions are yielded as they are. An unknown id is ignored."""
        for play in self._playing.get(request_id, ()):
            await play.abort()


class Play(Generic[S]):
    """A completion that is sampled turn by turn."""

    def __init__(self, sampler: S, turns: Turns, index: int, transcript: Transcript) -> None:
        self._by, self._turns, self._index, self._transcript = sampler, turns, index, transcript
        self._is_over = asyncio.Event()
        """The request is aborted, or the completion is over."""

    async def run(self) -> Completion:
        """Play to the end. Raises RequestError if the prompt is refused, EngineError if the engine fails."""
        raise NotImplementedError

    async def abort(self) -> None:
        """End it early: `run` returns the transcript so far."""
        self._is_over.set()
        await self._by.engine.abort(self._transcript.turn_id)


class _EnvironmentPlay(Play[TurnSampler]):
    _reward: float | None = None

    async def run(self) -> Completion:
        """See `Play`."""
        episode = self._by.environment.episode(self._turns.task)
        failure = ""
        reason: FinishReason = "abort"
        try:
            reply = await self._unless_aborted(episode.reset())
            if reply is not None:
                if reply.messages and not self._observe(reply.messages):
                    raise EnvironmentFailed("its first observation leaves no room for a turn in sampling.max_tokens")
                reason = await self._play(episode)
        except (EnvironmentFailed, DataError) as error:  # DataError: the chat template
            failure = str(error)
        finally:
            await episode.close()
        return self._completion(reason, failure)

    async def _play(self, episode: Any) -> FinishReason:
        """Alternate turns of the model and replies to them. Return the finish reason."""
        for turn in range(self._by.max_turns):
            completion = await self._turn()
            if completion is None or self._is_over.is_set():
                return "abort"
            if completion.finish_reason != "stop":
                return completion.finish_reason
            text = self._by.decode(completion.token_ids.tolist())
            reply = await self._unless_aborted(episode.step(text))
            if reply is None:
                return "abort"
            if reply.reward is not None:
                self._reward = (self._reward or 0.0) + reply.reward
                if abs(self._reward) > LARGEST:
                    raise EnvironmentFailed(f"its rewards add up to {self._reward:g}, which is beyond {LARGEST:g}")
            if reply.done:
                return "stop"
            if turn + 1 == self._by.max_turns or not self._observe(reply.messages):
                return "length"
        return "length"

    async def _turn(self) -> Completion | None:
        """Sample one turn; None: the engine refused a turn after the first."""
        try:
            return await self._transcript.sample(self._by.engine)
        except RequestError:
            if not self._transcript.turns:
                raise
            log.warning("%s was refused", self._transcript.turn_id, exc_info=True)
            return None

    def _observe(self, messages: Sequence[dict[str, str]]) -> bool:
        """Append what follows a turn, with the environment's messages. Return False if no room for a turn would remain."""
        return self._transcript.observe(self._by.continue_(messages, self._transcript.last_token))

    async def _unless_aborted(self, call: Any) -> Any:
        """Await a call of the environment; None: the request was aborted first."""
        calling, aborted = asyncio.ensure_future(call), asyncio.ensure_future(self._is_over.wait())
        try:
            with self._turns.activities.instead("reward", of="generate"):
                await asyncio.wait({calling, aborted}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._is_over.is_set() else await calling
        finally:
            calling.cancel()
            aborted.cancel()

    def _completion(self, reason: FinishReason, failure: str) -> Completion:
        made = self._transcript.completion(self._index, reason)
        if failure:
            return failed_in_play(made, failure, self._by.tally)
        if self._by.scores and reason != "abort":
            return Played(**vars(made), score=Score(value=self._reward or 0.0))
        return made


def failed_in_play(made: Completion, failure: str, tally: Tally) -> "Played":
    """Return the completion with the failure as its score; some failures are logged."""
    score = failed(IN_ENVIRONMENT, failure)
    if (count := tally.add(kind_of(score))) is not None:
        log.warning("the environment failed %d times, most recently: %s", count, failure)
    return Played(**vars(made) | {"score": score})


# -- building the sampler ----------------------------------------------------------------------------------------------


def build_sampler(config: Config, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> Sampler | None:
    """Build the sampler of several turns that the configuration asks for; None: a completion is one turn.

    Raises:
        ConfigError: the environment or agent cannot be loaded; one sentence.
    """
    decode, continue_ = decoder(tokenizer, keep_special=False), partial(continuation, tokenizer)
    if (agent := build_agent(config.environment)) is not None:
        from asyncgrpo.environments.chat import Gateway
        from asyncgrpo.generators.agents import AgentSampler

        return AgentSampler(
            engine=engine,
            decode=decode,
            continue_=continue_,
            agent=agent,
            gateway=Gateway(os.path.basename(config.model.path.rstrip("/"))),
            open_=partial(opening, tokenizer),
            config=config,
        )
    if (environment := build_environment(config.environment)) is not None:
        return TurnSampler(
            engine=engine,
            decode=decode,
            continue_=continue_,
            environment=environment,
            max_turns=config.environment.max_turns,
            scores=environment_scores(config, environment),
        )
    return None
