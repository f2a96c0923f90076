"""Sends new weights from this process into SGLang's schedulers, by the calls that replace them in place.

Weights that were received into shared memory (`weights.arena.Staging`) stay where they are: all schedulers map the same
pages, so that the pause has one copy in it, theirs. Other tensors are packed into buckets, one byte tensor each; a small
bucket goes inside the message, a larger one into shared memory.
"""

import asyncio
import itertools
import pickle
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
from torch import Tensor

from asyncgrpo.errors import EngineError

BUCKET_BYTES = 64 << 20
"""Size of a bucket, unless one tensor is larger. Packing one blocks the event loop for some 20 ms."""
INLINE_BYTES = 4 << 20
"""Buckets up to this size travel inside the message: 2 ms against 10 ms for a handle of shared memory (measured)."""
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class PackedBucket:
    """Packed tensors of the model, ready to send."""

    payloads: list[bytes]
    """One payload for each scheduler process."""
    is_last: bool


async def replace_weights(
    manager: Any,
    tensors: Iterable[tuple[str, Tensor]],
    label: str,
    *,
    keep_kv: bool,
    num_schedulers: int,
) -> None:
    """Pause between two tokens, write all tensors, go on.

    SGLang handles messages in the order in which they were sent, so those of the last bucket are all sent before the
    first reply is awaited: the pause of a small model takes no round trip. If SGLang refuses one in the middle, it goes
    on with the weights it has, and the caller must not let it sample.

    Args:
        manager: SGLang's TokenizerManager. No request may be submitted meanwhile.
        tensors: every tensor of the model, read once.
        label: SGLang's name of the new weights; it becomes visible with the last bucket.
        keep_kv: False recomputes keys and values of requests in flight, and drops the prefix cache.
    Raises:
        EngineError: SGLang refused. The weights may be part old, part new.
    """
    given = list(tensors)
    received = shared_run(given)
    buckets = pack(given, num_schedulers) if received is None else iter([as_received(given, received, num_schedulers)])
    first = next(buckets)  # made before the pause
    await manager.pause_generation(PauseGenerationReqInput(mode="in_place" if keep_kv else "retract"))
    session = _Session(manager)
    session.send("begin_weight_update", BeginWeightUpdateReqInput())
    failure: Exception | None = None
    try:
        await session.write(itertools.chain([first], buckets), label, flush_cache=not keep_kv)
    except Exception as error:
        failure = error
    # In any case: a session left open would refuse the next load, which may repair what went wrong.
    session.send("end_weight_update", EndWeightUpdateReqInput())
    await asyncio.sleep(0)  # lets the tasks above send
    await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    results = await asyncio.gather(*session.replies, return_exceptions=True)
    for problem in [failure, *results]:
        if problem is not None:
            raise problem


class _Session:
    """What is written between the begin and the end of one change of weights."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.replies: list[asyncio.Task[None]] = []
        """Those that are still awaited."""

    def send(self, call: str, message: Any) -> None:
        self.replies.append(asyncio.create_task(_ask(call, getattr(self._manager, f"{call}_communicator"), message)))

    async def write(
        self, buckets: Iterable[PackedBucket], label: str | None = None, *, flush_cache: bool = False
    ) -> None:
        """Write all buckets. The reply to the last one is not awaited."""
        for bucket in buckets:
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=bucket.payloads,
                load_format="flattened_bucket",
                flush_cache=bucket.is_last and flush_cache,
                weight_version=label if bucket.is_last else None,
            )
            self.send("update_weights_from_tensor", update)
            if not bucket.is_last:  # the next bucket needs its memory
                await self.settle()

    async def settle(self) -> None:
        """Wait for all replies."""
        await asyncio.gather(*self.replies)
        self.replies = []


async def _ask(call: str, communicator: Any, message: Any) -> None:
    refusals = [reply.message for reply in await communicator(message) if not reply.success]
    if refusals:
        raise EngineError(f"{call}: {refusals[0]}")


def shared_run(tensors: list[tuple[str, Tensor]]) -> Tensor | None:
    """The shared memory of which all tensors are parts, [bytes] uint8; None: they are not, or a message holds them."""
    if not tensors or sum(tensor.nbytes for _, tensor in tensors) <= INLINE_BYTES:
        return None
    storage = tensors[0][1].untyped_storage()
    for _, tensor in tensors:
        is_part = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (is_part and tensor.is_shared() and tensor.is_contiguous()):
            return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def as_received(tensors: list[tuple[str, Tensor]], memory: Tensor, num_schedulers: int) -> PackedBucket:
    """All tensors where they lie in `memory`, [bytes] uint8, which must not change until SGLang has replied."""
    layout = []
    for name, tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size()
        end = start + tensor.nbytes
        layout.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes))
    content = {"flattened_tensor": memory, "metadata": layout}
    return PackedBucket([MultiprocessingSerializer.serialize(content) for _ in range(num_schedulers)], is_last=True)


def pack(tensors: Iterable[tuple[str, Tensor]], num_schedulers: int) -> Iterator[PackedBucket]:
    """Buckets of about BUCKET_BYTES, at least one. Their memory is reused, so each must be read before the next is taken.

    Besides the bucket only the next tensor is held, which shows whether the bucket is the last.
    """
    rest = iter(tensors)
    ahead = next(rest, None)
    if ahead is None:
        raise EngineError("no tensors were given")
    shared: Tensor | None = None
    while ahead is not None:
        taken: list[tuple[str, Tensor]] = []
        size = 0
        while ahead is not None and (not taken or size + ahead[1].nbytes <= BUCKET_BYTES):
            taken.append(ahead)
            size += _aligned(ahead[1].nbytes)
            ahead = next(rest, None)
        if size <= INLINE_BYTES:
            target = torch.empty(size, dtype=torch.uint8)
        else:
            if shared is None or len(shared) < size:
                shared = _share(max(size, BUCKET_BYTES if ahead is not None else 0))
            target = shared[:size]
        content = {"flattened_tensor": target, "metadata": _copy_into(target, taken)}
        serialize = MultiprocessingSerializer.serialize if target.is_shared() else pickle.dumps
        yield PackedBucket([serialize(content) for _ in range(num_schedulers)], is_last=ahead is None)


def _copy_into(target: Tensor, tensors: list[tuple[str, Tensor]]) -> list[FlattenedTensorMetadata]:
    """Write the bytes of all tensors one after the other into `target`, [bytes] uint8. Returns where each one lies."""
    layout, start = [], 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        target[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        layout.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes))
        start += _aligned(tensor.nbytes)
    return layout


def _aligned(size: int) -> int:
    """Round up to 16 bytes: a tensor must start at a multiple of its element's size, whatever lies before it."""
    return (size + 15) // 16 * 16


def _share(size: int) -> Tensor:
    """[size] uint8 that other processes can map; where it does not fit, memory of this one, to travel inside the message."""
    memory = torch.empty(size, dtype=torch.uint8)
    # Writing to shared memory that is full kills the process (SIGBUS), so look before.
    return memory.share_memory_() if size < shutil.disk_usage(SHARED_MEMORY).free else memory
