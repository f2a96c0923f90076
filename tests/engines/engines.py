"""The engines that the suite runs, each with an event loop and, where it has a model, a transformers model beside it.

A `Rig` knows which weights every version stood for, so any log-prob an engine returns can be recomputed by a plain
transformers forward: the oracle of the suite.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from asyncgrpo.engines.base import Engine
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from asyncgrpo.weights.files import disk_tensors
from tests.engines.shared import shared
from tests.models import make_tiny_deepseek_v3, make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe

VOCAB = 260
MAX_CONTEXT = 256
LAST_NORM = "model.norm.weight"

T = TypeVar("T")


@dataclass
class Rig:
    """One engine under test."""

    engine: Engine
    reference_model: PreTrainedModel | None = None
    """The same model in the same dtype; None for an engine without one."""
    tolerance: float = 2e-5
    """Largest difference of a log-prob (nats, absolute) from the reference forward in float32."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _base: dict[str, Tensor] = field(default_factory=dict)
    _changes: dict[PolicyVersion, int] = field(default_factory=dict)
    _held: int | None = None
    """Change that the reference model holds."""
    _requests: int = 0

    def start(self) -> "Rig":
        if self.reference_model is not None:
            self._base = {name: tensor.detach().clone() for name, tensor in disk_tensors(self.reference_model).items()}
        else:
            self._base = {"table": torch.zeros(4, 4)}
        first = PolicyVersion(0, 0)
        self._changes[first] = 0
        self.run(self.engine.start(first))
        return self

    def stop(self) -> None:
        self.run(self.engine.close())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Await on the engine's own loop; something that hangs fails."""
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    def weights(self, change: int) -> dict[str, Tensor]:
        """The model's tensors, moved by noise that `change` seeds; 0 is the model as it was saved.

        A negative change moves only the last norm, on which no keys and values depend: then `expected_logprobs` holds
        whether keys were kept, recomputed or both.
        """
        noise = torch.Generator().manual_seed(abs(change))
        scale = 0.1 if change else 0.0
        moved = {name: base + scale * torch.randn(base.shape, generator=noise) for name, base in self._base.items()}
        return moved if change >= 0 else self._base | {LAST_NORM: moved[LAST_NORM]}

    async def load(self, change: int, *, keep_kv: bool = True) -> PolicyVersion:
        """Load `weights(change)` as the next version."""
        version = PolicyVersion(0, self.engine.version.number + 1)
        self._changes[version] = change
        await self.engine.load_weights(shared(self.weights(change)), version, keep_kv=keep_kv)
        return version

    async def sample(
        self,
        prompt: tuple[int, ...],
        num_completions: int = 1,
        *,
        seed: int = 0,
        request_id: str = "",
        routes_from: int = 0,
        **knobs: Any,
    ) -> list[Completion]:
        """All completions of one request, in the order in which they came."""
        self._requests += 1
        request_id = request_id or f"request-{self._requests}"
        completions = self.engine.generate(
            request_id, prompt, num_completions, Sampling(**knobs), seed, (), routes_from
        )
        return [completion async for completion in completions]

    def logits(self, token_ids: list[int], version: PolicyVersion) -> Tensor:
        """[len(token_ids), VOCAB] float32 of a plain forward under the weights of `version`."""
        model = self.model_of(version)
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].float()

    def expected_logprobs(
        self, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0
    ) -> np.ndarray:
        """[L] what `completion.logprobs` must be if each span saw keys and values of its own version only."""
        tokens = list(prompt) + completion.token_ids.tolist()
        logits = torch.cat(
            [
                self.logits(tokens, span.version)[len(prompt) + span.start - 1 : len(prompt) + span.end - 1]
                for span in completion.spans
            ]
        )
        return _chosen(logits / temperature, completion)

    def expected_logprobs_kept(self, prompt: tuple[int, ...], completion: Completion) -> np.ndarray:
        """[L] what `completion.logprobs` must be if each span kept the keys and values of earlier versions.

        The token at place t is sampled by feeding the one before it, so the span [a, b) feeds places a - 1 .. b - 2.
        """
        tokens = list(prompt) + completion.token_ids.tolist()
        cache, logits = DynamicCache(), []
        for span in completion.spans:
            fed = 0 if span.start == 0 else len(prompt) + span.start - 1
            with torch.no_grad():
                model = self.model_of(span.version)
                part = model(torch.tensor([tokens[fed : len(prompt) + span.end - 1]]), past_key_values=cache).logits[0]
            logits.append(part[-(span.end - span.start) :].float())
        return _chosen(torch.cat(logits), completion)

    def assert_logprobs(self, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0) -> None:
        """Compare with the reference model, if the engine has one."""
        if self.reference_model is None:
            return
        expected = self.expected_logprobs(prompt, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=self.tolerance)

    def model_of(self, version: PolicyVersion) -> PreTrainedModel:
        """The reference model, holding the weights of `version` until the next call."""
        assert self.reference_model is not None, "this engine has no model"
        change = self._changes[version]
        if change != self._held:
            places = disk_tensors(self.reference_model)
            for name, tensor in self.weights(change).items():
                places[name].data.copy_(tensor)
            self._held = change
        return self.reference_model


def _chosen(logits: Tensor, completion: Completion) -> np.ndarray:
    picked = torch.from_numpy(completion.token_ids).long()[:, None]
    return logits.log_softmax(dim=-1).gather(1, picked)[:, 0].numpy()


def torch_rig(
    path: Path, *, dtype: torch.dtype = torch.float32, tolerance: float = 2e-5, max_completions: int = 12
) -> Rig:
    from asyncgrpo.engines.torch.engine import TorchEngine

    room = {"max_context": MAX_CONTEXT, "max_completions": max_completions}
    engine = TorchEngine(str(path), dtype=dtype, device=torch.device("cpu"), **room)
    return Rig(engine, AutoModelForCausalLM.from_pretrained(path, dtype=dtype), tolerance)


def sglang_rig(path: Path, **options: Any) -> Rig:
    from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions

    options = {"max_context": MAX_CONTEXT} | options
    engine = SGLangEngine(SGLangOptions(model_path=str(path), dtype=torch.float32, device="cpu", **options))
    return Rig(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tolerance=1e-4)


RIGS: dict[str, Callable[[Path], Rig]] = {
    "fake": lambda folder: Rig(FakeEngine(vocab_size=VOCAB, max_context=MAX_CONTEXT)),
    "torch-qwen3": lambda folder: torch_rig(make_tiny_qwen3(folder, vocab=VOCAB)),
    "torch-llama": lambda folder: torch_rig(make_tiny_llama(folder, vocab=VOCAB)),
    "torch-qwen3-moe": lambda folder: torch_rig(make_tiny_qwen3_moe(folder, vocab=VOCAB)),
    "torch-deepseek-v3": lambda folder: torch_rig(make_tiny_deepseek_v3(folder, vocab=VOCAB)),
    "sglang": lambda folder: sglang_rig(
        make_tiny_deepseek_v3(folder, vocab=VOCAB, layers=3, for_sglang=True), records_routes=True
    ),
}
"""How to build each engine, in an empty folder for its model."""
