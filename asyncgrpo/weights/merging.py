"""Low-rank adapters into base weights: one arithmetic for the learner and for every generator, to the last bit.

The product of an adapter's two matrices is exact in float64 before it is rounded, so it depends neither on the order in
which a library sums nor on how many threads, which instructions or which device it uses. Whoever merges the same bytes
holds the same bytes, and the checksums of engines on different machines can be compared.
"""

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

DOWN, UP = ".lora_A", ".lora_B"
"""A published adapter of the weight W is W.lora_A, [rank, in], and W.lora_B, [out, rank] with the scale multiplied in."""
SAMPLES = 4096
"""Values of one tensor that `fingerprint` looks at; all of a smaller one."""
_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # elements merged at once: on a CPU all of it stays in a core's cache
_EXACT = 53  # bits of a float64: integers up to 2^53 are exact


@torch.no_grad()
def merge(base: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """base + up @ down, added in float32 and rounded once.

    First every rank-one part gets a `down` of size about 1, by a power of two that `up` takes over. Then `up` and `down`
    are rounded to 22 to 26 bits relative to the largest value of a row of `up` and of a column of `down`, which is about
    what float32 itself keeps. Their product is exact until it is rounded to float32.

    Args:
        base: [out, in], any floating dtype.
        up: [out, rank] float32, the adapter's scale multiplied in.
        down: [rank, in] float32.
        dtype: of the result.
    Returns:
        [out, in] on the device of `up`; of the same bits on every device.
    """
    rank = down.shape[0]
    bits = (_EXACT - (rank - 1).bit_length()) // 2
    size = _power_of_two(down.double(), dim=1)
    up, down = _on_grid(up * size.T, bits, dim=1), _on_grid(down / size, bits, dim=0)
    merged = torch.empty(base.shape, dtype=dtype, device=up.device)
    rows = max(1, _CHUNK[up.device.type] // base.shape[1])
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        merged[part] = (up[part] @ down).float().add_(base[part].to(up.device, torch.float32))
    return merged


def _on_grid(matrix: Tensor, bits: int, *, dim: int) -> Tensor:
    """The nearest multiples of a power of two, at most 2^bits of them, one power for each line along `dim`.

    Products of two such numbers are multiples of one power of two for each element of the result, and a sum of `rank` of
    them stays below 2^53 multiples: every partial sum is exact.
    """
    step = _power_of_two(matrix, dim=dim) * 2.0**-bits
    return (matrix / step).round_().mul_(step)


def _power_of_two(matrix: Tensor, *, dim: int) -> Tensor:
    """Float64, the smallest above every absolute value of a line along `dim`; 1 for a line of zeros."""
    exponent = torch.frexp(matrix.abs().amax(dim, keepdim=True)).exponent.long()
    return ((exponent + 1023) << 52).view(torch.float64)  # the bits of it, which `pow` need not hit


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Tells one set of base weights from another: 32 hex digits over names, shapes and an even sample of the values.

    Two models that were trained apart differ nearly everywhere, so the sample finds them out; one changed value it may
    miss. Values are compared as float32, whatever they are kept in.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        step = max(1, tensor.numel() // SAMPLES) | 1  # odd, so that it does not stay in one column
        digest.update(tensor.detach().reshape(-1)[::step].float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def content_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits over names and all bytes of CPU tensors, in their order."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pairs(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name of the weight, `up` and `down` of each published adapter, from its two tensors one after the other."""
    source = iter(tensors)
    for (down_name, down), (up_name, up) in zip(source, source, strict=True):
        name = down_name.removesuffix(DOWN)
        assert (down_name, up_name) == (name + DOWN, name + UP), f"{down_name} and {up_name} are no adapter"
        yield name, up, down
