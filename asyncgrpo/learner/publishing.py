"""The learner's weights as engines and files know them: names and shapes as on disk, whole tensors, adapters merged.

The plan is made once, from the sharded model, and is the same on every rank: so `layout` needs no communication and
`weights` may gather tensor by tensor. A tied tensor appears once, under its first name. Where a tensor in memory is
many on disk, as with the experts of a mixture, it is gathered once and given away in pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncgrpo.learner.scorer import TokenScorer
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.disk_names import disk_pieces, saved_tensors
from asyncgrpo.weights.merging import merge


@dataclass(frozen=True)
class Adapter:
    """Low-rank addition to a weight: scale * b @ a."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class _Source:
    """One tensor in memory, which may be many on disk."""

    name: str
    """As if there were no adapters."""
    tensor: Tensor
    adapter: Adapter | None
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Gathered and merged. Collective."""
        if self.adapter is None:
            return gather(self.tensor.detach().to(self.dtype))
        up, down = self.adapter.scale * gather(self.adapter.b), gather(self.adapter.a)
        return merge(gather(self.tensor), up, down, self.dtype)


class PublishedWeights:
    """Every tensor to publish, in a fixed order."""

    base = ""
    """Needs none: the tensors are whole."""

    def __init__(self, scorer: TokenScorer, dtype: torch.dtype) -> None:
        """Args:
        scorer: the sharded model. Its tensors are read at each call of `weights`, never copied here.
        dtype: of the published parameters. Buffers keep their own: a mixture's `e_score_correction_bias` decides
            between experts that are close, and stays float32 in engines too.
        """
        self.dtype = dtype
        self._model = model = scorer.language_model
        adapters = adapters_of(model)
        self._sources = []
        for name, tensor in saved_tensors(model):
            if ".lora_" not in name:
                plain = name.replace(".base_layer.", ".")
                published = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
                self._sources.append(_Source(plain, tensor, adapters.get(plain), published))

    def layout(self) -> list[TensorInfo]:
        """Name, whole shape and dtype of every tensor, in the order of `weights`; without communication."""
        layout = []
        for source in self._sources:
            shape_only = torch.empty(source.tensor.shape, dtype=source.dtype, device="meta")
            layout += [_info(*piece) for piece in disk_pieces(self._model, source.name, shape_only).items()]
        return layout

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor, whole, on the model's device. Collective: all ranks iterate to the end, in step.

        A tensor may share memory with the model, or with other pieces of one gathered tensor: use or copy it before the
        next step.
        """
        for source in self._sources:
            for name, piece in disk_pieces(self._model, source.name, source.whole()).items():
                yield _info(name, piece), piece


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """By the name that the adapted weight has in memory without adapters, in the model's order."""
    return {f"{name}.weight": _adapter(module) for name, module in model.named_modules() if _is_adapted(module)}


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapter(layer: Any) -> Adapter:
    (name,) = layer.lora_A.keys()
    return Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
