"""The processes of one SGLang engine: how they are launched, what we change in them, and how they end.

    this process                                    one process for each GPU (one on a CPU)
    SGLangEngine ── TokenizerManager ══ zmq ipc ══▶ Scheduler: queue, batches, the model

Importing this module imports SGLang, which takes seconds: only an engine that starts does. SGLang's usual third
process, the detokenizer, is not launched, because we exchange token ids only.
"""

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Collection
from typing import Any

import psutil
import torch
from sglang.srt.entrypoints import engine
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.managers import scheduler
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs
from sglang.srt.utils.hf_transformers_utils import get_context_length
from transformers import AutoConfig, PretrainedConfig

from asyncgrpo import scratch
from asyncgrpo.errors import EngineError

CONTEXT_RESERVE = 7
"""Tokens by which SGLang's context must exceed the longest prompt plus answer: it keeps that many to itself."""
CACHE_BYTES_ON_CPU = 1 << 30
"""Largest cache of keys and values without a GPU."""


class OurScheduler(scheduler.Scheduler):
    """SGLang's scheduler, with two promises more.

    A request that still waits for its first token when the weights change starts under the new ones, so its prefix is
    looked up among theirs: otherwise it would find keys that the old weights computed. And an answer ends at the stop
    tokens of its request only; SGLang adds the model's own end tokens, and with `ignore_eos` heeds neither.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.model_config.hf_eos_token_id = set()

    def record_weight_version_change(self, new_version: str | None) -> None:
        super().record_weight_version_change(new_version)
        if new_version is not None:
            for request in self.waiting_queue:
                if request.extra_key is not None and not request.output_ids:
                    request.extra_key = new_version


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Main function of a scheduler process."""
    from asyncgrpo.generators.sglang_attention import BatchedTorchAttention

    register_attention_backend("torch_native")(BatchedTorchAttention)
    scheduler.Scheduler = OurScheduler
    scheduler.run_scheduler_process(*args, **kwargs)


def raise_launch_failure(signum: int, frame: object) -> None:
    """SIGQUIT is how a child says that it cannot start; SGLang's own answer is to kill this process."""
    signal.signal(signum, signal.SIG_IGN)
    raise EngineError("one of its processes could not start; the reason is in its output above")


class OurPortArgs:
    """SGLang's choice of names, so that what a killed engine leaves is known to be ours, and is removed."""

    @staticmethod
    def init_new(*args: Any, **kwargs: Any) -> PortArgs:
        temporary, tempfile.tempdir = tempfile.tempdir, str(scratch.folder())
        try:
            names = PortArgs.init_new(*args, **kwargs)
        finally:
            tempfile.tempdir = temporary
        names.instance_id = f"{scratch.mark()}-{names.instance_id}"
        return names


class OurEngine(Engine):
    """SGLang's engine, without a detokenizer, and ending only the processes that it started."""

    tokenizer_manager: Any
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []

    def shutdown(self) -> None:
        """Kill the schedulers and wait until they are gone. SGLang's own version kills all children of this process."""
        atexit.unregister(self.shutdown)
        manager, self.tokenizer_manager = self.tokenizer_manager, None
        if manager is None:
            return
        manager._subprocess_watchdog.stop()
        kill(self.get_all_child_pids())
        for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler, self.send_to_rpc):
            socket.close(linger=0)
        self._remove_files()

    def _remove_files(self) -> None:
        """Sockets and shared memory that SGLang leaves behind."""
        addresses = [value for value in vars(self.port_args).values() if isinstance(value, str)]
        files = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc://")]
        for file in [*files, shm_path_for(self.port_args.instance_id)]:
            with contextlib.suppress(OSError):
                os.unlink(file)


def launch(**arguments: Any) -> OurEngine:
    """Start one engine; blocks until its model is loaded. Raises whatever stops it, and leaves nothing."""
    before = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGQUIT)
    engine.PortArgs = OurPortArgs
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.mark()}"  # type: ignore[attr-defined]
    logging.getLogger(Engine.__module__).setLevel(logging.CRITICAL)  # it logs our handler of SIGQUIT as an error
    try:
        return OurEngine(**arguments, custom_sigquit_handler=raise_launch_failure)
    except BaseException:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # it may come once more, anywhere in what follows
        kill([child.pid for child in set(multiprocessing.active_children()) - before])
        signal.signal(signal.SIGQUIT, handler)
        raise


def kill(pids: Collection[int | None]) -> None:
    """End these children and theirs at once, and wait until they are gone."""
    handles = [child for child in multiprocessing.active_children() if child.pid in pids]
    processes = [process for pid in pids for process in _tree(pid)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for handle in handles:  # first, as a handle never learns of an end that another has waited for
        handle.join(60)
    psutil.wait_procs(processes, timeout=60)


def arguments(
    model_path: str,
    *,
    dtype: torch.dtype,
    max_context: int,
    device: str,
    tensor_parallel: int,
    max_answers: int,
    memory_fraction: float,
) -> dict[str, Any]:
    """Of SGLang's engine, for what `SGLangEngine` was asked. Raises EngineError if the model cannot attend that far."""
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    context = max_context + CONTEXT_RESERVE
    limit = get_context_length(config)
    if max_context > limit:
        raise EngineError(f"max_context ({max_context}) is above the {limit} tokens that the model can attend to")
    if context > limit:  # the reserve is never attended to
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    common = {
        "model_path": model_path,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": context,
        "max_running_requests": max_answers,
        "tp_size": tensor_parallel,
        "skip_tokenizer_init": True,
        "log_level": "error",
    }
    if device != "cpu":
        return common | {"mem_fraction_static": memory_fraction}
    room = CACHE_BYTES_ON_CPU // _cache_bytes_per_token(config, dtype)
    return common | {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": max(context, min(max_answers * context, room)),
    }


def _cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """A key and a value for every layer and key head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize)


def _tree(pid: int | None) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
