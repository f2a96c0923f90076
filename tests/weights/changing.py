"""Weights of every kind of dtype that change bit by bit, and engines that hold what they were given."""

import threading
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Layout
from asyncgrpo.weights.digest import add_digests, digest

LAYOUT = Layout(
    [
        TensorInfo(name="embed", shape=(300, 64), dtype="bfloat16"),
        TensorInfo(name="norm", shape=(65,), dtype="float32"),
        TensorInfo(name="layer", shape=(700, 100), dtype="bfloat16"),
        TensorInfo(name="experts", shape=(3, 33), dtype="float8_e4m3fn"),
    ]
)
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0], dtype=torch.bfloat16)


def change(flat: Tensor, share: float, random: np.random.Generator, place: Callable[[int], int]) -> None:
    """Give so many of the elements other bits, some of them those of NaN, infinities and -0.0.

    Args:
        flat: [LAYOUT.num_bytes] uint8, changed in place.
        place: draws a number below its argument.
    """
    for info, view in LAYOUT.views(flat):
        taken = torch.from_numpy(random.random(info.shape) < share)
        elements = view.view(torch.uint8).view(*info.shape, view.element_size())
        elements[taken] ^= torch.from_numpy(random.integers(1, 256, elements[taken].shape, dtype=np.uint8))
        if share and view.dtype == torch.bfloat16:
            at = place(view.numel() - 5)
            view.view(-1)[at : at + 5] = SPECIAL.roll(at)


def as_bytes(tensors: Iterable[tuple[str, Tensor]], layout: Layout = LAYOUT) -> Tensor:
    """[layout.num_bytes] uint8: what an engine was given, as it lies in a publication."""
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for (info, view), (name, tensor) in zip(layout.views(flat), tensors, strict=True):
        assert info.name == name
        view.copy_(tensor)
    return flat


class Engine:
    """Holds a copy of what it was given at each version, byte for byte."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.layout = layout
        self.held: dict[PolicyVersion, Tensor] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def newest(self) -> PolicyVersion | None:
        return max(self.held, default=None)

    def apply(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> str:
        self.may_go_on.wait(30.0)
        flat = self.held[version] = as_bytes(tensors, self.layout)
        return add_digests([digest(flat)])
