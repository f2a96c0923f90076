"""What publisher and receivers share: the process group, and the order, packing and digest of published weights.

The process group stands beside torch's default group, which the learner's ranks use among themselves, and holds no
global state. When a member dies, the group is dropped and the next one is formed of those that are left.

Learner and generators plan the same buckets from the same list of tensors, so no offset is sent. The digest is a sum
over elements of a mixed (position, bits) pair: it needs no copy to the host, is the same on CPU and GPU, and adds up
over buckets.
"""

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.types import TensorInfo

# -- the process group -------------------------------------------------------------------------------------------------


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open the learner's store, where the members of a group meet; its port is `store.port`.

    It listens at `host` alone. By default torch listens on every interface of the machine, without authentication.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def visit_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store that the learner serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class BroadcastGroup:
    """Broadcasts from rank 0, each with a deadline."""

    def __init__(
        self, store: dist.Store, *, number: int, rank: int, world: int, backend: str, host: str, timeout_s: float
    ) -> None:
        """Form the group. Blocks until all members are there.

        Args:
            number: how often a group was formed; the members of this one have the same.
            host: address of this process's network interface; gloo binds to it.
        Raises:
            RuntimeError: not all members came within `timeout_s`.
        """
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"weights/{number}", store)
        prefixed.set_timeout(timeout)
        self.device = torch.device("cpu")
        self._group: Any  # torch's stubs know neither backend
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        else:
            options = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._options.timeout = self._timeout = timeout

    def broadcast(self, flat: Tensor) -> None:
        """Send `flat` (rank 0) or receive into it (others). Raises RuntimeError when a member is gone or late."""
        self._group.broadcast([flat], self._options).wait(self._timeout)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Drop the group without waiting for its members."""
        if hasattr(self._group, "abort"):
            self._group.abort()
        del self._group


# -- order, packing and digest -----------------------------------------------------------------------------------------


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
