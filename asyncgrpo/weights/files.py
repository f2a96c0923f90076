"""Whether a model's weight files are there and whole, found without reading a weight."""

import json
from pathlib import Path
from typing import Any

from asyncgrpo.errors import ConfigError
from asyncgrpo.weights.base import INDEX, SINGLE

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian; the header is JSON, then come the tensors."""
_LFS = b"version https://git-lfs"


def check_weight_files(folder: Path, *, is_complete: bool = True) -> None:
    """Raise ConfigError if a model cannot be loaded from the files of `folder`; the sentence names the file.

    Args:
        is_complete: false for a folder of the Hugging Face cache: what is not there yet is downloaded.
    """
    for file in _named_by_index(folder, is_complete=is_complete) or sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)
    kinds = ("*.safetensors", "pytorch_model*.bin")
    if is_complete and not any(file for kind in kinds for file in folder.glob(kind)):
        raise ConfigError(f"model.path: the folder {folder} holds no weights ({SINGLE}, or {INDEX} and its files)")


def _named_by_index(folder: Path, *, is_complete: bool) -> list[Path]:
    """The shards that transformers would load; none where there is no index, or a single file that it prefers."""
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
            f"model.path: {index} names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are "
            "missing); download the model again"
        )
    return [folder / name for name in names if name not in missing]


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(_LFS))
            stream.seek(_LENGTH_BYTES)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            header: dict[str, Any] = json.loads(stream.read(length)) if length <= size else {}
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        wanted = _LENGTH_BYTES + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} is no safetensors file ({size:,} bytes); download it again") from error
    if start == _LFS:
        raise ConfigError(f"model.path: {file} is what Git keeps in the place of a large file; run git lfs pull")
    if size < wanted:
        raise ConfigError(
            f"model.path: {file} is cut short: it has {size:,} bytes, and its header asks for {wanted:,}; "
            "download it again"
        )
