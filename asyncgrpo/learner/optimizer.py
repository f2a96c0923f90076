"""The optimizer around AdamW: its rate, which updates are made, and where its moments wait.

One bad batch can undo a week; skipping it costs one batch. But a run that only skips learns nothing, so it ends.

The moments of AdamW are two thirds of what a learner keeps. They may wait on the CPU, and are on the GPU a chunk at a time.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from asyncgrpo.config.schema import Config
from asyncgrpo.errors import TrainingError

# -- AdamW and its rate ------------------------------------------------------------------------------------------------


def make_optimizer(model: torch.nn.Module, config: Config) -> AdamW:
    """AdamW, with a larger rate for a critic's value head."""
    learner = config.learner
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in named if not name.startswith("value_head")], "lr_scale": 1.0}]
    critic = [p for name, p in named if name.startswith("value_head")]
    if critic:
        groups.append({"params": critic, "lr_scale": config.algorithm.critic.lr_scale})
    return AdamW(groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True)


def learning_rate(updates: int, config: Config, *, signal_share: float = 1.0) -> float:
    """The rate of the update after `updates` updates: a warm-up, a schedule, and what the step's groups can teach.

        lr        = learner.lr  warm-up  schedule  min(1, sqrt(signal_share / full_lr_signal))
        warm-up   = min(1, (updates + 1) / (warmup_steps + 1))
        schedule  constant   1
                  linear     lr_min_ratio + (1 - lr_min_ratio) (1 - p)
                  cosine     lr_min_ratio + (1 - lr_min_ratio) (1 + cos(pi p)) / 2
        p         = (updates - warmup_steps) / (updates of the whole run - warmup_steps), at least 0 and at most 1

    A resume with another `run.steps` goes on along the curve of the new length, at the update where it was.

    AdamW divides a gradient by its own recent size. Where nearly all prompts are solved, the one odd group that is left,
    or an entropy bonus alone, would be scaled up to a step as long as any: a run that has learnt unlearns. So the rate
    falls with the root of the number of groups that still teach.

    Args:
        signal_share: of the groups that are solved or have a signal, those that have a signal.
    Source:
        The root is the scaling rule of adaptive methods by batch size: Malladi et al. 2022, arXiv:2205.10287. What
        happens without it, and the alternatives: docs/stability.md.
    """
    learner = config.learner
    lr = learner.lr * min(1.0, (updates + 1) / (learner.warmup_steps + 1))
    if learner.lr_schedule != "constant":
        assert config.run.steps is not None, "checked with the configuration"
        total = config.run.steps * learner.updates_per_step
        progress = min(max((updates - learner.warmup_steps) / (total - learner.warmup_steps), 0.0), 1.0)
        left = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        lr *= learner.lr_min_ratio + (1 - learner.lr_min_ratio) * left
    if learner.full_lr_signal:
        lr *= min(1.0, math.sqrt(signal_share / learner.full_lr_signal))
    return lr


# -- which updates are made --------------------------------------------------------------------------------------------


WINDOW = 50
"""Norms that the median is of."""
ENOUGH = 10
"""Norms before anything is a spike."""
MAX_SKIPS = 20
"""Skipped updates in a row that end the run."""


class GradientGuard:
    """Judges gradient norms in the order in which they come; the same on every rank."""

    def __init__(self, spike_factor: float | None, grad_clip: float, *, max_skips: int = MAX_SKIPS) -> None:
        """
        Args:
            spike_factor: a norm above this multiple of both the recent median and `grad_clip` is a spike; none: nothing
                is.
            grad_clip: norm to which gradients are clipped. Norms near it are harmless, however small the median has
                become: a run that has learnt has next to no gradient until it meets a group with signal.
            max_skips: skipped updates in a row that end the run.
        """
        self._factor, self._max_skips, self._clip = spike_factor, max_skips, grad_clip
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skips = 0
        """Updates skipped in a row."""

    def judge(self, norm: float) -> str | None:
        """Why the update of this norm is to be skipped; none: nothing is against it. A norm of 0 changes nothing here.

        Raises:
            TrainingError: it was one too many.
        """
        if norm == 0:  # says nothing of the others
            return None
        reason = self._objection(norm)
        if reason is None:
            self.skips = 0
            self._norms.append(norm)
            return None
        self.skips += 1
        if self.skips >= self._max_skips:
            raise TrainingError(
                f"{self.skips} updates in a row were skipped, the last because {reason}; "
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


CHUNK_BYTES = 2**30
"""Moments that are on the GPU at once, unless those of one parameter are more."""
_ALIGNED = 4
"""Moments begin at a multiple of so many numbers, 16 bytes, so that AdamW's kernel reads them four at a time."""


class OptimizerOffload:
    """Steps an AdamW whose moments wait on the CPU, a chunk of parameters at a time. Off, it is just the AdamW."""

    def __init__(self, optimizer: AdamW, *, is_on: bool) -> None:
        """
        Args:
            optimizer: that has made no step yet. Its groups are divided into chunks.
        """
        self._optimizer = optimizer
        self._chunks: list[_Chunk] = []
        if is_on:
            optimizer.param_groups = [
                group | {"params": params} for group in optimizer.param_groups for params in _chunks(group["params"])
            ]
            self._chunks = [_Chunk(group["params"], optimizer.state) for group in optimizer.param_groups]

    def step(self) -> None:
        """Make the optimizer's step, with bitwise identical results."""
        if not self._chunks:
            self._optimizer.step()
            return
        groups = self._optimizer.param_groups
        try:
            for group, chunk in zip(groups, self._chunks, strict=True):
                self._optimizer.param_groups = [group]
                with chunk.at_hand():
                    self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        if self._chunks[0].device.type == "cuda":
            torch.cuda.current_stream(self._chunks[0].device).synchronize()  # a checkpoint may read them from now on


class _Chunk:
    """Some parameters; both moments of each are parts of one flat tensor, which is copied in one piece.

    One large tensor in pinned memory, because torch rounds up the size of each to a power of two.
    """

    def __init__(self, parameters: list[Tensor], state: dict[Tensor, Any]) -> None:
        """Make the state that AdamW would make at its first step."""
        self._parameters, self._state = parameters, state
        self.device = _local(parameters[0]).device
        size = 2 * sum(map(_places, parameters))
        self._waiting = torch.zeros(size, dtype=parameters[0].dtype, pin_memory=self.device.type == "cuda")
        for parameter in parameters:
            state[parameter] = {"step": torch.zeros((), device=self.device)}
        self._hand_out(self._waiting)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """The moments are where the parameters are, inside the block."""
        if self._waiting.device == self.device:
            yield
            return
        here = self._waiting.to(self.device, non_blocking=True)
        self._hand_out(here)
        try:
            yield
        finally:
            _bring_back(here, self._waiting)
            self._hand_out(self._waiting)

    def _hand_out(self, flat: Tensor) -> None:
        start = 0
        for parameter in self._parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                local = _local(parameter)
                moments = flat[start : start + local.numel()].view(local.shape)
                self._state[parameter][name] = sharded_like(parameter, moments)
                start += _places(parameter)


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in their order, as many at a time as have moments of up to CHUNK_BYTES."""
    chunk: list[Tensor] = []
    size = 0
    for parameter in parameters:
        own = 2 * _places(parameter) * parameter.itemsize
        if chunk and size + own > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += own
    yield chunk


def _places(parameter: Tensor) -> int:
    """Numbers that one moment of the parameter takes on this rank."""
    return -(-_local(parameter).numel() // _ALIGNED) * _ALIGNED


def _bring_back(here: Tensor, waiting: Tensor) -> None:
    waiting.copy_(here, non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """The shard of this rank as a tensor like `parameter`, on any device."""
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would bring the shard back to the mesh's device.
    return DTensor(local, parameter._spec, requires_grad=False)
