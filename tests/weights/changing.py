"""Weights of every kind of dtype that change bit by bit, engines that hold what they were given, and who publishes to them."""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout, Stream
from asyncgrpo.weights.publication import Checksum
from tests.weights.publishing import Plane, wait_until

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


def drawn(seed: int, layout: Layout = LAYOUT) -> Tensor:
    """[layout.num_bytes] uint8: tensors of random bits."""
    flat, generator = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.Generator().manual_seed(seed)
    for _, view in layout.views(flat):
        view.view(torch.uint8).random_(generator=generator)
    return flat


def as_bytes(tensors: Iterable[tuple[str, Tensor]], layout: Layout = LAYOUT) -> Tensor:
    """[layout.num_bytes] uint8: what an engine was given, as it lies in a publication."""
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for (info, view), (name, tensor) in zip(layout.views(flat), tensors, strict=True):
        assert info.name == name
        view.copy_(tensor)
    return flat


def checksum(flat: Tensor, layout: Layout = LAYOUT) -> Checksum:
    """What an engine reports that holds these bytes, [layout.num_bytes] uint8."""
    return Checksum.of(Stream([(0, len(flat))]).digests(layout, flat).tolist())


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

    def apply(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> Checksum:
        self.may_go_on.wait(30.0)
        flat = self.held[version] = as_bytes(tensors, self.layout)
        return checksum(flat, self.layout)


class Fleet(Plane):
    """A publisher, receivers whose engines hold what they were given, and the bytes of every version that was published."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        maps: bool,
        layout: Layout = LAYOUT,
        others: Sequence[Stream] = (),
        is_whole: bool = True,
    ) -> None:
        super().__init__(config, maps=maps)
        self.layout = layout
        self.publisher.start(list(layout.tensors), others=others, is_whole=is_whole)
        self.truth: dict[PolicyVersion, Tensor] = {}

    def add(self, name: str, engine: Engine | None = None, incarnation: str = "0", machine: str = "") -> Engine:
        """Start a generator, and wait until it is in touch."""
        engine = engine or Engine(self.layout)
        self.join(name, incarnation=incarnation, machine=machine, apply=lambda *given: engine.apply(*given))
        wait_until(lambda: name in self.publisher._members, f"{name} in touch")
        return engine

    def try_to_put(self, number: int, flat: Tensor) -> bool:
        """Offer a version. Returns False if there is no arena that nobody reads."""
        version = PolicyVersion(1, number)
        self.truth[version] = flat

        def fill(arenas: Arenas, slot: int) -> None:
            arenas.arena(self.layout, slot).copy_(flat)

        return self.publisher.offer(version, fill)

    def put(self, number: int, flat: Tensor) -> None:
        wait_until(lambda: self.try_to_put(number, flat), "an arena")

    def check(self, *engines: Engine) -> None:
        """Every version that an engine was ever given is the one that was published under this number."""
        for engine in engines:
            assert engine.held
            for version, flat in engine.held.items():
                assert torch.equal(flat, self.truth[version]), version
