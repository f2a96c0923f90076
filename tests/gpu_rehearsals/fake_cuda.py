"""A learner rank that believes that it has a GPU: real code, real branches for CUDA, tensors without values.

Tensors of device `cuda` are torch's fake tensors: they have shapes, dtypes and devices, and every operation on them is
checked as on a card, above all that its operands are on one device. What is read out of one, as with `item`, is 1.
Tensors on the CPU are real. The process group is torch's fake one, of as many ranks as asked for: collectives return at once.

What it cannot show: values, memory, time, streams, NCCL, kernels, and the backward pass, for which a CPU build of torch has no
device guard.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda._utils import _get_device_index
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from asyncgrpo.learner import model

aten = torch.ops.aten


@contextmanager
def fake_gpu(world: int) -> Iterator[None]:
    """Rank 0 of `world`, on card 0, without gradients. Ends a process group that is there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with ExitStack() as stack:
        for name, value in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Event", _Quiet))
        stack.enter_context(mock.patch.object(model, "fully_shard", _moved_and_sharded))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeCuda())
        stack.enter_context(_WithoutGuard())
        yield


class FakeCuda(TorchDispatchMode):
    """Sends to torch's fake tensors whatever has to do with CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        is_fake = any(isinstance(x, FakeTensor) for x in tree_flatten((args, kwargs))[0])
        if not is_fake and (to is None or torch.device(to).type != "cuda"):
            kwargs.pop("pin_memory", None)  # there is no card to pin it for
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and to is not None and torch.device(to).type == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].fill_(1)
        args, kwargs = tree_map(self._faked, (args, kwargs))
        with self._fake:
            return func(*args, **kwargs)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            value = self._fake.from_tensor(value)
        if isinstance(value, FakeTensor):
            value.constant = None  # else torch would compute with it, on a card
        return value


class _WithoutGuard(TorchFunctionMode):
    """What torch does in C++ with a guard of the device, or with an allocator of pinned memory, by other means."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        if func in _WITHOUT_GUARD and isinstance(args[0], FakeTensor):
            return _WITHOUT_GUARD[func](*args)
        return func(*args, **(kwargs or {}))


def _copy(tensor: Tensor, source: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return aten.copy_.default(tensor, torch.as_tensor(source))


def _moved_and_sharded(module: nn.Module, **how: Any) -> nn.Module:
    """FSDP would move what is on the CPU by giving it other data, and a fake tensor cannot be that of a real one."""
    for part in module.modules():
        for named in (part._parameters, part._buffers):
            for name, tensor in named.items():
                if tensor is not None and tensor.device.type == "cpu":
                    moved = tensor.to("cuda:0")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    named[name] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    return fully_shard(module, **how)


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]` for numbers, slices, None, an ellipsis and one tensor."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        at = index.index(Ellipsis)
        whole = tensor.dim() - sum(i is not None for i in index) + 1
        index = (*index[:at], *[slice(None)] * whole, *index[at + 1 :])
    dim = 0
    for i in index:
        if i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, int):
            tensor, dim = tensor.select(dim, i), dim - 1
        elif isinstance(i, slice):
            tensor = aten.slice(tensor, dim, i.start, i.stop, i.step or 1)
        else:
            tensor = aten.index(tensor, [None] * dim + [i])
        dim += 1
    return tensor


_WITHOUT_GUARD: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: lambda tensor, index, value: _copy(_indexed(tensor, index), value),
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.copy_: _copy,
}


class _Quiet:
    """An event, or a stream: takes every call, and does nothing."""

    def __init__(self, *ignored: Any, **also_ignored: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *ignored, **also_ignored: _Quiet()


_CUDA: dict[str, Callable[..., Any] | type] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: _get_device_index(device),  # torch's own check
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**20),  # too little to keep activations
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: _Quiet(),
    "stream": lambda stream: nullcontext(),
    "Stream": _Quiet,
    "Event": _Quiet,
    "_lazy_init": lambda: None,
}
