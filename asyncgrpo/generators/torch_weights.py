"""New weights into a running transformers model, and a digest that says which weights it holds."""

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from asyncgrpo.errors import EngineError


@torch.no_grad()
def replace_tensors(
    places: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], *, partial: bool = False
) -> None:
    """Copy every tensor into the place of its name. Of tensors that are tied, one name or all may be given.

    Args:
        places: the model's memory by names on disk.
        tensors: all of them, or with `partial` some; the others then stay as they are.

    Raises:
        EngineError: a name is unknown, repeated or missing, a shape differs, or tied tensors got different values.
            The model is then part old and part new.
    """
    given: set[str] = set()
    written: set[int] = set()
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            raise EngineError(f"new weights have a tensor {name} that the model has not")
        if name in given:
            raise EngineError(f"new weights give the tensor {name} twice")
        if tensor.shape != place.shape:
            raise EngineError(f"new weights give {name} as {list(tensor.shape)}, the model has {list(place.shape)}")
        given.add(name)
        if place.data_ptr() not in written:
            place.copy_(tensor)
            written.add(place.data_ptr())
        elif not torch.equal(place, tensor.to(place)):
            raise EngineError(f"new weights give {name} another value than the tensor it is tied to")
    missing = [name for name, place in places.items() if place.data_ptr() not in written]
    if missing and not partial:
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
