"""Weights of every kind of dtype that change bit by bit, for whoever publishes deltas of them."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import Layout

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
