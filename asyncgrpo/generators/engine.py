"""What a generator asks of an inference engine, whichever it is: `sglang`, `torch` or `fake`.

An engine lives on one asyncio event loop. It samples, it says which weights sampled each token, and it changes its
weights between two tokens when told to. It knows nothing of rewards, groups, the buffer or the network.
"""

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from torch import Tensor

from asyncgrpo.types import Completion, Sampling, WeightVersion


class Engine(Protocol):
    """An inference engine, owned by one process. Build one with `generators.build_engine`.

    All methods are called on one event loop. `generate` may be called many times at once.
    """

    @property
    def version(self) -> WeightVersion:
        """The weights that will sample the next token."""

    async def start(self, version: WeightVersion) -> None:
        """Load the model from its folder and be ready. Its weights count as `version`. Raises EngineError."""

    def generate(
        self, request_id: str, prompt: tuple[int, ...], num_answers: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        """Sample `num_answers` answers to `prompt` (token ids) and yield each as soon as it is complete, in any order.

        No request that starts after `load_weights` reuses keys and values computed under older weights. Answer i is
        seeded by `seed + i` in engines that can (`torch`, `fake`); SGLang's seeds are its own.

        Raises:
            RequestError: this request cannot be answered; others are not concerned.
            EngineError: the engine failed.
        """

    async def abort(self, request_id: str) -> None:
        """End a request: each unfinished answer is yielded with what it has, `finish_reason="abort"`. No-op if unknown."""

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: WeightVersion,
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
