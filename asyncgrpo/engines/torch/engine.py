"""The `torch` engine: continuous batching over any transformers causal language model, in this process.

For machines where SGLang cannot be installed, for small models, and for tests that need to know exactly which weights
made which number. It keeps every promise of `engine.Engine`; what it leaves to SGLang is speed on large models.

    generate ──▶ waiting (first come, first served) ──▶ Decoder: one token for every running completion per step
        ▲                                                  │
        └───────────── completions, one by one ◀───────────┘      load_weights and abort come between two steps

Everything runs on the caller's event loop; a step blocks it for one forward.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping

import torch
import xxhash
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncgrpo.engines.base import PendingCompletion, Request, check_request
from asyncgrpo.engines.torch import decoder
from asyncgrpo.engines.torch.decoder import Decoder
from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from asyncgrpo.weights.files import disk_tensors

# -- weights in place --------------------------------------------------------------------------------------------------


@torch.no_grad()
def replace_tensors(
    places: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], *, partial: bool = False
) -> None:
    """Copy every tensor into the place of its name. Of tensors that are tied, one name or all may be given.

    Args:
        places: the model's memory by names on disk.
        tensors: all of them, or with `partial` some; the others then stay as they are.

    Raises:
        EngineError: a name is unknown, repeated or missing, a shape differs, or tied tensors got different values.
            The model is then part old and part new.
    """
    given: set[str] = set()
    written: set[int] = set()
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            raise EngineError(f"new weights have a tensor {name} that the model has not")
        if name in given:
            raise EngineError(f"new weights give the tensor {name} twice")
        if tensor.shape != place.shape:
            raise EngineError(f"new weights give {name} as {list(tensor.shape)}, the model has {list(place.shape)}")
        given.add(name)
        if place.data_ptr() not in written:
            place.copy_(tensor)
            written.add(place.data_ptr())
        elif not torch.equal(place, tensor.to(place)):
            raise EngineError(f"new weights give {name} another value than the tensor it is tied to")
    missing = [name for name, place in places.items() if place.data_ptr() not in written]
    if missing and not partial:
        raise EngineError(f"new weights lack {len(missing)} of the model's tensors, the first is {missing[0]}")


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex text of 32 digits over names, shapes, dtypes and bytes (xxh3_128); the order of `tensors` does not matter.

    Each tensor is read before the next is asked for, so whoever gives them may use one buffer for all.
    """
    parts = []
    for name, tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        parts.append(f"{name} {list(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(content)}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(parts)).encode())


# -- the engine --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class TorchEngine:
    """See `engine.Engine` for the methods.

    Completions of one request start together, when there is room for all of them. Noise depends only on the seed of an
    completion and the place of the token; logits depend in their last bits on the shape of the batch, as in every engine.
    A failure reaches every request in flight, and from then on `generate` refuses until `load_weights` succeeds.
    """

    def __init__(
        self, model_path: str, *, dtype: torch.dtype, device: torch.device, max_context: int, max_completions: int = 256
    ):
        """Nothing is loaded before `start`.

        Args:
            model_path: folder in Hugging Face's format.
            dtype: of weights, keys and values; log-probs are float32 whatever it is.
            max_context: longest prompt plus completion, tokens; a completion that reaches it ends with "length".
            max_completions: completions that run at once. With `max_context` it fixes the memory of keys and values.
        """
        self.model_path = model_path
        self.dtype = dtype
        self.device = device
        self.max_context = max_context
        self.max_completions = max_completions
        self._requests: dict[str, Request] = {}
        # Bounded by the caller, who decides how many requests are in flight. Each entry enters the batch as a whole.
        self._waiting: deque[list[PendingCompletion]] = deque()
        self._work = asyncio.Event()
        self._failure: EngineError | None = EngineError("the engine was not started")
        self._decoder: Decoder | None = None
        self._places: dict[str, Tensor] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def start(self, version: PolicyVersion) -> None:
        try:
            self._model = await asyncio.to_thread(self._read_model)
            self._places = _places(self._model)
            decoder = Decoder(self._model, max_context=self.max_context, max_completions=self.max_completions)
            _try_out(decoder)
        except Exception as error:
            raise EngineError(f"the torch engine cannot start with the model {self.model_path}: {error}") from error
        self._version = version
        self._failure = None
        self._decoder = decoder
        self._stepping = asyncio.create_task(self._run(decoder), name="torch-engine")

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], num_completions: int, sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        decoder = self._running_decoder()
        if self._failure:
            raise EngineError(f"the engine does not sample: {self._failure}") from self._failure
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is already in flight")
        request = Request(request_id, prompt, num_completions, sampling, seed)
        check_request(request, vocab_size=decoder.vocab_size, max_context=self.max_context)
        self._requests[request_id] = request
        for first in range(0, num_completions, self.max_completions):
            self._waiting.append(request.pending[first : first + self.max_completions])
        self._work.set()
        try:
            async for completion in request.completions():
                yield completion
        finally:  # whoever stops listening early frees the rows
            self._end(request)
            del self._requests[request_id]

    async def abort(self, request_id: str) -> None:
        if request := self._requests.get(request_id):
            self._end(request)

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: PolicyVersion,
        *,
        keep_kv: bool = True,
        partial: bool = False,
    ) -> None:
        decoder = self._running_decoder()
        # No await in here: the loop below cannot step on half of the weights.
        try:
            replace_tensors(self._places, tensors, partial=partial)
            decoder.change_version(version)
            if not keep_kv:
                decoder.recompute()
        except BaseException as error:
            failure = EngineError(f"weights {version} cannot be loaded: {error}")
            self._fail(failure)
            if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C
                raise
            raise failure from error
        self._version = version
        self._failure = None

    async def checksum(self) -> str:
        self._running_decoder()
        return weights_digest(disk_tensors(self._model).items())

    async def probe(self) -> None:
        """The model runs on the caller's own loop: who can ask has the completion."""

    async def close(self) -> None:
        self._fail(EngineError("the engine was closed"))
        self._decoder = None
        if self._stepping:
            self._stepping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepping

    async def _run(self, decoder: Decoder) -> None:
        """Step while there is work. Others of the event loop get their turn after every step."""
        while True:
            if not self._waiting and not decoder.num_running:
                self._work.clear()
                await self._work.wait()
            try:
                self._admit(decoder)
                if decoder.num_running:
                    decoder.step()
            except Exception as error:
                log.exception("a step of the torch engine failed, weight_version=%s", self._version)
                self._fail(EngineError(f"sampling failed under weights {self._version}: {error}"))
            await asyncio.sleep(0)

    def _admit(self, decoder: Decoder) -> None:
        room = decoder.num_free
        batches = []
        while self._waiting and len(self._waiting[0]) <= room:
            batches.append(self._waiting.popleft())
            room -= len(batches[-1])
        if batches:
            decoder.admit(batches, self._version)

    def _end(self, request: Request) -> None:
        """Complete every answer of the request with what it has; no-op for those that are complete."""
        if all(completion.is_complete for completion in request.pending):
            return
        if self._decoder:
            self._decoder.end(request)
        self._waiting = deque(completions for completions in self._waiting if completions[0].request is not request)
        for completion in request.pending:
            if not completion.is_complete:
                completion.complete([], [], "abort")

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        self._waiting.clear()
        for request in self._requests.values():
            request.fail(failure)
        if self._decoder:
            self._decoder.clear()

    def _running_decoder(self) -> Decoder:
        if self._decoder is None:
            raise EngineError(str(self._failure)) from self._failure
        return self._decoder

    def _read_model(self) -> PreTrainedModel:
        decoder.register()
        model = AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=self.dtype, attn_implementation=decoder.NAME
        )
        _require_full_attention(model, self.max_context)
        torch.nn.Module.to(model, self.device)
        return model.eval().requires_grad_(False)


def _places(model: PreTrainedModel) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint lies in the model's memory, by its name on disk; all names of tied tensors."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    tensors = disk_tensors(model, remove_duplicate=False)
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() not in memory:
            raise EngineError(f"{name} on disk is no part of a tensor in memory, so it cannot be replaced there")
    return tensors


def _try_out(decoder: Decoder) -> None:
    """One completion of one token: takes the memory of the cache, and shows here and now if the model cannot run."""
    request = Request("start", (0, 0), 1, Sampling(max_tokens=1), seed=0)
    check_request(request, vocab_size=decoder.vocab_size, max_context=decoder.max_context)
    decoder.admit([request.pending], PolicyVersion(0, 0))
    decoder.step()


def _require_full_attention(model: PreTrainedModel, max_context: int) -> None:
    """Refuse models whose layers do not attend to all earlier tokens: our cache and mask assume it."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(f"its layers are {sorted(kinds)}; only full attention is supported")
    if "sliding_attention" in kinds and window is not None and window < max_context:
        raise EngineError(f"its sliding_window ({window}) is smaller than max_context ({max_context})")
