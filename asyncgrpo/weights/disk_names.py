"""A model's tensors by the names and shapes that its checkpoint has on disk.

Transformers fuses some tensors when it loads a model, above all the experts of a mixture: one `gate_up_proj` in memory
is two matrices for each expert on disk. Engines and Hugging Face folders want what is on disk. The way back is
transformers' own; what is added here is that each piece is a view of the tensor it comes from, so that reading pieces
copies nothing and writing into them loads a model.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def saved_tensors(model: PreTrainedModel, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a checkpoint has, by their names in memory, in a fixed order.

    Args:
        remove_duplicate: a tied tensor appears once, under its first name.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not (remove_duplicate and id(tensor) in seen):
            seen.add(id(tensor))
            yield name, tensor


def disk_pieces(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What a checkpoint holds of one tensor of the model; the tensor itself, if it is the same on disk.

    Args:
        model: knows how it was loaded; its weights are not read.
        name: of the tensor, in memory.
        tensor: whole, in its shape in memory, on any device. On `meta` the pieces tell names and shapes for free.
    Returns:
        Pieces by their names on disk, in an order that depends only on the conversion. For every model type that we
        know they are views of `tensor`, which whoever writes into them must check.
    Raises:
        ValueError: transformers cannot revert the conversion of this tensor.
    """
    try:
        with torch.no_grad(), _WithoutCopies():
            return revert_weight_conversion(model, {name: tensor})
    except Exception as error:  # whatever a conversion trips over: it was written for all tensors at once
        raise ValueError(f"{name} cannot be turned back into what is on disk: {error}") from error


def disk_tensors(model: PreTrainedModel, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Every tensor of the model's checkpoint, in the order of `saved_tensors`, as views of the model's memory.

    Raises:
        ValueError: a tensor on disk is not made of one tensor in memory alone.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in saved_tensors(model, remove_duplicate=remove_duplicate):
        for piece_name, piece in disk_pieces(model, name, tensor).items():
            if piece_name in tensors:
                raise ValueError(f"{piece_name} on disk is made of {name} and of other tensors in memory")
            tensors[piece_name] = piece
    return tensors


class _WithoutCopies(TorchFunctionMode):
    """Inside, `contiguous` gives the tensor as it is: the splits of a reverted conversion stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
