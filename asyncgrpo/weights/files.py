"""A model's weight files: its tensors by their names and shapes on disk, and checks that the files are complete.

Transformers fuses some tensors when it loads a model, above all the experts of a mixture: one `gate_up_proj` in memory
is two matrices per expert on disk. Engines and Hugging Face folders need the tensors as on disk, and transformers can revert
the conversion. Here each reverted piece is a view of its tensor in memory, so that reading pieces copies no data, and
writing into them loads a model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncgrpo.errors import ConfigError, WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# -- tensors by their names on disk ------------------------------------------------------------------------------------


def saved_tensors(model: PreTrainedModel, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a checkpoint by their names in memory, in a fixed order.

    Args:
        remove_duplicate: yield a tied tensor once, under its first name.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not (remove_duplicate and id(tensor) in seen):
            seen.add(id(tensor))
            yield name, tensor


def disk_pieces(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the pieces of one tensor of the model as a checkpoint stores them; the tensor itself if it is not converted.

    Args:
        model: provides the conversion; its weights are not read.
        name: name of the tensor in memory.
        tensor: the whole tensor in its shape in memory, on any device. On `meta` the pieces give names and shapes only.
    Returns:
        Pieces by their names on disk, in the order of their places in memory. For all known model types they are views of
        `tensor`. A caller that writes into them must check this.
    Raises:
        ValueError: transformers cannot revert the conversion of this tensor.
    """
    try:
        with torch.no_grad(), _WithoutCopies():
            pieces = revert_weight_conversion(model, {name: tensor})
    except Exception as error:  # of any type: conversions expect all tensors at once
        raise ValueError(f"{name} cannot be converted back to its form on disk: {error}") from error
    return dict(sorted(pieces.items(), key=lambda piece: piece[1].storage_offset()))


def disk_tensors(model: PreTrainedModel, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return every tensor of the model's checkpoint, in the order of `saved_tensors`, as views of the model's memory.

    Raises:
        ValueError: a tensor on disk is made of more than one tensor in memory.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in saved_tensors(model, remove_duplicate=remove_duplicate):
        for piece_name, piece in disk_pieces(model, name, tensor).items():
            if piece_name in tensors:
                raise ValueError(f"{piece_name} on disk is made of {name} and other tensors in memory")
            tensors[piece_name] = piece
    return tensors


class _WithoutCopies(TorchFunctionMode):
    """Makes `contiguous` return its tensor unchanged, so that the splits of a reverted conversion stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


# -- completeness of the files -----------------------------------------------------------------------------------------


def check_weight_files(folder: Path, *, is_complete: bool = True) -> None:
    """Raise ConfigError if a model cannot be loaded from the files of `folder`. The message names the file.

    Args:
        is_complete: False for a folder of the Hugging Face cache, whose missing files are downloaded later.
    """
    for file in _named_by_index(folder, is_complete=is_complete) or sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)
    kinds = ("*.safetensors", "pytorch_model*.bin")
    if is_complete and not any(file for kind in kinds for file in folder.glob(kind)):
        raise ConfigError(f"model.path: the folder {folder} holds no weights ({SINGLE}, or {INDEX} and its files)")


def _named_by_index(folder: Path, *, is_complete: bool) -> list[Path]:
    """Return the shards that transformers would load; none without an index, or if a single file takes precedence."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {index} names no weight files; download it again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and is_complete:
        raise ConfigError(
            f"model.path: {index} names {missing[0]}, which does not exist ({len(missing)} of {len(names)} files are "
            "missing); download the model again"
        )
    return [folder / name for name in names if name not in missing]


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):  # reads the header, and compares the length of the file with it
            pass
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(
            f"model.path: {file} is not a complete safetensors file ({file.stat().st_size:,} bytes; {error}); download it "
            "again, or run git lfs pull if it is a pointer of Git LFS"
        ) from error


def open_tensors(folder: Path) -> dict[str, Any]:
    """Open the safetensors files of a model; return the file of every tensor by its name on disk. They are mapped, not read.

    Raises:
        WeightsError: the safetensors files are missing or cannot be opened.
    """
    try:
        if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():  # as transformers does
            names: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / SINGLE, framework="pt") as file:
                names = dict.fromkeys(file.keys(), SINGLE)
        files: dict[str, Any] = {name: safe_open(folder / name, framework="pt") for name in set(names.values())}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{folder} has no readable {SINGLE} or {INDEX}: {error}") from error
    return {name: files[file] for name, file in names.items()}
