"""The learner's weights as engines and files know them: Hugging Face names, whole tensors, adapters merged.

The plan is made once, from the sharded model, and is the same on every rank: so `layout` needs no communication and
`weights` may gather tensor by tensor. A tied tensor appears once, under its first name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncgrpo.learner.logprobs import TokenScorer
from asyncgrpo.types import TensorInfo


@dataclass(frozen=True)
class _Adapter:
    """Low-rank addition to a weight: scale * b @ a."""

    a: Tensor
    b: Tensor
    scale: float


class PublishedWeights:
    """Every tensor to publish, in a fixed order."""

    def __init__(self, scorer: TokenScorer, dtype: torch.dtype) -> None:
        """Args:
        scorer: the sharded model. Its parameters are read at each call of `weights`, never copied here.
        dtype: of the published tensors.
        """
        self.dtype = dtype
        model = scorer.language_model
        adapters = {f"{name}.weight": _adapter(module) for name, module in model.named_modules() if _is_adapted(module)}
        self._tensors: list[tuple[str, Tensor, _Adapter | None]] = [
            (name.replace(".base_layer.", "."), parameter, adapters.get(name.replace(".base_layer.", ".")))
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        ]

    def layout(self) -> list[TensorInfo]:
        """Name, whole shape and dtype of every tensor, in the order of `weights`; without communication."""
        return [self._info(name, tensor) for name, tensor, _ in self._tensors]

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor, whole, on the model's device. Collective: all ranks iterate to the end, in step.

        A tensor may share memory with the model: use or copy it before the next step.
        """
        for name, tensor, adapter in self._tensors:
            if adapter is None:
                whole = _gather(tensor.to(self.dtype))
            else:  # merged in float32, rounded once
                whole = (_gather(tensor) + adapter.scale * _gather(adapter.b) @ _gather(adapter.a)).to(self.dtype)
            yield self._info(name, tensor), whole

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        return TensorInfo(name=name, shape=tuple(tensor.shape), dtype=str(self.dtype).removeprefix("torch."))


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapter(layer: Any) -> _Adapter:
    (name,) = layer.lora_A.keys()
    return _Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
