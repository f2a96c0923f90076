"""The `torch` engine: continuous batching over any transformers causal language model, in this process.

It is for machines where SGLang cannot be installed, for small models, and for tests that need to know exactly which
weights made which number. It keeps every promise of `base.Engine`, but is slower than SGLang on large models.

    generate ──▶ waiting (first come, first served) ──▶ Decoder: one token for every running completion per step
        ▲                                                  │
        └───────────── completions, one by one ◀───────────┘      load_weights and abort come between two steps

Everything runs on the caller's event loop; a step blocks it for one forward.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncgrpo.engines.base import Engine, EngineOccupancy, PendingCompletion, Request
from asyncgrpo.engines.torch import decoder
from asyncgrpo.engines.torch.decoder import Decoder
from asyncgrpo.errors import EngineError
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.files import disk_tensors
from asyncgrpo.weights.publication import Checksum

log = logging.getLogger(__name__)


class TorchEngine(Engine[Request]):
    """A transformers model in this process, see `base.Engine` for the methods.

    Completions of one request start together, when there is room for all of them. Noise depends only on the seed of a
    completion and the position of the token. Logits depend in their last bits on the shape of the batch, as in every
    engine.
    """

    request_type = Request

    def __init__(
        self, model_path: str, *, dtype: torch.dtype, device: torch.device, max_context: int, max_completions: int = 256
    ):
        """Load nothing before `start`.

        Args:
            model_path: folder in Hugging Face's format.
            dtype: of weights, keys and values; log-probs are float32 whatever it is.
            max_context: longest prompt plus completion, tokens; a completion that reaches it ends with "length".
            max_completions: completions that run at once. With `max_context` it fixes the memory of keys and values.
        """
        super().__init__()
        self.model_path, self.dtype, self.device = model_path, dtype, device
        self.max_context, self.max_completions = max_context, max_completions
        # The caller bounds it by the requests in flight. Each entry enters the batch as a whole.
        self._waiting: deque[list[PendingCompletion]] = deque()
        self._work = asyncio.Event()
        self._decoder: Decoder
        self._places: dict[str, Tensor] = {}
        self._published: list[tuple[str, torch.dtype]] = []
        """Name and dtype of each tensor, as they were loaded last."""
        self._stepping: asyncio.Task[None] | None = None
        self._steps, self._step_s = 0, 0.0

    async def start(self, version: PolicyVersion) -> None:
        try:
            self._model = await asyncio.to_thread(self._read_model)
            self._places = _places(self._model)
            self._published = [(name, tensor.dtype) for name, tensor in disk_tensors(self._model).items()]
            decoder = Decoder(self._model, max_context=self.max_context, max_completions=self.max_completions)
            # One token, which allocates the cache and reveals a model that cannot run.
            request = Request("start", (0, 0), 1, Sampling(max_tokens=1), seed=0)
            decoder.admit([request.pending], PolicyVersion(0, 0))
            decoder.step()
        except Exception as error:
            raise EngineError(f"the torch engine cannot start with the model {self.model_path}: {error}") from error
        self._started(version)
        self.vocab_size = decoder.vocab_size
        self._decoder = decoder
        self._stepping = asyncio.create_task(self._run(decoder), name="torch-engine")

    async def checksum(self) -> Checksum:
        self._require_running()
        return Checksum.of([tensor_digest(self._places[name].to(dtype), name) for name, dtype in self._published])

    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        self._require_running()
        return self._decoder.score(sequences, start)

    def occupancy(self) -> EngineOccupancy:
        waiting, use = sum(map(len, self._waiting)), self._decoder
        return EngineOccupancy(
            use.num_running, waiting, self.max_completions, use.kv_use, steps=self._steps, step_s=self._step_s
        )

    async def probe(self) -> None:
        """Return at once, because the model runs on the caller's loop."""

    async def close(self) -> None:
        self._fail(EngineError("the engine was closed"))
        self._is_running = False
        if self._stepping:
            self._stepping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepping

    async def _run(self, decoder: Decoder) -> None:
        """Step while there is work, and yield to other tasks of the event loop after every step."""
        while True:
            if not self._waiting and not decoder.num_running:
                self._work.clear()
                await self._work.wait()
            try:
                room, batches = self.max_completions - decoder.num_running, []
                while self._waiting and len(self._waiting[0]) <= room:
                    batches.append(self._waiting.popleft())
                    room -= len(batches[-1])
                if batches:
                    decoder.admit(batches, self._version)
                if decoder.num_running:
                    began_s = time.monotonic()
                    decoder.step()
                    self._steps, self._step_s = self._steps + 1, self._step_s + time.monotonic() - began_s
            except Exception as error:
                log.exception("a step of the torch engine failed, weight_version=%s", self._version)
                self._fail(EngineError(f"sampling failed under weights {self._version}: {error}"))
            await asyncio.sleep(0)

    def _begin(self, request: Request) -> None:
        for first in range(0, len(request.pending), self.max_completions):
            self._waiting.append(request.pending[first : first + self.max_completions])
        self._work.set()

    def _abort(self, request: Request) -> None:
        if all(completion.is_complete for completion in request.pending):
            return
        if self._is_running:
            self._decoder.end(request)
        self._waiting = deque(completions for completions in self._waiting if completions[0].request is not request)
        for completion in request.pending:
            if not completion.is_complete:
                completion.complete([], [], "abort")

    async def _end(self, request: Request) -> None:
        self._abort(request)

    async def _load(self, tensors: SharedTensors, version: PolicyVersion, *, keep_kv: bool) -> None:
        # Without an await here, `_run` cannot step on partly replaced weights.
        replace_tensors(self._places, tensors)
        self._published = [(name, tensor.dtype) for name, tensor in tensors]
        self._decoder.change_version(version)
        if not keep_kv:
            self._decoder.recompute()

    def _fail(self, failure: EngineError) -> None:
        self._waiting.clear()
        super()._fail(failure)
        if self._is_running:
            self._decoder.clear()

    def _read_model(self) -> PreTrainedModel:
        decoder.register()
        model = AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=self.dtype, attn_implementation=decoder.NAME
        )
        config = model.config.get_text_config()  # cache and mask assume that every layer attends to all earlier tokens
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        if kinds - {"full_attention", "sliding_attention"}:
            raise EngineError(f"its layers are {sorted(kinds)}; only full attention is supported")
        if "sliding_attention" in kinds and window is not None and window < self.max_context:
            raise EngineError(f"its sliding_window ({window}) is smaller than max_context ({self.max_context})")
        if getattr(config, "attn_logit_softcapping", None) is not None:  # which torch's attention would ignore
            raise EngineError("its attention scores are capped (attn_logit_softcapping), which is not supported")
        torch.nn.Module.to(model, self.device)
        return model.eval().requires_grad_(False)


def _places(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's memory for each tensor of a checkpoint by its name on disk, with all names of tied tensors."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    tensors = disk_tensors(model, remove_duplicate=False)
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() not in memory:
            raise EngineError(f"{name} on disk is not a view of a tensor in memory, so it cannot be replaced there")
    return tensors


# -- weights in place --------------------------------------------------------------------------------------------------


@torch.no_grad()
def replace_tensors(places: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor to the memory of its name. Tied tensors may be given by one name or all.

    Args:
        places: the model's memory by names on disk.
        tensors: all tensors of the model.
    Raises:
        EngineError: a name is unknown, repeated or missing, a shape differs, or tied tensors got different values.
            The model is then part old and part new.
    """
    given: set[str] = set()
    written: set[int] = set()
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            raise EngineError(f"new weights have a tensor {name} that the model does not have")
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
    if missing:
        raise EngineError(f"new weights lack {len(missing)} of the model's tensors, the first is {missing[0]}")
