"""Contents of a checkpoint: the sharded state of a bitwise resume, and a Hugging Face folder.

The state holds the trained parameters, both AdamW moments, the update counts of AdamW and of the schedule, the coefficient
of the KL, the norms of the gradient guard, and load and biases of balanced experts, in torch's distributed format. Every
rank writes its shard; any number of ranks can read it. `.metadata` is written last and marks it complete. Frozen weights (a
LoRA base) are not stored; they are loaded from `model.path`.

Both are copied to host memory between two steps and written by threads beside the next steps. The tensors of the folder are
gathered one by one. Adapters are merged, so the folder loads with plain transformers, SGLang or vLLM.
"""

import contextlib
import copy
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict, snapshot_download
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.model import TokenScorer
from asyncgrpo.learner.optimizer import sharded_like
from asyncgrpo.learner.publishing import PublishedWeights

# -- sharded state -----------------------------------------------------------------------------------------------------


DISK_TIMEOUT = timedelta(days=1)
"""Timeout of the collectives that wait for the files of all ranks. A dead rank closes its connections and is noticed at once."""


class Saver:
    """Writes one checkpoint at a time, from a copy, in a thread of each rank."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        """Pinned host buffers by name, reused by the next copy from the GPU."""
        self._thread = ThreadPoolExecutor(1)
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None

    def begin(self, folder: str, model: TokenScorer, optimizer: AdamW, steps: int, guard: Tensor) -> Callable[[], None]:
        """Copy the state and begin to write it. Collective.

        Args:
            guard: memory of the gradient guard.
        Returns:
            A function that waits until every rank has written. Raises CheckpointError.
        """
        self.wait()
        if self._group is None:  # a separate group, because training runs collectives meanwhile
            self._group = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
        state = _state(model, optimizer, steps, guard)
        copied = {name: sharded_like(tensor, self._copy(name, tensor)) for name, tensor in state.items()}
        if self._pinned:
            torch.cuda.synchronize()
        writing = self._writing = self._thread.submit(_write, folder, copied, self._group)
        return writing.result

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy the local part of a tensor to the CPU; asynchronous from a GPU."""
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not own.is_cuda:
            return own.clone()
        if name not in self._pinned:
            self._pinned[name] = torch.empty_like(own, device="cpu", pin_memory=True)
        return self._pinned[name].copy_(own, non_blocking=True)

    def wait(self) -> None:
        """Wait for a write in progress. Its failure is raised to the caller of `begin`."""
        if self._writing is not None:
            with contextlib.suppress(CheckpointError):
                self._writing.result()
            self._writing = None


def _write(folder: str, state: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    try:
        dcp.save(state, storage_writer=_Writer(folder), process_group=group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be written: {_cause(error)}") from error


class _Writer(dcp.FileSystemWriter):
    """Raises the error of the disk. torch raises the position in its archive instead, while it handles that error."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            raise error.__context__ or error from None


def load(folder: str, model: TokenScorer, optimizer: AdamW, guard: Tensor) -> tuple[int, Tensor]:
    """Read a checkpoint into model and optimizer. Return its updates and the guard's memory. Collective.

    Loads and biases of routers may be missing: a resume may begin to balance experts.

    Raises CheckpointError. If the checkpoint is of another model, some weights may have been overwritten by then.
    """
    if not Path(folder, ".metadata").is_file():
        raise CheckpointError(f"checkpoint {folder} is not complete: it has no .metadata file")
    state = _state(model, optimizer, 0, guard)
    try:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name in model.routers.state().keys() - known.keys():
            del state[name]
        dcp.load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged, or does not fit model and configuration: {_cause(error)}"
        ) from error
    for moments in optimizer.state.values():
        moments["step"].fill_(state["made"])
    return int(state["steps"]), state["guard"]


def _state(model: TokenScorer, optimizer: AdamW, steps: int, guard: Tensor) -> dict[str, Tensor]:
    """Return tensors by name. Tensors are the memory of model and optimizer, so loading in place restores them."""
    state = {"steps": torch.tensor(steps), "guard": guard} | model.routers.state()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:  # as AdamW creates them in its first step
            moments["step"] = torch.zeros((), device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state[f"model.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        state["made"] = moments["step"].cpu()  # equal for all parameters
    return state


def _cause(error: BaseException) -> str:
    """Return the cause on one line. CheckpointException holds the failures of all ranks and is not an `Exception`."""
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
    "*processor_config.json",
)


def begin_export(
    folder: str, scorer: TokenScorer, published: PublishedWeights, tokenizer_path: str | None
) -> Callable[[], None]:
    """Gather the weights of a folder for `AutoModelForCausalLM.from_pretrained`. Collective.

    Returns:
        A function that writes the folder on rank 0, from any thread. Raises CheckpointError.
    """
    tensors: dict[str, Tensor] = {}
    is_writer = dist.get_rank() == 0
    for info, tensor in published.weights():
        if is_writer:
            tensors[info.name] = tensor.to("cpu", copy=True).contiguous()

    def write() -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(tensors, folder, max_shard_size=FILE_BYTES)
            model = scorer.language_model
            config = copy.deepcopy(model.config)
            config.dtype = published.dtype
            config.save_pretrained(folder)
            if model.can_generate():
                # Not save_pretrained, which refuses what from_pretrained accepts, as a temperature without do_sample.
                model.generation_config.to_json_file(Path(folder, "generation_config.json"))
            if tokenizer_path is not None:
                copy_tokenizer(tokenizer_path, Path(folder))
        except Exception as error:
            raise CheckpointError(f"model {folder} cannot be written: {error}") from error

    return write if is_writer else lambda: None


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the files of a tokenizer, and of an image processor."""
    if not Path(source).is_dir():
        source = snapshot_download(source, allow_patterns=list(TOKENIZER_FILES))
    for path in {path for pattern in TOKENIZER_FILES for path in Path(source).glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)
