"""The `fake` engine: tokens from a hash table, no model. For tests of everything around an engine, and of its faults.

It keeps the promises of `engine.Engine` about requests, versions and seeds, and behaves as a model whose next token is
uniform over the vocabulary. The tokens are a function of prompt, seed, place and version, so a wrong version shows in
what is sampled, and a broadcast that went wrong shows in the checksum.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from statistics import NormalDist
from typing import Literal

import xxhash
from torch import Tensor

from asyncgrpo.engines.base import PendingCompletion, Request, check_request
from asyncgrpo.engines.torch.engine import weights_digest
from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, FinishReason, PolicyVersion, Sampling

InjectedFault = Literal["abort", "hang"]
"""What may befall one completion: it ends as if the engine had aborted it, or it gets no token any more."""


class FakeEngine:
    """See `engine.Engine` for the methods. At temperature 0 the seed does not matter; top-p and top-k are ignored.

    All completions run at once. As in the real engines, a failure reaches every request in flight, and from then on
    `generate` refuses; a successful `load_weights` mends what a failed one broke.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        max_context: int = 4096,
        seconds_per_token: float = 0.0,
        fail_after_tokens: int | None = None,
        hang_after_tokens: int | None = None,
        injected_fault: Callable[[PendingCompletion, int], InjectedFault | None] = lambda completion, length: None,
        median_tokens: float | None = None,
        sigma: float = 1.0,
    ):
        """Of a model that does not exist, and with the faults that a test wants.

        Args:
            vocab_size: token ids are 0 .. vocab_size - 1.
            max_context: longest prompt plus completion, tokens.
            seconds_per_token: every running completion gets one token in this time; 0 still gives others their turn.
            fail_after_tokens: once the engine has sampled so many tokens it fails for good. None: never.
            hang_after_tokens: once it has sampled so many it does nothing more, without a word. None: never.
            injected_fault: asked before each token of a completion, with its length so far.
            median_tokens: completions have log-normal lengths with this median; then they stop, and no sooner. Half of the
                variance is the prompt's: to some, all completions are long. None: whenever the table says a stop token.
            sigma: standard deviation of the logarithm of these lengths: above 1 a few take far longer than most.
        """
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.seconds_per_token = seconds_per_token
        self.fail_after_tokens = fail_after_tokens
        self.hang_after_tokens = hang_after_tokens
        self.injected_fault = injected_fault
        self.median_tokens = median_tokens
        self.sigma = sigma
        self._num_sampled = 0
        self._requests: dict[str, _Running] = {}
        self._failure: EngineError | None = EngineError("the engine was not started")
        self._checksum = weights_digest(())
        self._is_running = False

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def start(self, version: PolicyVersion) -> None:
        self._version = version
        self._failure = None
        self._is_running = True

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        if self._failure:
            raise EngineError(f"the engine does not sample: {self._failure}") from self._failure
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is already in flight")
        request = Request(request_id, prompt, num_completions, sampling, seed)
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context)
        running = self._requests[request_id] = _Running(
            request, vocab_size=self.vocab_size, max_context=self.max_context
        )
        sampler = asyncio.create_task(self._sample(running), name=f"fake-engine-{request_id}")
        try:
            async for completion in request.completions():
                yield completion
        finally:
            del self._requests[request_id]
            sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampler

    async def abort(self, request_id: str) -> None:
        if running := self._requests.get(request_id):
            for completion in list(running.tokens):
                running.end(completion, "abort")

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: PolicyVersion,
        *,
        keep_kv: bool = True,
        partial: bool = False,
    ) -> None:
        if not self._is_running:
            raise EngineError(str(self._failure)) from self._failure
        try:
            self._checksum = weights_digest(tensors)
        except BaseException as error:
            failure = EngineError(f"weights {version} cannot be loaded: {error}")
            self._fail(failure)
            if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C
                raise
            raise failure from error
        self._version = version
        self._failure = None

    async def checksum(self) -> str:
        return self._checksum

    async def probe(self) -> None:
        if self.hang_after_tokens is not None and self._num_sampled >= self.hang_after_tokens:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self._is_running = False
        self._fail(EngineError("the engine was closed"))

    async def _sample(self, running: "_Running") -> None:
        """One token for every unfinished completion of the request, then others have their turn."""
        while running.tokens and not self._failure:
            await asyncio.sleep(self.seconds_per_token)
            await self.probe()
            for completion, tokens in list(running.tokens.items()):
                if (what := self.injected_fault(completion, len(tokens))) is not None:
                    if what == "abort":
                        running.end(completion, "abort")
                    continue
                completion.sampled_by(self._version, len(tokens))
                tokens.append(self._token(completion, len(tokens)))
                self._num_sampled += 1
                if tokens[-1] in completion.request.sampling.stop_token_ids:
                    running.end(completion, "stop")
                elif len(tokens) == running.limit:
                    running.end(completion, "length")
            if self.fail_after_tokens is not None and self._num_sampled >= self.fail_after_tokens:
                self._fail(EngineError(f"the fake engine was told to fail after {self.fail_after_tokens} tokens"))

    def _token(self, completion: PendingCompletion, position: int) -> int:
        request = completion.request
        seed = "greedy" if request.sampling.temperature == 0 else completion.seed
        key = f"{request.prompt} {seed} {position} {self._version}"
        token = xxhash.xxh3_64_intdigest(key.encode()) % self.vocab_size
        stops = request.sampling.stop_token_ids
        if self.median_tokens is None or not stops:
            return token
        if position + 1 == self._length(str(request.prompt), f"{request.prompt} {seed}"):
            return stops[0]
        others = (other % self.vocab_size for other in range(token, token + self.vocab_size))
        return next((other for other in others if other not in stops), token)

    def _length(self, *shared_by: str) -> int:
        """Log-normal: of everything that a completion shares with others, a part of equal variance."""
        assert self.median_tokens is not None
        uniform = [(xxhash.xxh3_64_intdigest(f"length {what}".encode()) + 0.5) / 2**64 for what in shared_by]
        deviation = sum(NormalDist().inv_cdf(u) for u in uniform) / math.sqrt(len(uniform))
        return max(1, round(self.median_tokens * math.exp(self.sigma * deviation)))

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        for running in self._requests.values():
            running.request.fail(failure)


class _Running:
    """A request and the tokens of its unfinished completions."""

    def __init__(self, request: Request, *, vocab_size: int, max_context: int):
        self.request = request
        self.limit = min(request.sampling.max_tokens, max_context - len(request.prompt))
        self.tokens: dict[PendingCompletion, list[int]] = {completion: [] for completion in request.pending}
        self._logprob = -math.log(vocab_size)

    def end(self, completion: PendingCompletion, reason: FinishReason) -> None:
        tokens = self.tokens.pop(completion)
        completion.complete(tokens, [self._logprob] * len(tokens), reason)
