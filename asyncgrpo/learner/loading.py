"""Sharded loading: every rank reads the rows of its shard from a model's files.

`without_memory` builds the model with its parameters on `meta`, where they are adapted and sharded. Then `fill` reads the
shard of this rank from memory-mapped files. A rank never holds more than its shard and one tensor, and the ranks of a
machine share the page cache.

The files must be safetensors with exactly the tensors of the model. Models in other formats are loaded in full on every
rank by transformers (`model.load_language_model`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from asyncgrpo.config.model_size import model_class
from asyncgrpo.errors import WeightsError
from asyncgrpo.weights.files import disk_pieces, open_tensors, saved_tensors

# -- a model without memory --------------------------------------------------------------------------------------------


def without_memory(path: str) -> PreTrainedModel:
    """Build the model of a folder or hub id in float32 and evaluation mode, with parameters (not buffers) on `meta`."""
    with _parameters_on_meta():
        config = AutoConfig.from_pretrained(path)
        model: PreTrainedModel = model_class(config).from_config(config, dtype=torch.float32)
    if model.can_generate():
        with suppress(OSError):  # no generation config
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on `meta`. `torch.device("meta")` would move buffers too, and no file has those of rotary positions."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def as_if_on_cpu(model: nn.Module) -> Iterator[None]:
    """Move parameters to the CPU inside the block, still without memory. Parameters added inside stay there.

    Adapters are created on the device of their weight, and on `meta` they would have no values.
    """
    replace_parameters(model, lambda _, p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    hollow = {id(parameter) for parameter in model.parameters()}
    yield
    replace_parameters(model, lambda _, p: torch.empty(p.shape, dtype=p.dtype, device="meta") if id(p) in hollow else p)


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace each parameter with `make(name, parameter)`. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in made:
                    new = make(f"{path}.{name}", old)
                    made[id(old)] = new if isinstance(new, nn.Parameter) else nn.Parameter(new, old.requires_grad)
                module._parameters[name] = made[id(old)]


# -- its files ---------------------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Layout of one tensor of the model in the files."""

    shape: torch.Size
    """Shape in memory."""
    parts: dict[str, Tensor]
    """Views of the tensor on `meta`, by name on disk."""
    is_same: bool
    """True if the tensor is a single one on disk."""


class ShardReader:
    """Reads rows of a model's tensors by name in memory."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        """Compare names and shapes, and read the buffers in the files.

        Args:
            model: of `without_memory`, unchanged.
            path: folder of the model, or a hub id.
        Raises:
            WeightsError: the files cannot be read row by row into this model.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise WeightsError(f"{path} is quantized")
        folder = Path(path).expanduser()
        if not folder.is_dir():  # one process of a machine downloads, the others wait
            from huggingface_hub import snapshot_download

            try:
                folder = Path(snapshot_download(path, allow_patterns=["*.json", "model*.safetensors"]))
            except Exception as error:  # of many kinds; transformers reports the cause later
                raise WeightsError(f"{path} cannot be downloaded: {error}") from error
        self._files = open_tensors(folder)
        self._pieces = {name: pieces_of_rows(model, name, tensor.shape) for name, tensor in saved_tensors(model)}
        self._compare(model)
        for name, tensor in saved_tensors(model):
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(self.rows(name, 0, len(tensor), tensor.dtype))

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return a copy of rows `start` to `stop` of a tensor on the CPU."""
        shape, parts, is_same = self._pieces[name]
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        if is_same:
            return rows.copy_(self._stored(*parts)[start:stop])
        for on_disk, view in views_of_rows(parts, rows, start):
            view.copy_(self._stored(on_disk)[:])
        return rows

    def holds(self, name: str, dtype: torch.dtype) -> bool:
        """Return True if `dtype` represents every value of this tensor in the files."""
        stored = {self._stored(on_disk)[:0].dtype for on_disk in self._pieces[name].parts}
        return all(torch.promote_types(one, dtype) == dtype for one in stored)

    def _stored(self, on_disk: str) -> Any:
        """Return a tensor that is read when indexed."""
        return self._files[on_disk].get_slice(on_disk)

    def _compare(self, model: PreTrainedModel) -> None:
        shapes = {name: list(part.shape) for pieces in self._pieces.values() for name, part in pieces.parts.items()}
        if missing := sorted(shapes.keys() - self._files.keys()):
            raise WeightsError(f"the files have no {missing[0]}")
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        others = (name for name in sorted(self._files.keys() - shapes.keys()))
        if unknown := [name for name in others if not any(pattern.search(name) for pattern in ignored)]:
            raise WeightsError(f"the files have {unknown[0]}, and the model does not")
        for name, shape in shapes.items():
            if self._stored(name).get_shape() != shape:
                raise WeightsError(f"{name} has another shape in the files, {self._stored(name).get_shape()}")


def pieces_of_rows(model: PreTrainedModel, name: str, shape: torch.Size) -> Pieces:
    """Return the layout of a tensor on disk.

    Raises WeightsError if a piece spans several rows, so that ranks cannot read their own rows.
    """
    if not shape:
        raise WeightsError(f"{name} is a single number")
    whole = torch.empty(shape, device="meta")
    try:
        parts = disk_pieces(model, name, whole)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    if [*parts.values()] == [whole]:
        return Pieces(shape, parts, is_same=True)
    row = shape[1:].numel()
    for part in parts.values():
        first = part.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        if part._base is not whole or first // row != last // row:
            raise WeightsError(f"{name} is made of pieces that several ranks would share")
    if sum(part.numel() for part in parts.values()) != whole.numel():
        raise WeightsError(f"{name} is not wholly in the files")
    return Pieces(shape, parts, is_same=False)


def views_of_rows(parts: dict[str, Tensor], rows: Tensor, start: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the pieces of `rows`, whose first is row `start` of the full tensor, as views."""
    for on_disk, part in parts.items():
        offset = part.storage_offset() - start * rows.shape[1:].numel()
        if 0 <= offset < rows.numel():
            yield on_disk, rows.as_strided(part.shape, part.stride(), rows.storage_offset() + offset)


def first_row(tensor: DTensor) -> int:
    """Return the first row of this rank's shard, which is consecutive rows."""
    assert are_rows(tensor)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0]


def are_rows(tensor: Tensor) -> bool:
    """True if the tensor is sharded by rows: by FSDP, or experts that are distributed and then sharded."""
    return isinstance(tensor, DTensor) and all(getattr(placement, "dim", None) == 0 for placement in tensor.placements)


# -- shards ------------------------------------------------------------------------------------------------------------


def fill(model: nn.Module, reader: ShardReader, name_of: Callable[[str], str], device: torch.device) -> None:
    """Read every sharded parameter that is still on `meta`.

    Args:
        model: sharded by FSDP2 along the first dimension.
        name_of: maps a parameter's name to the name that `reader` knows.
        device: of the shards.
    """
    read: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied one is assigned to every owner
        if isinstance(parameter, DTensor) and parameter.is_meta:
            if id(parameter) not in read:
                stop = (start := first_row(parameter)) + len(parameter.to_local())
                rows = reader.rows(name_of(name), start, stop, parameter.dtype).to(device)
                # Not from_local, which would move an offloaded shard to the mesh's device.
                shard = DTensor(rows, parameter._spec, requires_grad=False)
                read[id(parameter)] = nn.Parameter(shard, parameter.requires_grad)
            state[name] = read[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)
