"""The base of all engines: requests and their bookkeeping.

An engine lives on one asyncio event loop. It samples, reports the policy version of each token, and swaps its weights
between two tokens. It is independent of rewards, groups, the buffer and the network. A request ends in exactly one of three
ways: every completion is delivered; it is aborted, and every completion is still delivered; or it fails, and its caller
gets the error.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.types import Completion, FinishReason, PolicyVersion, Sampling, VersionSpan
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.weights.publication import Checksum

# -- load --------------------------------------------------------------------------------------------------------------


class EngineOccupancy(NamedTuple):
    """Load of an engine."""

    running: int
    """Completions being sampled."""
    waiting: int
    """Queued completions: all places are taken, or the KV cache is full."""
    places: int
    """Completions that it can sample at once."""
    kv: float
    """Share of the KV cache that completions hold, 0 to 1; NaN: the engine has no cache."""
    steps: float = 0.0
    """Decode steps so far, each of which gave one token to the running completions."""
    step_s: float = 0.0
    """Total duration of these steps, seconds."""
    present_s: float = 0.0
    """Lower bound of the duration of the step in progress, seconds; 0 without one."""


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt and its completions, which a caller awaits."""

    request_id: str
    prompt: tuple[int, ...]
    num_completions: int
    sampling: Sampling
    seed: int
    images: tuple[str, ...] = ()
    routes_from: int = 0

    def __post_init__(self) -> None:
        self.pending = [PendingCompletion(self, index, self.seed + index) for index in range(self.num_completions)]
        # It holds at most `num_completions` completions, or a failure.
        self._results: asyncio.Queue[Completion | EngineError] = asyncio.Queue()

    def fail(self, failure: EngineError) -> None:
        """Raise this error in the caller in place of the missing completions."""
        self._results.put_nowait(failure)

    def deliver(self, completion: Completion) -> None:
        self._results.put_nowait(completion)

    async def completions(self) -> AsyncIterator[Completion]:
        """Yield each completion as soon as it is complete. Raises the request's failure, an EngineError or a subclass."""
        for _ in self.pending:
            result = await self._results.get()
            if isinstance(result, EngineError):
                raise type(result)(str(result)) from result
            yield result


class PendingCompletion:
    """One completion of a request in progress."""

    def __init__(self, request: Request, index: int, seed: int):
        self.request = request
        self.index = index
        self.seed = seed
        self.is_complete = False
        self._starts: list[tuple[PolicyVersion, int]] = []

    def sampled_by(self, version: PolicyVersion, start: int) -> None:
        """Note that `version` samples the tokens from `start` on. `start` never decreases between calls."""
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, start))

    def complete(
        self, token_ids: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray, reason: FinishReason
    ) -> None:
        """Deliver the finished completion."""
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
    """Raise RequestError for a prompt that cannot be sampled, before it can break others in its batch.

    The configuration bounds the sampling parameters.
    """
    prompt = request.prompt
    problem = ""
    if not prompt:
        problem = "the prompt is empty"
    elif not (min(prompt) >= 0 and max(prompt) < vocab_size):
        token = next(token for token in prompt if not 0 <= token < vocab_size)
        problem = f"prompt token {token} is outside the vocabulary of {vocab_size}"
    elif len(prompt) >= max_context:
        problem = f"the prompt of {len(prompt)} tokens leaves no room in max_context ({max_context})"
    if problem:
        raise RequestError(f"request {request.request_id}: {problem}")


# -- engines -----------------------------------------------------------------------------------------------------------


R = TypeVar("R", bound=Request)


class Engine(ABC, Generic[R]):
    """An inference engine, owned by one process. `engines.build.build_engine` makes one.

    All methods are called on one event loop. Many calls of `generate` may run at once. A failure reaches every request in
    flight. From then on `generate` raises until `load_weights` succeeds.
    """

    request_type: type[R]
    vocab_size: int
    max_context: int
    """Longest prompt plus completion, tokens."""

    def __init__(self) -> None:
        self._requests: dict[str, R] = {}
        self._failure: EngineError | None = EngineError("the engine was not started")
        self._is_running = False

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights that sample the next token."""
        return self._version

    @abstractmethod
    async def start(self, version: PolicyVersion) -> None:
        """Load the model from its folder, and call `_started`. Its weights count as `version`. Raises EngineError."""

    @abstractmethod
    async def checksum(self) -> Checksum:
        """Return digests of the engine's weights. Raises EngineError: they cannot be read."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """Return the log-probs of the tokens from `start` on of each sequence (token ids), in order, nats, at temperature 1,
        under the present weights; empty if this engine has no model. `start` is at least 1.

        It takes the path of a request, so that it is affected by the same faults, such as stale keys and values.
        """

    @abstractmethod
    def occupancy(self) -> EngineOccupancy:
        """Return the present load. Quick: it needs no reply of another process."""

    @abstractmethod
    async def probe(self) -> None:
        """Return as soon as the model's process replies: at once, or between two batches. Block while it is stuck."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and all its processes."""

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        num_completions: int,
        sampling: Sampling,
        seed: int,
        images: tuple[str, ...] = (),
        routes_from: int = 0,
    ) -> AsyncIterator[Completion]:
        """Sample `num_completions` completions of `prompt` (token ids); yield each as soon as it is complete, in any order.

        No request that starts after `load_weights` reuses keys and values computed under older weights. `torch` and `fake`
        seed completion i by `seed + i`; SGLang uses seeds of its own.

        Args:
            images: digests as in `types.Prompt`.
            routes_from: first token of the prompt whose experts are returned, if the engine records any.
        Raises:
            RequestError: this request was refused or failed; others continue.
            EngineError: the engine failed.
        """
        self._require_running()
        if self._failure:
            raise EngineError(f"the engine does not sample: {self._failure}") from self._failure
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is already in flight")
        request = self.request_type(request_id, prompt, num_completions, sampling, seed, images, routes_from)
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context)
        self._requests[request_id] = request
        self._begin(request)
        try:
            async for completion in request.completions():
                yield completion
        finally:  # also if the caller stops early
            del self._requests[request_id]
            await self._end(request)

    async def abort(self, request_id: str) -> None:
        """Abort a request: unfinished completions are yielded with their tokens so far, `finish_reason="abort"`.

        An unknown id is ignored.
        """
        if request := self._requests.get(request_id):
            self._abort(request)

    async def load_weights(self, tensors: SharedTensors, version: PolicyVersion, *, keep_kv: bool = True) -> None:
        """Replace the weights between two tokens. Requests in flight continue; their later tokens carry `version`.

        Args:
            tensors: every tensor of the model's checkpoint, by its name on disk.
            version: becomes `self.version` once all tensors are in place.
            keep_kv: True: requests in flight keep their keys and values; False: they are recomputed.
        Raises:
            EngineError: the weights may be part old, part new, and the engine does not sample with them.
        """
        self._require_running()
        try:
            await self._load(tensors, version, keep_kv=keep_kv)
            tensors.require_intact()
        except BaseException as error:
            failure = EngineError(f"weights {version} cannot be loaded: {str(error) or type(error).__name__}")
            self._fail(failure)
            if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C
                raise
            raise failure from error
        self._version, self._failure = version, None

    @abstractmethod
    def _begin(self, request: R) -> None:
        """Start to sample. Completions are delivered to the request."""

    @abstractmethod
    def _abort(self, request: R) -> None:
        """Complete every unfinished completion with its tokens so far."""

    @abstractmethod
    async def _end(self, request: R) -> None:
        """Stop the remaining work for a request whose caller has left."""

    @abstractmethod
    async def _load(self, tensors: SharedTensors, version: PolicyVersion, *, keep_kv: bool) -> None:
        """Replace the weights, see `load_weights`. An exception makes the engine fail."""

    def _started(self, version: PolicyVersion) -> None:
        self._version, self._failure, self._is_running = version, None, True

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        for request in self._requests.values():
            request.fail(failure)

    def _require_running(self) -> None:
        if not self._is_running:
            raise EngineError(str(self._failure)) from self._failure
