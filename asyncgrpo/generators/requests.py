"""The bookkeeping of requests that our own engines (`torch`, `fake`) share: who waits for what, and which weights
sampled which token. A request ends in exactly one of three ways: every answer is delivered, it is aborted (every
answer is still delivered), or it fails and whoever waits for it is told why.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import numpy as np

from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.types import Completion, FinishReason, Sampling, VersionSpan, WeightVersion


class Request:
    """A prompt and the answers somebody waits for."""

    def __init__(self, request_id: str, prompt: tuple[int, ...], num_answers: int, sampling: Sampling, seed: int):
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.answers = [Answer(self, index, seed + index) for index in range(num_answers)]
        # Bounded by what is asked for: `num_answers` completions, or one failure.
        self._results: asyncio.Queue[Completion | EngineError] = asyncio.Queue()

    def fail(self, failure: EngineError) -> None:
        """Whoever waits gets this error instead of the answers that are still missing."""
        self._results.put_nowait(failure)

    def deliver(self, completion: Completion) -> None:
        self._results.put_nowait(completion)

    async def completions(self) -> AsyncIterator[Completion]:
        """Each answer as soon as it is complete. Once the request has failed, raises the failure's kind of EngineError."""
        for _ in self.answers:
            result = await self._results.get()
            if isinstance(result, EngineError):
                raise type(result)(str(result)) from result
            yield result


class Answer:
    """One answer of a request while it is sampled."""

    def __init__(self, request: Request, index: int, seed: int):
        self.request = request
        self.index = index
        self.seed = seed
        self.is_complete = False
        self._starts: list[tuple[WeightVersion, int]] = []

    def sampled_by(self, version: WeightVersion, start: int) -> None:
        """Tokens from `start` on are sampled by `version`, until the next call. `start` never decreases."""
        if self._starts and self._starts[-1][1] == start:
            self._starts.pop()  # that version sampled nothing
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, start))

    def complete(
        self, token_ids: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray, reason: FinishReason
    ) -> None:
        """Hand the finished answer to whoever waits for it."""
        assert not self.is_complete, f"answer {self.index} of request {self.request.request_id} ended twice"
        self.is_complete = True
        length = len(token_ids)
        ends = [start for _, start in self._starts[1:]] + [length]
        self.request.deliver(
            Completion(
                index=self.index,
                token_ids=np.array(token_ids, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                spans=tuple(
                    VersionSpan(version, start, end)
                    for (version, start), end in zip(self._starts, ends, strict=False)
                    if start < end
                ),
                finish_reason=reason,
            )
        )


def check_request(request: Request, *, vocab_size: int, max_context: int) -> None:
    """Refuse what cannot be sampled, before it can hurt the requests that share its batch. Raises RequestError."""

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise RequestError(f"request {request.request_id}: {problem}")

    prompt, sampling = request.prompt, request.sampling
    require(len(request.answers) >= 1, "num_answers must be at least 1")
    require(len(prompt) >= 1, "the prompt is empty")
    for token in (min(prompt), max(prompt)):
        require(0 <= token < vocab_size, f"prompt token {token} is outside the vocabulary of {vocab_size}")
    require(
        len(prompt) < max_context, f"the prompt of {len(prompt)} tokens leaves no room in max_context ({max_context})"
    )
    require(sampling.max_tokens >= 1, f"max_tokens ({sampling.max_tokens}) must be at least 1")
    require(
        0 <= sampling.temperature < math.inf, f"temperature ({sampling.temperature}) must be finite and not negative"
    )
    require(0 < sampling.top_p <= 1, f"top_p ({sampling.top_p}) must be above 0 and at most 1")
    require(
        sampling.top_k == -1 or sampling.top_k >= 1, f"top_k ({sampling.top_k}) must be at least 1, or -1 for no limit"
    )
