"""Whether all of an engine's model follows its weights: if they change their signs, every parameter must change its own.

SGLang ignores tensors whose names it does not know, and all engines ignore them alike; in bfloat16 the sync gap sees it only
when the model has moved by more than rounding. So the first weights of an engine are written three times, in one pause: as they
are, with every sign changed, and as they are again. Changing signs is exact in every dtype, and holds through whatever
fuses, splits or moves tensors on their way into parameters.

Left out are numbers that are not of two or four bytes (quantized weights and their scales), and parameters whose elements
are all the same, such as scales that a checkpoint need not have. Zeros, as in padded rows, have no sign.
"""

import torch
from torch import Tensor

from asyncgrpo.weights.digest import WORD, digest

_BITS = {2: torch.int16, 4: torch.int32}
"""What the bits of a float of so many bytes are read as."""
_AT_ONCE = 2**23
"""Elements that are looked at together: what is copied of a parameter."""
MAX_NAMES = 20
FINDING = "the weights that were sent are not all of the model"


def changed(tensor: Tensor) -> Tensor:
    """A copy of floats with all signs changed, bit by bit; other tensors as they are."""
    if not _has_signs(tensor):
        return tensor
    bits = _BITS[tensor.element_size()]
    return (tensor.detach().contiguous().view(bits) ^ torch.iinfo(bits).min).view(tensor.dtype)


def signs_of(model: torch.nn.Module, *, change: bool) -> dict[str, int]:
    """The digest of every parameter that has signs, as it is, or as it would be with all of them changed."""
    return {
        name: _digest_of(tensor.detach(), change) for name, tensor in model.named_parameters() if _has_signs(tensor)
    }


def unmoved(model: torch.nn.Module, expected: dict[str, int]) -> list[str]:
    """The parameters that are not as `expected`, without those whose elements are all the same."""
    found, tensors = signs_of(model, change=False), dict(model.named_parameters())
    return [name for name in found if found[name] != expected.get(name) and not _is_constant(tensors[name])]


def describe(names: list[str]) -> str:
    """A sentence for parameters that do not follow."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{FINDING}: {', '.join(names[:MAX_NAMES])}{more} did not follow them"


def _has_signs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() in _BITS


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.reshape(-1)[:1]).all()) if tensor.numel() else True


def _digest_of(tensor: Tensor, change: bool) -> int:
    bits = _BITS[tensor.element_size()]
    flat, sign, total = tensor.contiguous().view(bits).reshape(-1), torch.iinfo(bits).min, 0
    for start in range(0, len(flat), _AT_ONCE):
        piece = flat[start : start + _AT_ONCE]
        piece = torch.where((piece & ~sign) != 0, piece ^ sign if change else piece, 0)
        missing = -piece.nbytes % WORD // piece.element_size()
        total += digest(torch.nn.functional.pad(piece, (0, missing)).view(torch.uint8), start * piece.element_size())
    return total
