"""The optimizer around AdamW: which updates are made, and where its moments wait.

One bad batch can undo a week; skipping it costs one batch. But a run that only skips learns nothing, so it ends.

They are on the parameters' device only inside `at_hand`. Off, or where the device is the CPU, nothing is moved.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asyncgrpo.errors import TrainingError

# -- which updates are made --------------------------------------------------------------------------------------------


WINDOW = 50
"""Norms that the median is of."""
ENOUGH = 10
"""Norms before anything is a spike."""


class GradientGuard:
    """Judges gradient norms in the order in which they come; the same on every rank."""

    def __init__(self, spike_factor: float | None, max_skips: int, grad_clip: float) -> None:
        """
        Args:
            spike_factor: a norm above this multiple of both the recent median and `grad_clip` is a spike; none: nothing
                is.
            max_skips: skipped updates in a row that end the run.
            grad_clip: norm to which gradients are clipped. Norms near it are harmless, however small the median has
                become: a run that has learnt has next to no gradient until it meets a group with signal.
        """
        self._factor, self._max_skips, self._clip = spike_factor, max_skips, grad_clip
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skips = 0
        """Updates skipped in a row."""

    def judge(self, norm: float) -> str | None:
        """Why the update of this norm is to be skipped; none: it is to be made.

        Raises:
            TrainingError: it was one too many.
        """
        reason = self._objection(norm)
        if reason is None:
            self.skips = 0
            if norm > 0:  # a step without signal says nothing of the others
                self._norms.append(norm)
            return None
        self.skips += 1
        if self.skips >= self._max_skips:
            raise TrainingError(
                f"{self.skips} updates in a row were skipped (learner.max_skips), the last because {reason}; "
                "look at learner.lr, at the rewards and at the log-prob gap, or raise learner.spike_factor"
            )
        return reason

    def memory(self) -> Tensor:
        """[1 + WINDOW] float64: updates skipped in a row, then the norms, NaN where there are fewer; for a checkpoint."""
        unknown = [math.nan] * (WINDOW - len(self._norms))
        return torch.tensor([self.skips, *self._norms, *unknown], dtype=torch.float64)

    def recall(self, memory: Tensor) -> None:
        """Go on from the `memory` of another one."""
        skips, *norms = memory.tolist()
        self.skips = int(skips)
        self._norms = deque((norm for norm in norms if not math.isnan(norm)), maxlen=WINDOW)

    def _objection(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self._factor is None or len(self._norms) < ENOUGH:
            return None
        usual = median(self._norms)
        if norm <= self._factor * max(usual, self._clip):
            return None
        measure = f"the recent median, {usual:.3g}" if usual > self._clip else f"learner.grad_clip, {self._clip:g}"
        return f"the gradient norm, {norm:.3g}, is above learner.spike_factor ({self._factor:g}) x {measure}"


# -- moments on the CPU ------------------------------------------------------------------------------------------------


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
