"""The published weights: the learner's tensors under the names of engines and files.

The plan is made once from the sharded model and is equal on all ranks, so `layout` needs no communication and `weights`
may gather tensor by tensor. A tied tensor appears once, under its first name. A tensor in memory that is several on disk
(experts of a mixture) is gathered once and split. Adapters are merged into their base, each row by the rank that owns it.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.loading import Pieces, are_rows, first_row, pieces_of_rows, views_of_rows
from asyncgrpo.learner.model import TokenScorer
from asyncgrpo.learner.parallel import gather
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import IsWritten, Layout
from asyncgrpo.weights.files import disk_pieces, saved_tensors

Part = tuple[str, int, Tensor]
"""Part of a published tensor, or of several that follow each other without a gap: name of the first, offset of the first
element in it, values in any dtype."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank addition to a weight: scale * b @ a."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class _Source:
    """One tensor in memory, which may be several on disk."""

    name: str
    """Name of the parameter in the model without adapters."""
    tensor: Tensor
    adapter: Adapter | None
    dtype: torch.dtype
    pieces: Pieces | None
    """Layout of its rows on disk; None if ranks do not own whole rows."""
    first_row: int = 0
    """Of this rank, if ranks own whole rows."""
    is_run: bool = False
    """True if its rows lie in a publication as in memory."""

    def whole(self) -> Tensor:
        """Return the tensor gathered and merged. Collective."""
        if self.adapter is None:
            return gather(self.tensor.detach().to(self.dtype))
        up, down = self.adapter.scale * gather(self.adapter.b), gather(self.adapter.a)
        return merge(gather(self.tensor), up, down, self.dtype)

    def rows(self, *, merged: bool = True) -> Tensor:
        """Return the rows of this rank. Collective if an adapter is merged into them."""
        rows = cast(DTensor, self.tensor).to_local()
        if merged and self.adapter is not None:
            up = self.adapter.scale * cast(DTensor, self.adapter.b.detach()).to_local()
            rows = merge(rows, up, gather(self.adapter.a.detach()), self.dtype)
        return rows


class PublishedWeights:
    """Every tensor to publish, in a fixed order."""

    def __init__(self, scorer: TokenScorer, dtype: torch.dtype) -> None:
        """
        Args:
            scorer: the sharded model. Its tensors are read by each call of `weights`.
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
                adapter = adapters.get(plain)
                pieces, first, is_run = None, 0, False
                if are_rows(tensor) and (adapter is None or are_rows(adapter.b)):
                    with suppress(WeightsError):  # a piece on disk spans several ranks
                        pieces = pieces_of_rows(model, plain, tensor.shape)
                        first, is_run = first_row(cast(DTensor, tensor)), _is_run(pieces.parts, published)
                self._sources.append(_Source(plain, tensor, adapter, published, pieces, first, is_run))

    def layout(self) -> list[TensorInfo]:
        """Return name, full shape and dtype of every tensor, in the order of `weights`. No communication."""
        layout = []
        for source in self._sources:
            shape_only = torch.empty(source.tensor.shape, dtype=source.dtype, device="meta")
            layout += [_info(*piece) for piece in disk_pieces(self._model, source.name, shape_only).items()]
        return layout

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Yield every full tensor on the model's device. Collective: all ranks iterate to the end, in step.

        A tensor may share memory with the model or with other pieces of one gathered tensor. Copy it before the next step.
        """
        for source in self._sources:
            for name, piece in disk_pieces(self._model, source.name, source.whole()).items():
                yield _info(name, piece), piece

    @torch.no_grad()
    def parts(self, rank: int, *, merged: bool = True) -> Iterator[Part]:
        """Yield the parts of a publication that this rank writes.

        All ranks together write every element once. Collective: some tensors are gathered and written by rank 0.

        Args:
            merged: False: rows lack their adapters, for a caller that needs shapes only.
        """
        for source in self._sources:
            if source.pieces is None:
                pieces = disk_pieces(self._model, source.name, source.whole())
                yield from ((name, 0, piece) for name, piece in pieces.items() if rank == 0)
                continue
            start, rows = source.first_row, source.rows(merged=merged)
            if source.is_run:
                yield next(iter(source.pieces.parts)), start * rows.shape[1:].numel(), rows
            else:
                yield from ((name, 0, view) for name, view in views_of_rows(source.pieces.parts, rows, start))


def fill_parts(parts: Iterable[Part], layout: Layout, flat: Tensor) -> IsWritten | None:
    """Copy one rank's parts to their places in a publication's arena, [num_bytes] uint8 on the CPU.

    Returns:
        A function that returns True once a GPU has written all bytes; None if they are written. The next step may begin
        before, because the GPU queues it behind these copies.
    """
    is_cuda = False
    for name, first, tensor in parts:
        layout.part(flat, name, first, tensor.shape).copy_(tensor, non_blocking=True)
        is_cuda = is_cuda or tensor.is_cuda
    return copied() if is_cuda else None


def copied() -> IsWritten:
    """Return a function that is True once the GPU has completed all work queued so far."""
    event = torch.cuda.Event()
    event.record()
    return event.query


def _is_run(parts: dict[str, Tensor], dtype: torch.dtype) -> bool:
    """True if these parts of a tensor lie in a publication as in the tensor's memory."""
    layout = Layout([_info(name, part.to(dtype)) for name, part in parts.items()])
    return all(
        part.is_contiguous() and layout.run(name, 0, 0)[0] == part.storage_offset() * dtype.itemsize
        for name, part in parts.items()
    )


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters by the name of their weight in the model without adapters, in the model's order."""
    found: dict[str, Adapter] = {}
    layer: Any
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            (key,) = layer.lora_A.keys()
            found[f"{name}.weight"] = Adapter(layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key])
    return found


# -- adapters: merged, bitwise identical for any sharding of the rows --------------------------------------------------

_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # elements merged at once: on a CPU they fit in a core's cache
_EXACT = 53  # bits of a float64: integers up to 2^53 are exact


@torch.no_grad()
def merge(base: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute base + up @ down, added in float32 and rounded once.

    First, a power of two moves from each row of `down` to `up`, so that rows of `down` have size about 1. Then `up` and
    `down` are rounded to 22 to 26 bits relative to the largest value of a row of `up` and of a column of `down`, about the
    precision of float32. Their product is then exact in float64 until it is rounded to float32. So it does not depend on a
    library's order of summation, or on threads, instructions or device.

    Args:
        base: [out, in], any floating dtype.
        up: [out, rank] float32, with the adapter's scale multiplied in.
        down: [rank, in] float32.
        dtype: dtype of the result.
    Returns:
        [out, in] on the device of `up`; bitwise identical on every device.
    """
    rank = down.shape[0]
    bits = (_EXACT - (rank - 1).bit_length()) // 2
    size = _power_of_two(down.double(), dim=1)
    up, down = _on_grid(up * size.T, bits, dim=1), _on_grid(down / size, bits, dim=0)
    merged = torch.empty(base.shape, dtype=dtype, device=up.device)
    rows = max(1, _CHUNK[up.device.type] // base.shape[1])
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        merged[part] = (up[part] @ down).float().add_(base[part].to(up.device, torch.float32))
    return merged


def _on_grid(matrix: Tensor, bits: int, *, dim: int) -> Tensor:
    """Round to at most 2^bits multiples of a power of two, with one power per line along `dim`.

    For each element of the result, the products of two such numbers are multiples of one power of two, and a sum of
    `rank` products stays below 2^53 multiples. So every partial sum is exact.
    """
    step = _power_of_two(matrix, dim=dim) * 2.0**-bits
    return (matrix / step).round_().mul_(step)


def _power_of_two(matrix: Tensor, *, dim: int) -> Tensor:
    """Return the smallest power of two above all absolute values of a line along `dim`, float64; 1 for zeros."""
    exponent = torch.frexp(matrix.abs().amax(dim, keepdim=True)).exponent.long()
    return ((exponent + 1023) << 52).view(torch.float64)  # built from bits, because `pow` may be inexact
