"""The optimizer's moments on the CPU while nobody needs them: half of the memory of full training.

They are on the parameters' device only inside `at_hand`. Off, or where the device is the CPU, nothing is moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class OptimizerOffload:
    """Moves the state of one optimizer."""

    def __init__(self, optimizer: Optimizer, *, is_on: bool) -> None:
        self._optimizer, self._is_on = optimizer, is_on

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """The moments are where their parameters are, inside the block."""
        self._move(to_parameters=True)
        try:
            yield
        finally:
            self._move(to_parameters=False)

    @torch.no_grad()
    def _move(self, *, to_parameters: bool) -> None:
        if not self._is_on:
            return
        for parameter, state in self._optimizer.state.items():
            device = parameter.device if to_parameters else torch.device("cpu")
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and _local(value).device != device:
                    state[name] = _moved(value, device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A sharded tensor keeps its placements; only the shard of this rank moves."""
    if not isinstance(tensor, DTensor):
        return tensor.to(device)
    # Not from_local, which would bring the shard back to the mesh's device.
    return DTensor(tensor.to_local().to(device), tensor._spec, requires_grad=False)
