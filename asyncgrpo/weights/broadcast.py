"""The order, packing and digest of published weights, which publisher and receivers share.

Learner and generators plan the same buckets from the same list of tensors, so no offset is sent. The digest is a sum
over elements of a mixed (position, bits) pair: it needs no copy to the host, is the same on CPU and GPU, and adds up
over buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from asyncgrpo.types import TensorInfo

ALIGNMENT = 16
"""Every tensor starts at a multiple of so many bytes, so that a view of any dtype is aligned."""
_MASK = 2**64 - 1
_CHUNK = 2**22  # elements mixed at once; bounds the int64 scratch at 32 MiB per temporary
_POSITION, _SPREAD, _FINAL = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def dtype_of(info: TensorInfo) -> torch.dtype:
    return getattr(torch, info.dtype)


def size_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * dtype_of(info).itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that one broadcast sends, each with its byte offset."""

    items: tuple[tuple[TensorInfo, int], ...]
    num_bytes: int

    def empty(self, device: torch.device | str) -> Tensor:
        """[num_bytes] uint8 zeros: the gaps between tensors are part of the digest."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def fill(self, source: Iterator[tuple[TensorInfo, Tensor]], device: torch.device | str) -> Tensor:
        """[num_bytes] uint8 with the next tensors of `source`, which must be those of this bucket."""
        flat = self.empty(device)
        for (name, view), (info, tensor) in zip(self.views(flat), source, strict=False):
            assert name == info.name, f"{name} expected, {info.name} given"
            view.copy_(tensor)
        return flat

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as views of `flat`."""
        for info, offset in self.items:
            raw = flat[offset : offset + size_bytes(info)]
            yield info.name, raw.view(dtype_of(info)).view(info.shape)


def plan_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """Buckets of consecutive tensors, up to `bucket_bytes` each; a larger tensor has a bucket of its own."""
    buckets: list[Bucket] = []
    items: list[tuple[TensorInfo, int]] = []
    used = 0
    for info in tensors:
        if items and used + size_bytes(info) > bucket_bytes:
            buckets.append(Bucket(tuple(items), used))
            items, used = [], 0
        items.append((info, used))
        used += -(-size_bytes(info) // ALIGNMENT) * ALIGNMENT
    if items:
        buckets.append(Bucket(tuple(items), used))
    return buckets


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def digest(flat: Tensor, start: int = 0) -> int:
    """The digest of a bucket: the sum over its int32 words of mix(position, bits), modulo 2^64.

    Args:
        flat: [n] uint8, n a multiple of 4.
        start: position of its first word in the publication, so that the digests of all buckets add up.
    """
    words = flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK].to(torch.int64)
        position = torch.arange(start + begin, start + begin + len(part), device=flat.device)
        mixed = (part ^ (position * _signed(_POSITION))) * _signed(_SPREAD)
        mixed = (mixed ^ (mixed >> 29)) * _signed(_FINAL)
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total.item()) & _MASK


def add_digests(parts: Sequence[int]) -> str:
    """The digest of a publication from those of its buckets, as 16 hex digits."""
    return f"{sum(parts) & _MASK:016x}"


def digest_of(layout: Sequence[TensorInfo], tensors: Iterable[tuple[TensorInfo, Tensor]], bucket_bytes: int) -> str:
    """The digest of a publication of `tensors`, without sending it; on the CPU.

    Args:
        layout: of the tensors, in their order.
        tensors: are consumed to the end.
    """
    source, digests, start = iter(tensors), [], 0
    for bucket in plan_buckets(layout, bucket_bytes):
        digests.append(digest(bucket.fill(source, "cpu"), start))
        start += bucket.num_bytes // 4
    assert next(source, None) is None, "more tensors than the layout has"
    return add_digests(digests)
