"""The learner's weights as a Hugging Face folder, for use elsewhere.

Tensors are gathered one by one and written file by file, so at most one file's worth is in memory. Adapters are
merged: the folder loads with plain transformers, SGLang or vLLM.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.publishing import PublishedWeights
from asyncgrpo.learner.scorer import TokenScorer

FILE_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def export(folder: str, scorer: TokenScorer, published: PublishedWeights, tokenizer_path: str | None) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads. Collective; rank 0 writes.

    Raises CheckpointError, on every rank.
    """
    is_writer = dist.get_rank() == 0
    error: Exception | None = None
    files = _Files(Path(folder)) if is_writer else None
    for info, tensor in published.weights():
        if files is not None and error is None:
            try:
                files.add(info.name, tensor)
            except Exception as failure:  # keep gathering, as the other ranks do
                error = failure
    if files is not None and error is None:
        try:
            files.finish()
            _write_configs(Path(folder), scorer.language_model, published.dtype)
            if tokenizer_path is not None:
                copy_tokenizer(tokenizer_path, Path(folder))
        except Exception as failure:
            error = failure
    outcome: list[str | None] = [str(error) if error else None]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(f"model {folder} cannot be written: {outcome[0]}") from error


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy a tokenizer's files as they are; of a hub id, write what transformers makes of it."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for path in {path for pattern in TOKENIZER_FILES for path in Path(source).glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


class _Files:
    """Safetensors files of limited size; their names need their number, so they get them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.written: list[tuple[Path, list[str]]] = []
        self.size_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.pending[name] = tensor.to("cpu", copy=True).contiguous()
        self.size_bytes += tensor.nbytes
        if sum(t.nbytes for t in self.pending.values()) >= FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        count = len(self.written)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        else:
            weight_map = {t: name for name, (_, tensors) in zip(names, self.written, strict=True) for t in tensors}
            index = {"metadata": {"total_size": self.size_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for name, (path, _) in zip(names, self.written, strict=True):
            path.rename(self.folder / name)

    def _flush(self) -> None:
        if self.pending:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"part-{len(self.written)}.safetensors"
            save_file(self.pending, path, metadata={"format": "pt"})
            self.written.append((path, list(self.pending)))
            self.pending = {}


def _write_configs(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
