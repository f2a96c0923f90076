"""What a generator asks of an inference engine, whichever it is, and the bookkeeping of requests that engines share.

sampled which token. A request ends in exactly one of three ways: every answer is delivered, it is aborted (every
answer is still delivered), or it fails and whoever waits for it is told why.

An engine lives on one asyncio event loop. It samples, it says which weights sampled each token, and it changes its
weights between two tokens when told to. It knows nothing of rewards, groups, the buffer or the network.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.types import Completion, FinishReason, PolicyVersion, Sampling, VersionSpan

# -- requests ----------------------------------------------------------------------------------------------------------


class Request:
    """A prompt and the completions somebody waits for."""

    def __init__(self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int):
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.pending = [PendingCompletion(self, index, seed + index) for index in range(num_completions)]
        # Bounded by what is asked for: `num_completions` completions, or one failure.
        self._results: asyncio.Queue[Completion | EngineError] = asyncio.Queue()

    def fail(self, failure: EngineError) -> None:
        """Whoever waits gets this error instead of the completions that are still missing."""
        self._results.put_nowait(failure)

    def deliver(self, completion: Completion) -> None:
        self._results.put_nowait(completion)

    async def completions(self) -> AsyncIterator[Completion]:
        """Each completion as soon as it is complete. Once the request has failed, raises the failure's kind of EngineError."""
        for _ in self.pending:
            result = await self._results.get()
            if isinstance(result, EngineError):
                raise type(result)(str(result)) from result
            yield result


class PendingCompletion:
    """One completion of a request while it is sampled."""

    def __init__(self, request: Request, index: int, seed: int):
        self.request = request
        self.index = index
        self.seed = seed
        self.is_complete = False
        self._starts: list[tuple[PolicyVersion, int]] = []

    def sampled_by(self, version: PolicyVersion, start: int) -> None:
        """Tokens from `start` on are sampled by `version`, until the next call. `start` never decreases."""
        if self._starts and self._starts[-1][1] == start:
            self._starts.pop()  # that version sampled nothing
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, start))

    def complete(
        self, token_ids: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray, reason: FinishReason
    ) -> None:
        """Hand the finished completion to whoever waits for it."""
        assert not self.is_complete, f"completion {self.index} of request {self.request.request_id} ended twice"
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
    require(len(request.pending) >= 1, "num_completions must be at least 1")
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


# -- the protocol ------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """An inference engine, owned by one process. Build one with `generators.build_engine`.

    All methods are called on one event loop. `generate` may be called many times at once.
    """

    @property
    def version(self) -> PolicyVersion:
        """The weights that will sample the next token."""

    async def start(self, version: PolicyVersion) -> None:
        """Load the model from its folder and be ready. Its weights count as `version`. Raises EngineError."""

    def generate(
        self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        """Sample `num_completions` answers to `prompt` (token ids) and yield each as soon as it is complete, in any order.

        No request that starts after `load_weights` reuses keys and values computed under older weights. Completion i is
        seeded by `seed + i` in engines that can (`torch`, `fake`); SGLang's seeds are its own.

        Raises:
            RequestError: this request cannot be answered; others are not concerned.
            EngineError: the engine failed.
        """

    async def abort(self, request_id: str) -> None:
        """End a request: each unfinished completion is yielded with what it has, `finish_reason="abort"`. No-op if unknown."""

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: PolicyVersion,
        *,
        keep_kv: bool = True,
        partial: bool = False,
    ) -> None:
        """Replace the weights between two tokens. Requests in flight go on; their later tokens carry `version`.

        Args:
            tensors: name on disk and CPU tensor, every tensor of the model's checkpoint; read only during the call.
            version: becomes `self.version`, only when all tensors are in place.
            keep_kv: requests in flight go on with the keys and values they have; False recomputes them.
            partial: tensors that are not given stay as they are; False: all must be given.
        Raises:
            EngineError: the weights are then unusable (perhaps part old, part new) and the engine must not sample.
        """

    async def checksum(self) -> str:
        """Digest of the weights the engine holds now; equal on two engines of one kind exactly if their weights are."""

    async def probe(self) -> None:
        """Return as soon as what runs the model has answered: at once, or between two batches. Never, if it is stuck."""

    async def close(self) -> None:
        """Stop, and leave no process behind."""
