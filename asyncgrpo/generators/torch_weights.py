"""New weights into a running transformers model, and a digest that says which weights it holds."""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor, nn

from asyncgrpo.errors import EngineError


def replace_parameters(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor into the parameter of its name, in place.

    Names are those of `model.named_parameters()`; of parameters that are tied, one name or all may be given.

    Raises:
        EngineError: a name is unknown, repeated or missing, a shape differs, or tied parameters got different values.
            The model is then part old and part new.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    given: set[str] = set()
    written: set[int] = set()
    for name, tensor in tensors:
        if name not in parameters:
            raise EngineError(f"new weights have a tensor {name} that the model has not")
        if name in given:
            raise EngineError(f"new weights give the tensor {name} twice")
        parameter = parameters[name]
        if tensor.shape != parameter.shape:
            raise EngineError(f"new weights give {name} as {list(tensor.shape)}, the model has {list(parameter.shape)}")
        given.add(name)
        if id(parameter) not in written:
            with torch.no_grad():
                parameter.copy_(tensor)
            written.add(id(parameter))
        elif not torch.equal(parameter, tensor.to(parameter)):
            raise EngineError(f"new weights give {name} another value than the parameter it is tied to")
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in written]
    if missing:
        raise EngineError(f"new weights lack {len(missing)} of the model's tensors, the first is {missing[0]}")


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex text of 32 digits over names, shapes, dtypes and bytes (xxh3_128); the order of `tensors` does not matter.

    Each tensor is read before the next is asked for, so whoever gives them may use one buffer for all.
    """
    parts = []
    for name, tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        parts.append(f"{name} {list(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(content)}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(parts)).encode())
