"""The base weights below a run's adapters, as the model's files hold them, and what generators make of the two.

Files are mapped into memory and read tensor by tensor, so a base costs page cache and no copy.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.weights.merging import fingerprint, merge, pairs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INSTEAD = "set weights.adapters_only=false"


class BaseWeights:
    """Tensors of a Hugging Face folder by their names on disk."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: folder of a model, or a hub id that is in the local cache.
        Raises:
            WeightsError: there are no safetensors, or they cannot be read.
        """
        self.path = path
        folder = _folder(path)
        try:
            if (folder / INDEX).is_file():
                names: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            else:
                with safe_open(folder / SINGLE, framework="pt") as file:
                    names = dict.fromkeys(file.keys(), SINGLE)
            files: dict[str, Any] = {name: safe_open(folder / name, framework="pt") for name in set(names.values())}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise WeightsError(
                f"adapters are merged into the tensors of model.path ({path}), of which {folder} has no readable "
                f"{SINGLE} or {INDEX}: {error}; {INSTEAD}"
            ) from error
        self._files = {name: files[file] for name, file in names.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor, in its dtype on disk, on the CPU; its memory may be the file's. Raises WeightsError."""
        if name not in self._files:
            raise WeightsError(
                f"adapters are merged into the tensors of model.path ({self.path}), which has none named {name}; "
                f"{INSTEAD}"
            )
        return self._files[name].get_tensor(name)

    def fingerprint(self, names: Iterable[str]) -> str:
        """Of these tensors, in this order; compare with `merging.fingerprint` of others. Raises WeightsError."""
        return fingerprint((name, self.tensor(name)) for name in names)


class AdapterMerger:
    """What a generator has to make whole weights of the adapters that it receives."""

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        """Nothing is read before the first `merge`: then the engine has loaded the same files.

        Args:
            path: of the base model.
            dtype: of the merged weights, the engine's.
        """
        self._path = path
        self._dtype = dtype
        self._base: BaseWeights | None = None
        self._checked: tuple[str, tuple[str, ...]] | None = None

    def merge(self, tensors: Sequence[tuple[str, Tensor]], base: str) -> list[tuple[str, Tensor]]:
        """Whole weights on the CPU by their names on disk, one for each adapter; adapters' device does the work.

        Args:
            tensors: of `learner.adapters.PublishedAdapters`, in its order.
            base: fingerprint of the base that the learner trains on.
        Raises:
            WeightsError: the base here is another one, or cannot be read.
        """
        adapters = list(pairs(tensors))
        self._base = self._base or BaseWeights(self._path)
        self._check(base, tuple(name for name, _, _ in adapters))
        return [(name, merge(self._base.tensor(name), up, down, self._dtype).to("cpu")) for name, up, down in adapters]

    def _check(self, base: str, names: tuple[str, ...]) -> None:
        """Once for a base: its files are not expected to change below a running engine."""
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
    """Where the files are. Raises WeightsError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # of many kinds, for an id that is none and one that is not there
        raise WeightsError(f"model.path ({path}) is neither a folder nor in the local Hugging Face cache") from error
