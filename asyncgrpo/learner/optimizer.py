"""The optimizer around AdamW: learning rate, gradient guard, and CPU offload of the moments.

One bad batch can undo a week of training, and skipping it costs one batch. A run that only skips learns nothing, so it ends.

The moments of AdamW are two thirds of the learner's state. Offloaded, they are kept on the CPU and moved to the GPU one chunk at
a time.
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
from asyncgrpo.learner.parallel import by_mesh

# -- AdamW and its rate ------------------------------------------------------------------------------------------------


def make_optimizer(model: torch.nn.Module, config: Config) -> AdamW:
    """Return AdamW, with a larger learning rate for a critic's value head."""
    learner = config.learner
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    others = [p for name, p in named if not name.startswith("value_head")]
    groups: list[dict[str, Any]] = [{"params": some, "lr_scale": 1.0} for some in by_mesh(others)]
    critic = [p for name, p in named if name.startswith("value_head")]
    if critic:
        groups.append({"params": critic, "lr_scale": config.algorithm.critic.lr_scale})
    return AdamW(groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True)


def learning_rate(updates: int, config: Config, *, total: int | None = None, signal_share: float = 1.0) -> float:
    """Return the learning rate of the update after `updates` updates: warm-up, schedule, and share of informative groups.

        lr        = learner.lr  warm-up  schedule  min(1, sqrt(signal_share / full_lr_signal))
        warm-up   = min(1, (updates + 1) / (warmup_steps + 1))
        schedule  constant   1
                  linear     lr_min_ratio + (1 - lr_min_ratio) (1 - p)
                  cosine     lr_min_ratio + (1 - lr_min_ratio) (1 + cos(pi p)) / 2
        p         = (updates - warmup_steps) / (updates of the whole run - warmup_steps), at least 0 and at most 1

    A resume with another `run.steps` or other minibatches continues on the curve of the new length, at the same update.

    AdamW divides a gradient by its own recent size. If nearly all prompts are solved, a single remaining group, or an entropy
    bonus alone, would be scaled up to a full step, and a trained run unlearns. So the rate falls with the square root of the
    number of informative groups.

    Args:
        total: updates of the whole run; None: every step makes as many as now.
        signal_share: share of groups with a signal among groups that are solved or have a signal.
    Source:
        Square-root scaling of adaptive methods by batch size: Malladi et al. 2022, arXiv:2205.10287. Effect and
        alternatives: docs/stability.md.
    """
    learner = config.learner
    lr = learner.lr * min(1.0, (updates + 1) / (learner.warmup_steps + 1))
    if learner.lr_schedule != "constant":
        assert config.run.steps is not None, "checked with the configuration"
        total = total or config.run.steps * learner.updates_per_step
        progress = min(max((updates - learner.warmup_steps) / max(total - learner.warmup_steps, 1), 0.0), 1.0)
        left = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        lr *= learner.lr_min_ratio + (1 - learner.lr_min_ratio) * left
    if learner.full_lr_signal:
        lr *= min(1.0, math.sqrt(signal_share / learner.full_lr_signal))
    return lr


# -- gradient guard ----------------------------------------------------------------------------------------------------


WINDOW = 50
"""Norms of the running median."""
ENOUGH = 10
"""Minimum number of norms before a spike is possible."""
MAX_SKIPS = 20
"""Skipped updates in a row that end the run."""


class GradientGuard:
    """Judges gradient norms in order, with equal results on all ranks."""

    def __init__(self, spike_factor: float | None, grad_clip: float) -> None:
        """
        Args:
            spike_factor: a norm above this multiple of both the recent median and `grad_clip` is a spike; None: no norm
                is.
            grad_clip: norm to which gradients are clipped. Norms near it are harmless even with a tiny median: a trained
                run has almost no gradient until a group with a signal arrives.
        """
        self._factor, self._clip = spike_factor, grad_clip
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skips = 0
        """Updates skipped in a row."""

    def judge(self, norm: float) -> str | None:
        """Return the reason to skip an update with this norm; None to make it. A norm of 0 does not change the guard.

        Raises:
            TrainingError: too many skips in a row.
        """
        if norm == 0:  # no evidence about later norms
            return None
        reason: str | None = None
        usual = median(self._norms) if len(self._norms) >= ENOUGH else math.inf
        if not math.isfinite(norm):
            reason = f"the gradient norm is {norm}"
        elif self._factor is not None and norm > self._factor * max(usual, self._clip):
            above = f"the recent median, {usual:.3g}" if usual > self._clip else f"learner.grad_clip, {self._clip:g}"
            reason = f"the gradient norm, {norm:.3g}, is above learner.spike_factor ({self._factor:g}) x {above}"
        if reason is None:
            self.skips = 0
            self._norms.append(norm)
            return None
        self.skips += 1
        if self.skips >= MAX_SKIPS:
            raise TrainingError(
                f"{self.skips} updates in a row were skipped, the last because {reason}; "
                "look at learner.lr, at the rewards and at the log-prob gap, or raise learner.spike_factor"
            )
        return reason

    def memory(self) -> Tensor:
        """Return [1 + WINDOW] float64 for a checkpoint: skips in a row, then the norms, padded with NaN."""
        unknown = [math.nan] * (WINDOW - len(self._norms))
        return torch.tensor([self.skips, *self._norms, *unknown], dtype=torch.float64)

    def recall(self, memory: Tensor) -> None:
        """Restore the `memory` of another guard."""
        skips, *norms = memory.tolist()
        self.skips = int(skips)
        self._norms = deque((norm for norm in norms if not math.isnan(norm)), maxlen=WINDOW)


# -- moments on the CPU ------------------------------------------------------------------------------------------------


CHUNK_BYTES = 2**30
"""Maximum size of the moments on the GPU, unless those of a single parameter are larger."""
_ALIGNED = 4
"""Alignment of moments in numbers (16 bytes), so that AdamW's kernel uses vectorized loads."""


class OptimizerOffload:
    """Steps an AdamW whose moments are on the CPU, one chunk of parameters at a time."""

    def __init__(self, optimizer: AdamW) -> None:
        """
        Args:
            optimizer: without steps so far. Its groups are split into chunks.
        """
        self._optimizer = optimizer
        optimizer.param_groups = [
            group | {"params": params} for group in optimizer.param_groups for params in _chunks(group["params"])
        ]
        self._chunks = [_Chunk(group["params"], optimizer.state) for group in optimizer.param_groups]

    def step(self) -> None:
        """Step the optimizer. Results are bitwise those without offload."""
        groups = self._optimizer.param_groups
        try:
            for group, chunk in zip(groups, self._chunks, strict=True):
                self._optimizer.param_groups = [group]
                with chunk.at_hand():
                    self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        if self._chunks[0].device.type == "cuda":
            torch.cuda.current_stream(self._chunks[0].device).synchronize()  # a checkpoint may read them now


class _Chunk:
    """Parameters whose moments are views of one flat tensor, which is copied in one transfer.

    One large pinned tensor, because torch rounds up the size of each to a power of two.
    """

    def __init__(self, parameters: list[Tensor], state: dict[Tensor, Any]) -> None:
        """Create the state that AdamW would create in its first step."""
        self._parameters, self._state = parameters, state
        self.device = _local(parameters[0]).device
        size = 2 * sum(map(_places, parameters))
        self._waiting = torch.zeros(size, dtype=parameters[0].dtype, pin_memory=self.device.type == "cuda")
        for parameter in parameters:
            state[parameter] = {"step": torch.zeros((), device=self.device)}
        self._hand_out(self._waiting)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Move the moments to the device of the parameters inside the block."""
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
    """Yield parameters in order, in chunks with moments of up to CHUNK_BYTES."""
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
    """Return the numbers that one moment of the parameter occupies on this rank, with padding."""
    return -(-_local(parameter).numel() // _ALIGNED) * _ALIGNED


def _bring_back(here: Tensor, waiting: Tensor) -> None:
    waiting.copy_(here, non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return the shard of this rank as a tensor like `parameter`, on any device."""
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would move the shard to the mesh's device.
    return DTensor(local, parameter._spec, requires_grad=False)
