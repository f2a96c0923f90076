"""Merges low-rank adapters into their base weights, with bitwise identical results on the learner and every generator.

The product of an adapter's two matrices is exact in float64 before it is rounded. So it does not depend on the order in
which a library sums, nor on threads, instructions or device. Processes that merge the same bytes get the same bytes, and
the checksums of engines on different machines can be compared.

The files of the base are mapped into memory and read tensor by tensor, so a base costs page cache and no copy.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.types import TensorInfo

# -- the merge ---------------------------------------------------------------------------------------------------------


DOWN, UP = ".lora_A", ".lora_B"
"""A published adapter of the weight W is W.lora_A [rank, in] and W.lora_B [out, rank], the scale multiplied in."""
SAMPLES = 4096
"""Values of one tensor that `fingerprint` reads; of a smaller tensor it reads all."""
_CHUNK = {"cpu": 2**19, "cuda": 2**24}  # elements merged at once: on a CPU they stay in a core's cache
_EXACT = 53  # bits of a float64: integers up to 2^53 are exact


@torch.no_grad()
def merge(base: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute base + up @ down, added in float32 and rounded once.

    First, a power of two moves from each row of `down` to `up`, so that rows of `down` have size about 1. Then `up` and
    `down` are rounded to 22 to 26 bits relative to the largest value of a row of `up` and of a column of `down`: about
    what float32 itself keeps. Their product is then exact until it is rounded to float32.

    Args:
        base: [out, in], any floating dtype.
        up: [out, rank] float32, the adapter's scale multiplied in.
        down: [rank, in] float32.
        dtype: of the result.
    Returns:
        [out, in] on the device of `up`; bitwise identical on every device.
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
    """Round to multiples of a power of two, at most 2^bits of them, with one power for each line along `dim`.

    For each element of the result, the products of two such numbers are multiples of one power of two, and a sum of
    `rank` products stays below 2^53 multiples: every partial sum is exact.
    """
    step = _power_of_two(matrix, dim=dim) * 2.0**-bits
    return (matrix / step).round_().mul_(step)


def _power_of_two(matrix: Tensor, *, dim: int) -> Tensor:
    """The smallest power of two above all absolute values of a line along `dim`, float64; 1 for a line of zeros."""
    exponent = torch.frexp(matrix.abs().amax(dim, keepdim=True)).exponent.long()
    return ((exponent + 1023) << 52).view(torch.float64)  # made of its bits, as `pow` need not be exact


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Identify a set of base weights: 32 hex digits over names, shapes and an even sample of the values.

    Models that were trained apart differ nearly everywhere, so the sample tells them apart; it may miss one changed
    value. Values are compared as float32, whatever their dtype is.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        step = max(1, tensor.numel() // SAMPLES) | 1  # odd, so that it does not stay in one column
        digest.update(tensor.detach().reshape(-1)[::step].float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def content_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names and all bytes of CPU tensors, in their order: 32 hex digits."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pairs(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of its weight, `up` and `down` of each published adapter. Its two tensors follow each other."""
    source = iter(tensors)
    for (down_name, down), (up_name, up) in zip(source, source, strict=True):
        name = down_name.removesuffix(DOWN)
        assert (down_name, up_name) == (name + DOWN, name + UP), f"{down_name} and {up_name} are no adapter"
        yield name, up, down


# -- the base on disk --------------------------------------------------------------------------------------------------


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INSTEAD = "set weights.adapters_only=false"


def open_tensors(path: str) -> dict[str, Any]:
    """The open safetensors file of every tensor of a model, by the tensor's name on disk. They are mapped, not read.

    Args:
        path: folder of a model, or a hub id that is in the local cache.
    Raises:
        WeightsError: there are no safetensors, or they cannot be opened.
    """
    folder = _folder(path)
    try:
        if (folder / INDEX).is_file():
            names: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / SINGLE, framework="pt") as file:
                names = dict.fromkeys(file.keys(), SINGLE)
        files: dict[str, Any] = {name: safe_open(folder / name, framework="pt") for name in set(names.values())}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{folder} has no readable {SINGLE} or {INDEX}: {error}") from error
    return {name: files[file] for name, file in names.items()}


class BaseWeights:
    """The tensors of a Hugging Face folder by their names on disk."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: folder of a model, or a hub id that is in the local cache.
        Raises:
            WeightsError: there are no safetensors, or they cannot be read.
        """
        self.path = path
        try:
            self._files = open_tensors(path)
        except WeightsError as error:
            raise WeightsError(
                f"adapters are merged into the tensors of model.path ({path}): {error}; {INSTEAD}"
            ) from error

    def tensor(self, name: str) -> Tensor:
        """One tensor, in its dtype on disk, on the CPU; its memory may be the file's. Raises WeightsError."""
        if name not in self._files:
            raise WeightsError(
                f"adapters are merged into the tensors of model.path ({self.path}), which has none named {name}; "
                f"{INSTEAD}"
            )
        return self._files[name].get_tensor(name)

    def fingerprint(self, names: Iterable[str]) -> str:
        """The `fingerprint` of these tensors, in this order. Raises WeightsError."""
        return fingerprint((name, self.tensor(name)) for name in names)


class AdapterMerger:
    """Makes whole weights of the adapters that a generator receives."""

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        """Read nothing yet: at the first `merge` the engine has loaded the same files, and they are in the page cache.

        Args:
            path: of the base model.
            dtype: of the merged weights, the same as the engine's.
        """
        self._path, self._dtype = path, dtype
        self._base: BaseWeights | None = None
        self._checked: tuple[str, tuple[str, ...]] | None = None

    def layout(self, tensors: Sequence[tuple[str, Tensor]]) -> list[TensorInfo]:
        """What `merge` makes of these adapters."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [TensorInfo(name=name, shape=(len(up), down.shape[1]), dtype=dtype) for name, up, down in pairs(tensors)]

    def merge(self, tensors: Sequence[tuple[str, Tensor]], base: str) -> Iterator[tuple[str, Tensor]]:
        """Merge adapters on their device. Returns whole weights by their names on disk, one for each adapter.

        Args:
            tensors: as `learner.publishing.PublishedAdapters` publishes them, in its order.
            base: fingerprint of the base that the learner trains on.
        Raises:
            WeightsError: the base here is another one, or cannot be read.
        """
        adapters = list(pairs(tensors))
        self._base = self._base or BaseWeights(self._path)
        self._check(base, tuple(name for name, _, _ in adapters))
        base_of = self._base.tensor
        return ((name, merge(base_of(name), up, down, self._dtype)) for name, up, down in adapters)

    def _check(self, base: str, names: tuple[str, ...]) -> None:
        """Compare the base with the learner's, once: its files are not expected to change below a running engine."""
        assert self._base is not None
        if self._checked == (base, names):
            return
        if (here := self._base.fingerprint(names)) != base:
            raise WeightsError(
                f"model.path ({self._path}) holds other weights here than where the learner runs (fingerprints {here} "
                f"and {base}): copy the same files to every machine, or {INSTEAD}"
            )
        self._checked = base, names


def _folder(path: str) -> Path:
    """The folder of a model's files. Raises WeightsError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # of many kinds, for an id that is none and one that is not there
        raise WeightsError(f"model.path ({path}) is neither a folder nor in the local Hugging Face cache") from error
