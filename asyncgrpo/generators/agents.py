"""Samples completions for agents: a function of the user calls the model through an OpenAI-compatible URL.

A conversation is one sequence of tokens that only grows, as in an environment: the messages of the first call are rendered by
the chat template, and each later call must repeat the messages so far, our replies among them, and add new ones. What stands
between two turns becomes an observation. A call that does not extend the conversation is refused, and its completion fails.

What an agent sends first may be more than its row has: a system prompt, tools. So what its completion read first is kept with
it (`Played.opening`), and `rollout.with_common_prompt` makes the prompt of a group what all of them began with.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncgrpo.config.schema import Config
from asyncgrpo.data.tokenizer import with_system
from asyncgrpo.environments.base import LONGEST_REPLY, EnvironmentFailed
from asyncgrpo.environments.chat import (
    Chat,
    ChatTurn,
    Gateway,
    Message,
    Refused,
    check_sampling,
    for_template,
    message_of,
)
from asyncgrpo.environments.hosted import Hosted
from asyncgrpo.errors import DataError, EngineError, RequestError
from asyncgrpo.generators.rollout import Activities, Played
from asyncgrpo.generators.turns import Play, Sampler, Transcript, Turns, failed_in_play
from asyncgrpo.types import Completion, FinishReason, Prompt, Score

Open = Callable[[Sequence[Message], list[dict[str, Any]] | None], tuple[int, ...]]
"""See `data.tokenizer.opening`."""


@dataclass(eq=False, kw_only=True)
class AgentSampler(Sampler):
    """Samples completions for an agent."""

    agent: Hosted
    gateway: Gateway
    open_: Open
    config: Config
    """Of the run. A call may name no other sampling."""

    def of(self, prompt: Prompt, activities: Activities | None = None) -> Turns:
        """See `Sampler`."""
        turns = with_system(prompt.turns or [{"role": "user", "content": prompt.text}], self.config.data.system_prompt)
        return super().of(msgspec.structs.replace(prompt, turns=tuple(turns)), activities)

    def play(self, turns: Turns, index: int, transcript: Transcript) -> Play:
        """See `Sampler`."""
        return _AgentPlay(self, turns, index, transcript)

    async def close(self) -> None:
        """End every process of the agent, and the server."""
        await self.agent.close()
        await self.gateway.close()


class _AgentPlay(Play[AgentSampler]):
    """One completion of an agent: its conversation so far."""

    def __init__(self, sampler: AgentSampler, turns: Turns, index: int, transcript: Transcript) -> None:
        super().__init__(sampler, turns, index, transcript)
        self._opening: tuple[int, ...] = ()
        self._messages: list[Message] = []
        """The conversation, the newest reply included."""
        self._tools: list[dict[str, Any]] | None = None
        self._reason: FinishReason = "abort"
        self._refused_for = ""
        """Reason why a call was refused, after which the conversation cannot go on."""
        self._is_full = False
        """True if a call was refused because there was no room."""
        self._is_quiet = asyncio.Event()
        """No call is being answered."""
        self._is_quiet.set()
        self._engine_failure: EngineError | None = None

    async def run(self) -> Completion:
        """See `Play`."""
        access = await self._by.gateway.open(self.reply)
        running = asyncio.ensure_future(self._by.agent.run(self._turns.task, access))
        over = asyncio.ensure_future(self._is_over.wait())
        with self._turns.activities.instead("reward", of="generate"):
            try:
                await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
                was_quiet, has_returned = self._is_quiet.is_set(), running.done()
            finally:
                self._is_over.set()
                self._by.gateway.end(access)
                running.cancel()
                await self._by.engine.abort(self._transcript.turn_id)
                await self._is_quiet.wait()
                await asyncio.gather(running, return_exceptions=True)
        if self._engine_failure is not None:
            raise self._engine_failure
        return self._finished(running, was_quiet) if has_returned else self._completion("abort")

    # -- a call of the agent -------------------------------------------------------------------------------------------

    async def reply(self, chat: Chat) -> ChatTurn:
        """Sample the turn that a call of the agent asks for. Raises Refused."""
        check_sampling(chat, self._by.config.sampling)
        self._check_extends(chat)
        self._is_quiet.clear()
        try:
            self._read(chat)
            num_read = len(self._transcript.context)
            with self._turns.activities.instead("generate", of="reward"):
                turn = await self._transcript.sample(self._by.engine, chat.longest)
        except RequestError as error:
            raise self._stop(f"the engine refuses this conversation: {error}", 400) from error
        except EngineError as error:
            self._engine_failure = error
            self._is_over.set()
            raise Refused(503, "the engine failed", "server_error") from error
        finally:
            self._is_quiet.set()
        if self._is_over.is_set():
            raise Refused(404, "this episode is over", "not_found")
        if turn.finish_reason == "abort":
            raise self._stop("the engine gave this turn up", 503)
        self._reason = turn.finish_reason
        message = message_of(self._by.decode(turn.token_ids.tolist()), has_tools=chat.tools is not None)
        self._messages = [*chat.messages, message]
        reason = "tool_calls" if "tool_calls" in message else turn.finish_reason
        return ChatTurn(message, reason, num_read, len(turn.token_ids))

    def _check_extends(self, chat: Chat) -> None:
        """Refuse a call that does not go on where the conversation is, and fail the completion."""
        known = self._messages
        if self._refused_for:
            raise Refused(409, self._refused_for, "conversation")
        if self._is_over.is_set():
            raise Refused(404, "this episode is over", "not_found")
        if not self._is_quiet.is_set():
            raise self._stop("a call came before the one before it was answered; a completion is one conversation")
        if not known:
            return
        both = enumerate(zip(known, chat.messages, strict=False))
        differs = next((index for index, (ours, theirs) in both if ours != theirs), None)
        if differs is not None:
            what = f"messages[{differs}] is not what it was"
        elif len(chat.messages) <= len(known):
            what = f"{len(chat.messages)} messages came after {len(known)}, and at least one must be new"
        elif chat.tools != self._tools:
            what = "the tools are not those of the first call"
        else:
            return
        raise self._stop(f"{what}; send all earlier messages and replies as they were, and new ones behind them")

    def _stop(self, why: str, status: int = 409) -> Refused:
        self._refused_for = why
        return Refused(status, why, "conversation")

    def _read(self, chat: Chat) -> None:
        """Append the new messages of a call. Raises Refused: they do not fit, or the template does not take them."""
        new = chat.messages[len(self._messages) :]
        if (size := sum(len(one["content"]) for one in new)) > LONGEST_REPLY:
            raise Refused(413, f"new messages of {size:,} characters; at most {LONGEST_REPLY:,} may come at once")
        if len(self._transcript.turns) >= (most := self._by.config.environment.max_turns):
            raise self._no_room(f"this completion has had its {most} turns (environment.max_turns)")
        try:
            if self._messages:
                token_ids = self._by.continue_(for_template(new), self._transcript.last_token)
                if not self._transcript.observe(token_ids):
                    count, room = len(token_ids), self._transcript.room
                    raise self._no_room(
                        f"{count} new tokens leave no room for a turn: {room} are left (sampling.max_tokens)"
                    )
            else:
                self._open(chat)
        except DataError as error:
            raise Refused(400, str(error)) from error

    def _open(self, chat: Chat) -> None:
        opening = self._by.open_(for_template(chat.messages), chat.tools)
        longest = self._by.config.data.max_prompt_tokens
        if len(opening) > longest:
            why = f"the first messages and tools have more than {longest} tokens; raise data.max_prompt_tokens"
            raise Refused(400, why, "context_length_exceeded")
        if len(opening) < 2 or opening[0] != self._transcript.context[0]:
            raise Refused(400, "the messages begin with another token than the row's prompt; set data.system_prompt")
        self._opening, self._tools = opening, chat.tools
        self._transcript = self._transcript.of_prompt(opening)

    def _no_room(self, why: str) -> Refused:
        self._is_full = True
        return Refused(400, why, "context_length_exceeded")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finished(self, running: "asyncio.Future[Score | None]", was_quiet: bool) -> Completion:
        """The completion of an agent that returned, or raised.

        Args:
            was_quiet: no call was being answered.
        """
        error, score, failure = running.exception(), None, ""
        if error is None:
            score = running.result()
        elif not isinstance(error, EnvironmentFailed):
            raise error
        if self._refused_for:
            failure = self._refused_for
        elif not was_quiet:
            failure = "the agent returned before its call of the model was answered"
        elif error is not None and not self._is_full:
            failure = str(error)
        elif not self._transcript.turns:
            failure = "the agent returned without a call of the model"
        elif score is not None and score.failure is not None:
            failure = f"{score.failure}: {score.detail}"
        made = self._completion("abort" if failure else "length" if self._is_full else self._reason)
        if failure:
            return dataclasses.replace(failed_in_play(made, failure, self._by.tally), opening=self._opening)
        if error is not None and self._by.config.reward.function is None:  # it gave up where there was no room
            score = Score(value=0.0)
        return dataclasses.replace(made, score=score)

    def _completion(self, reason: FinishReason) -> Played:
        made = self._transcript.completion(self._index, reason)
        return Played(**vars(made), score=None, opening=self._opening)
