"""How many bytes a rank of the learner holds at the fullest moment of a step, counted tensor by tensor on the CPU.

The learner is the real one, with FSDP2, in torch's fake process group: rank 0 of several, whose collectives move nothing.
What a GPU adds is not here: its allocator's blocks, its context, NCCL's buffers, and the flash kernel's workspace.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from asyncgrpo.learner.learner import Learner


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process is rank 0 of so many, inside the block."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def peak_bytes(learner: Learner, step: Callable[[], object]) -> int:
    """The most that is held at once during `step`: weights, moments, and every tensor that is made."""
    moments = [x for state in learner.optimizer.state.values() for x in state.values()]
    with _Held([*learner.model.parameters(), *moments]) as held:
        step()
    return held.peak


class _Held(TorchDispatchMode):
    """Counts the memory behind tensors, once each, from their making to their end. FSDP2 also resizes it in place."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = self.peak = 0
        for tensor in there:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor)
        return out

    def __enter__(self) -> "_Held":
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _add(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self._sizes:
            self._change(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._end, storage._cdata)

    def _change(self, key: int, size: int) -> None:
        self._now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self._now)

    def _end(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
