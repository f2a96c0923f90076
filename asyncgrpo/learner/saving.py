"""What a checkpoint holds: sharded state from which training goes on bitwise identically, and a Hugging Face folder.

A checkpoint holds the trained parameters, both AdamW moments of each, how many updates AdamW has made and how many the
schedule has counted, the coefficient of the KL and what the gradient guard remembers, in torch's distributed format:
every rank writes its shard, and any number of ranks can read it. It is complete when it has a `.metadata` file, which is
written last. Frozen weights (LoRA's base) are not in it; they come from `model.path` again.

Tensors are gathered one by one and written file by file, so at most one file's worth is in memory. Adapters are
merged: the folder loads with plain transformers, SGLang or vLLM.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import AdamW
from transformers import AutoTokenizer, PreTrainedModel

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.model import TokenScorer
from asyncgrpo.learner.publishing import PublishedWeights

# -- sharded state -----------------------------------------------------------------------------------------------------


def save(folder: str, model: nn.Module, optimizer: AdamW, steps: int, kl_coef: float, guard: Tensor) -> None:
    """Write a checkpoint; `guard` is the memory of the gradient guard. Collective. Raises CheckpointError."""
    try:
        dcp.save(_state(model, optimizer, steps, kl_coef, guard), checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be written: {_cause(error)}") from error


def load(folder: str, model: nn.Module, optimizer: AdamW, guard: Tensor) -> tuple[int, float, Tensor]:
    """Read a checkpoint into model and optimizer, and give its updates, its KL coefficient and the guard's memory.

    Collective. A checkpoint of version 0.1 has no such memory; then `guard` is given back as it is. In one without `made`
    AdamW has made every update of the schedule.

    Raises CheckpointError; where the checkpoint is of another model, weights may then be part old, part new.
    """
    if not Path(folder, ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder} is not complete: it has no .metadata file")
    state = _state(model, optimizer, 0, 0.0, guard)
    try:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name in {"guard", "made"} - known.keys():
            del state[name]
        dcp.load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {folder} does not fit model and configuration: {_cause(error)}") from error
    steps = int(state["steps"])
    for moments in optimizer.state.values():
        moments["step"].fill_(state.get("made", steps))
    return steps, float(state["kl_coef"]), state.get("guard", guard)


def _state(model: nn.Module, optimizer: AdamW, steps: int, kl_coef: float, guard: Tensor) -> dict[str, Tensor]:
    """Name to tensor. All but the scalars is the memory of model and optimizer, so loading in place is enough."""
    state = {"steps": torch.tensor(steps), "kl_coef": torch.tensor(kl_coef, dtype=torch.float64), "guard": guard}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:  # what AdamW makes at its first step
            moments["step"] = torch.zeros((), device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state[f"model.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        state["made"] = moments["step"].cpu()  # of all parameters the same
    return state


def _cause(error: BaseException) -> str:
    """One line. Torch gathers what failed on each rank into an exception that is not an `Exception`."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {str(failure) or type(failure).__name__}"
    return str(error)


# -- the Hugging Face folder -------------------------------------------------------------------------------------------


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
