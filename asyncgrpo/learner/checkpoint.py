"""Sharded checkpoints, from which training goes on bit for bit.

A checkpoint holds the trained parameters, both AdamW moments of each, the number of updates, the coefficient of the KL
and what the gradient guard remembers, in torch's distributed format: every rank writes its shard, and any number of ranks
can read it. It is complete when it has a `.metadata` file, which is written last. Frozen weights (LoRA's base) are not in
it; they come from `model.path` again.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import AdamW

from asyncgrpo.errors import CheckpointError


def save(folder: str, model: nn.Module, optimizer: AdamW, steps: int, kl_coef: float, guard: Tensor) -> None:
    """Write a checkpoint; `guard` is the memory of the gradient guard. Collective. Raises CheckpointError."""
    try:
        dcp.save(_state(model, optimizer, steps, kl_coef, guard), checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be written: {_cause(error)}") from error


def load(folder: str, model: nn.Module, optimizer: AdamW, guard: Tensor) -> tuple[int, float, Tensor]:
    """Read a checkpoint into model and optimizer, and give its updates, its KL coefficient and the guard's memory.

    Collective. A checkpoint of version 0.1 has no such memory; then `guard` is given back as it is.

    Raises CheckpointError; where the checkpoint is of another model, weights may then be part old, part new.
    """
    if not Path(folder, ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder} is not complete: it has no .metadata file")
    state = _state(model, optimizer, 0, 0.0, guard)
    try:
        if "guard" not in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata:
            del state["guard"]
        dcp.load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {folder} does not fit model and configuration: {_cause(error)}") from error
    steps = int(state["steps"])
    for moments in optimizer.state.values():
        moments["step"].fill_(steps)
    return steps, float(state["kl_coef"]), state.get("guard", guard)


def _state(model: nn.Module, optimizer: AdamW, steps: int, kl_coef: float, guard: Tensor) -> dict[str, Tensor]:
    """Name to tensor. All but the first three is the memory of model and optimizer, so loading in place is enough."""
    state = {"steps": torch.tensor(steps), "kl_coef": torch.tensor(kl_coef, dtype=torch.float64), "guard": guard}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:  # what AdamW makes at its first step
            moments["step"] = torch.zeros((), device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state[f"model.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    return state


def _cause(error: BaseException) -> str:
    """One line. Torch gathers what failed on each rank into an exception that is not an `Exception`."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {failure}"
    return str(error)
