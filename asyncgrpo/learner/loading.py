"""From a model's files into the shards of the ranks: every rank reads the rows that it keeps, and no other.

`without_memory` builds the model with its parameters on `meta`. They are adapted and sharded there, and then `fill` reads
what the shard of this rank has, out of files that are mapped into memory. So a rank never holds more than its share
and one tensor, and the ranks of a machine share the page cache.

It needs files that hold exactly the tensors of the model, in safetensors. Whatever else transformers can load, it loads
as a whole, on every rank (`model.load_language_model`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from asyncgrpo.errors import WeightsError
from asyncgrpo.weights.files import disk_pieces, open_tensors, saved_tensors

# -- a model without memory --------------------------------------------------------------------------------------------


def without_memory(path: str) -> PreTrainedModel:
    """The model of a folder or hub id in float32 and evaluation mode. Its parameters are on `meta`, its buffers are not."""
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    if model.can_generate():
        with suppress(OSError):  # it has none
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Not `torch.device("meta")`, which would take buffers too; some of them, as of rotary positions, are in no file."""
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
    """Parameters are on the CPU inside the block, still without memory; those that are added there stay.

    Adapters are put where the weights are that they adapt, and on `meta` they would have no values.
    """
    replace_parameters(model, lambda _, p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    hollow = {id(parameter) for parameter in model.parameters()}
    yield
    replace_parameters(model, lambda _, p: torch.empty(p.shape, dtype=p.dtype, device="meta") if id(p) in hollow else p)


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put what `make` says of a name and a parameter in the parameter's place. Tied parameters stay tied."""
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
    """How one tensor of the model lies in the files."""

    shape: torch.Size
    """In memory."""
    parts: dict[str, Tensor]
    """Views, without memory, of the tensor, by their names on disk."""
    is_same: bool
    """The tensor is one on disk too."""


class ShardReader:
    """Reads rows of a model's tensors, by their names in memory."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        """Compare names and shapes, and read the buffers that are in the files.

        Args:
            model: `without_memory`, before anything is added to it.
            path: folder of the model, or a hub id.
        Raises:
            WeightsError: the files cannot be read row by row into this model.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise WeightsError(f"{path} is quantized")
        _download(path)
        self._files = open_tensors(path)
        self._pieces = {name: pieces_of_rows(model, name, tensor.shape) for name, tensor in saved_tensors(model)}
        self._compare(model)
        for name, tensor in saved_tensors(model):
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(self.rows(name, 0, len(tensor), tensor.dtype))

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows `start` to `stop` of a tensor, in memory of their own on the CPU."""
        shape, parts, is_same = self._pieces[name]
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        if is_same:
            return rows.copy_(self._stored(*parts)[start:stop])
        for on_disk, view in views_of_rows(parts, rows, start):
            view.copy_(self._stored(on_disk)[:])
        return rows

    def holds(self, name: str, dtype: torch.dtype) -> bool:
        """Whether `dtype` has room for every value that the files have of this tensor."""
        stored = {self._stored(on_disk)[:0].dtype for on_disk in self._pieces[name].parts}
        return all(torch.promote_types(one, dtype) == dtype for one in stored)

    def _stored(self, on_disk: str) -> Any:
        """A tensor that is read where it is indexed."""
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
    """How a tensor lies on disk.

    Raises WeightsError where a piece is not of one row alone, so that ranks cannot each take their own.
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
    """The pieces of these rows, the first of which is row `start` of the whole tensor, as views of them."""
    for on_disk, part in parts.items():
        offset = part.storage_offset() - start * rows.shape[1:].numel()
        if 0 <= offset < rows.numel():
            yield on_disk, rows.as_strided(part.shape, part.stride(), rows.storage_offset() + offset)


def first_row(tensor: DTensor) -> int:
    """The first row of this rank's shard: as `torch.chunk` cuts."""
    assert tensor.placements == (Shard(0),)
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    return min(mesh.get_local_rank() * -(-num_rows // mesh.size()), num_rows)


def _download(path: str) -> None:
    """The weights of a hub id that are not in the local cache; one process of a machine does it, the others wait."""
    if Path(path).expanduser().is_dir():
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(path, allow_patterns=["*.json", "model*.safetensors"])
    except Exception as error:  # of many kinds; transformers will say what is wrong
        raise WeightsError(f"{path} cannot be downloaded: {error}") from error


# -- shards ------------------------------------------------------------------------------------------------------------


def fill(model: nn.Module, reader: ShardReader, name_of: Callable[[str], str], device: torch.device) -> None:
    """Read every sharded parameter that has no memory yet.

    Args:
        model: sharded by FSDP2 along the first dimension.
        name_of: from a parameter's name to that of the tensor in the model that `reader` knows.
        device: where the shards are to be.
    """
    read: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied one is assigned to every owner
        if isinstance(parameter, DTensor) and parameter.is_meta:
            if id(parameter) not in read:
                read[id(parameter)] = _read_shard(reader, name_of(name), parameter, device)
            state[name] = read[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)


def _read_shard(reader: ShardReader, name: str, parameter: DTensor, device: torch.device) -> nn.Parameter:
    start = first_row(parameter)
    rows = reader.rows(name, start, start + len(parameter.to_local()), parameter.dtype).to(device)
    # Not from_local, which would bring an offloaded shard to the mesh's device.
    return nn.Parameter(DTensor(rows, parameter._spec, requires_grad=False), parameter.requires_grad)
