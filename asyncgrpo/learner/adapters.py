"""What a publication carries where only adapters are trained: the adapters.

About 1 % of the bytes of the whole model cross the wire, and no base weight is gathered. Generators merge
(`weights.base.AdapterMerger`), by the arithmetic with which `PublishedWeights` would have.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncgrpo.errors import ConfigError, WeightsError
from asyncgrpo.learner.publishing import Adapter, adapters_of, gather
from asyncgrpo.learner.scorer import TokenScorer
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.base import INSTEAD, BaseWeights
from asyncgrpo.weights.disk_names import disk_pieces
from asyncgrpo.weights.merging import DOWN, UP, fingerprint


class PublishedAdapters:
    """Both matrices of every adapter, in a fixed order, named after the weight on disk that they belong to."""

    def __init__(self, scorer: TokenScorer, path: str) -> None:
        """Gathers every adapted base weight once, for its fingerprint. Collective.

        Args:
            scorer: the sharded model with adapters.
            path: where its base was loaded from, and where generators will read it.
        Raises:
            ConfigError: what would be read there is not what is trained here.
        """
        model = scorer.language_model
        parameters = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
        self._adapters: dict[str, Adapter] = {}
        adapted: dict[str, Tensor] = {}
        for name, adapter in adapters_of(model).items():
            if name not in parameters:
                raise ConfigError(f"model.lora.targets adapts {name}, which is tied to another weight; leave it out")
            pieces = disk_pieces(model, name, torch.empty(parameters[name].shape, device="meta"))
            if [piece.shape for piece in pieces.values()] != [parameters[name].shape]:
                raise ConfigError(
                    f"model.lora.targets adapts {name}, which model.path ({path}) stores as {' and '.join(pieces)}: "
                    f"{INSTEAD}"
                )
            (on_disk,) = pieces
            self._adapters[on_disk], adapted[on_disk] = adapter, parameters[name]
        self.base = fingerprint((name, gather(tensor)) for name, tensor in adapted.items())
        """Fingerprint of the adapted weights without their adapters."""
        try:
            stored = BaseWeights(path).fingerprint(self._adapters)
        except WeightsError as error:
            raise ConfigError(str(error)) from error
        if stored != self.base:
            raise ConfigError(
                f"model.path ({path}) has tensors that are loaded otherwise than they are stored, so that adapters "
                f"cannot be merged into them: {INSTEAD}"
            )

    def layout(self) -> list[TensorInfo]:
        """Name, whole shape and dtype of every tensor, in the order of `weights`; without communication."""
        shapes = [
            shape
            for name, adapter in self._adapters.items()
            for shape in ((name + DOWN, adapter.a.shape), (name + UP, adapter.b.shape))
        ]
        return [TensorInfo(name=name, shape=tuple(shape), dtype="float32") for name, shape in shapes]

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor, whole, on the model's device. Collective: all ranks iterate to the end, in step.

        A tensor may share memory with the model: use or copy it before the next step.
        """
        whole = (
            tensor
            for adapter in self._adapters.values()
            for tensor in (gather(adapter.a), adapter.scale * gather(adapter.b))
        )
        yield from zip(self.layout(), whole, strict=True)
