"""Weights for engines that no publisher has written."""

from collections.abc import Mapping

from torch import Tensor

from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout, SharedTensors


def shared(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """Copy tensors to an arena of their own."""
    infos = [TensorInfo(name=n, shape=tuple(t.shape), dtype=str(t.dtype).split(".")[1]) for n, t in tensors.items()]
    layout = Layout(infos)
    made = Arenas.create(layout, 1).tensors(layout, 0, 0)
    for name, place in made:
        place.copy_(tensors[name])
    return made
