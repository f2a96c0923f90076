"""The `fake` engine: tokens from a hash, without a model, for tests of what an engine works with.

It keeps the contract of `base.Engine` for requests, versions and seeds, and behaves as a model whose next token is uniform
over the vocabulary. A token is a function of prompt, seed, position and version. So the sampled tokens reveal a wrong
version, and the checksum reveals a wrong broadcast.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import xxhash

from asyncgrpo.engines.base import Engine, EngineOccupancy, PendingCompletion, Request
from asyncgrpo.errors import EngineError
from asyncgrpo.types import FinishReason, PolicyVersion
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.publication import Checksum


class FakeRequest(Request):
    """A request and the tokens of its unfinished completions."""

    tokens: dict[PendingCompletion, list[int]]
    sampler: "asyncio.Task[None]"
    step_began_s: float


@dataclass(eq=False, kw_only=True)
class FakeEngine(Engine[FakeRequest]):
    """An engine without a model, see `base.Engine`. At temperature 0 the seed does not matter; top-p and top-k are ignored.

    All completions run at once. After a failed `load_weights` a successful one restores the engine, as in the real engines.
    """

    request_type = FakeRequest

    vocab_size: int = 256
    """Token ids are 0 .. vocab_size - 1."""
    max_context: int = 4096
    max_completions: int = 256
    """Reported number of places; more completions are sampled all the same."""
    seconds_per_token: float = 0.0
    """Time of one token of every running completion; at 0 other tasks still get their turn."""
    median_tokens: float | None = None
    """Median of the log-normal lengths at which completions stop. Half of the variance belongs to the prompt: for some prompts
    all completions are long. None: they stop at any sampled stop token."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of these lengths; above 1 there are strong stragglers."""
    seconds_per_completion: float = 0.0
    """Added to `seconds_per_token` for each running completion, as in continuous batching."""

    def __post_init__(self) -> None:
        super().__init__()
        self._steps, self._step_s = 0, 0.0
        self._checksum = Checksum.of(())

    async def start(self, version: PolicyVersion) -> None:
        self._started(version)

    async def checksum(self) -> Checksum:
        return self._checksum

    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        return []

    def occupancy(self) -> EngineOccupancy:
        running = sum(len(request.tokens) for request in self._requests.values())
        now_s = asyncio.get_running_loop().time() if running else 0.0
        present_s = max((now_s - each.step_began_s for each in self._requests.values() if each.tokens), default=0.0)
        return EngineOccupancy(running, 0, self.max_completions, math.nan, self._steps, self._step_s, present_s)

    async def probe(self) -> None:
        """Return at once: nothing can be stuck."""

    async def close(self) -> None:
        self._is_running = False
        self._fail(EngineError("the engine was closed"))

    def _begin(self, request: FakeRequest) -> None:
        request.tokens = {completion: [] for completion in request.pending}
        request.step_began_s = asyncio.get_running_loop().time()
        request.sampler = asyncio.create_task(self._sample(request), name=f"fake-engine-{request.request_id}")

    def _abort(self, request: FakeRequest) -> None:
        for completion in list(request.tokens):
            self._complete(completion, "abort")

    async def _end(self, request: FakeRequest) -> None:
        request.sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request.sampler

    async def _load(self, tensors: SharedTensors, version: PolicyVersion, *, keep_kv: bool) -> None:
        self._checksum = Checksum.of([tensor_digest(tensor, name) for name, tensor in tensors])

    async def _sample(self, request: FakeRequest) -> None:
        """Sample one token for every unfinished completion of the request at a time, until all are complete."""
        limit = min(request.sampling.max_tokens, self.max_context - len(request.prompt))
        clock = asyncio.get_running_loop().time
        while request.tokens and not self._failure:
            running = sum(len(other.tokens) for other in self._requests.values())
            request.step_began_s = clock()
            await asyncio.sleep(self.seconds_per_token + self.seconds_per_completion * running)
            self._steps, self._step_s = self._steps + 1, self._step_s + clock() - request.step_began_s
            for completion, tokens in list(request.tokens.items()):
                self._extend(completion, tokens, limit)

    def _extend(self, completion: PendingCompletion, tokens: list[int], limit: int) -> None:
        """Sample a token, and complete the completion if it is its last one."""
        completion.sampled_by(self._version, len(tokens))
        tokens.append(self._token(completion, len(tokens)))
        if tokens[-1] in completion.request.sampling.stop_token_ids:
            self._complete(completion, "stop")
        elif len(tokens) == limit:
            self._complete(completion, "length")

    def _complete(self, completion: PendingCompletion, reason: FinishReason) -> None:
        request = completion.request
        assert isinstance(request, FakeRequest)
        tokens = request.tokens.pop(completion)
        completion.complete(tokens, [-math.log(self.vocab_size)] * len(tokens), reason)

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
        """Return a log-normal length. Each text in `shared_by`, which completions may share, adds equally to the variance."""
        assert self.median_tokens is not None
        uniform = [(xxhash.xxh3_64_intdigest(f"length {what}".encode()) + 0.5) / 2**64 for what in shared_by]
        deviation = sum(NormalDist().inv_cdf(u) for u in uniform) / math.sqrt(len(uniform))
        return max(1, round(self.median_tokens * math.exp(self.sigma * deviation)))
