"""The processes of one SGLang engine or server: their launch, the changes to SGLang's classes in them, and their end.

    this process                                    one process for each GPU (one on a CPU)
        SGLangEngine ── TokenizerManager ══ zmq ipc ══▶ Scheduler: queue, batches, the model

Importing this module imports SGLang, which takes seconds, so only a starting engine does it. SGLang's third process, the
detokenizer, is not launched, because only token ids are exchanged.
"""

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from asyncgrpo import liveness, scratch, warm
from asyncgrpo.config.model_size import cache_of
from asyncgrpo.config.reach import fetch
from asyncgrpo.engines.sglang.proof import PLAN, Held, state
from asyncgrpo.errors import EngineError, WeightsError
from asyncgrpo.host import importing, last_error, stderr_size
from asyncgrpo.weights.publication import LENGTH, NUM_SEQUENCES

with importing():  # also in the scheduler's process, which imports this module first
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from sglang.srt.entrypoints import engine
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import post_load_weights
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_context, get_serving
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang.srt.utils import kill_process_tree
    from sglang.srt.utils.hf_transformers_utils import get_context_length
    from sglang.srt.utils.weight_checker import ChecksumInfo, WeightChecker, overall_checksum
    from sglang.srt.utils.weight_versions import WeightVersionEvent
    from transformers import AutoConfig

    from asyncgrpo.engines.sglang.copies import Copies
    from asyncgrpo.engines.sglang.weights import Mapped

if TYPE_CHECKING:
    from asyncgrpo.engines.sglang.engine import SGLangOptions

CONTEXT_RESERVE = 7
"""Tokens by which SGLang's context must exceed the longest prompt plus completion: SGLang reserves them."""
CACHE_BYTES_ON_CPU = 1 << 30
"""Largest cache of keys and values without a GPU."""
MOST_IN_A_GRAPH = 512
"""Most completions of a decode step for which a CUDA graph is captured: the most that SGLang has by default on any card."""


mapped = Mapped()
held = Held()


class OurScheduler(scheduler.Scheduler):
    """SGLang's scheduler with five changes.

    1. The overlap schedule launches a batch before it has read the result of the previous one. The tokens of a batch in
       progress at a weight change get the old version, which sampled them; SGLang would report the new one.
    2. On a GPU such a batch may still run while weights are written, so both ends of the pause wait for an idle GPU.
    3. A request without a first token at the weight change starts under the new weights, so its prefix is looked up under
       their key. Otherwise it would find keys computed by the old weights.
    4. A completion ends at the stop tokens of its request only. SGLang adds the model's own end tokens, and with
       `ignore_eos` it ignores both.
    5. SGLang's log of changed settings, which grows with each version, keeps the last change of the version only.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.model_config.hf_eos_token_id = set()
        self._sampled_by: dict[int, str] = {}
        """Version that sampled a batch in the result queue, by the batch's id, if it is not the present one."""

    def record_weight_version_change(self, new_version: str | None) -> None:
        old_version = get_serving().weight_version
        super().record_weight_version_change(new_version)
        if new_version is None or new_version == old_version:
            return
        log = get_context()._overrides_log
        log[:-1] = [change for change in log[:-1] if change[0] != log[-1][0]]
        for batch, _ in self.result_queue:
            self._sampled_by.setdefault(id(batch), old_version)
        for request in self.waiting_queue:
            if request.extra_key is not None and not request.output_ids:
                request.extra_key = new_version

    def process_batch_result(self, batch: Any, result: Any) -> None:
        version = self._sampled_by.pop(id(batch), None)
        if version is not None:
            for request in batch.reqs:
                # Other requests get no token: they ended, will be recomputed, or are still in prefill.
                if not request.finished() and not request.is_retracted and request.inflight_middle_chunks <= 0:
                    request.weight_version_events.append(WeightVersionEvent(version, len(request.output_ids) + 1))
        super().process_batch_result(batch, result)

    def pause_generation(self, recv_req: Any) -> None:
        super().pause_generation(recv_req)
        # Batches and some layers run on streams of their own, which the first write would not wait for.
        self.device_module.synchronize()

    def continue_generation(self, recv_req: Any) -> None:
        # Several threads write some models, on another stream than the one that the next batch waits for.
        self.device_module.synchronize()
        super().continue_generation(recv_req)


class OurWeightUpdater(WeightUpdater):
    """SGLang's writer of weights. A bucket says where they are in shared memory (`weights.py`)."""

    def _update_weights_from_flattened_bucket(self, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
        held.forget()
        try:
            tensors, model = mapped.tensors(flattened_tensor_bucket_dict), self.get_model()
            if tensors:
                model.load_weights(tensors)
            else:
                parameters, derives = state(model), hasattr(model, "post_load_weights")  # it may write parameters, too
                for name in mapped.copies.write(parameters, tensors.arenas, tensors.slot):
                    if not derives:
                        held.follow(name, parameters[name])
                post_load_weights(model)  # which the loader calls, too: weights that a model derives
            current_platform.synchronize()  # the GPU has then finished reading the tensors
            tensors.require_intact()
        except WeightsError as error:
            return False, str(error)
        return True, "Success"


class OurWeightChecker(WeightChecker):
    """SGLang's checksum of a model's weights by the plan of `proof.py`. An action of its own requests the plan."""

    def handle(self, action: str, *args: Any, role: str, **kwargs: Any) -> dict[str, Any] | None:
        current_platform.synchronize()  # several threads write some models
        if not action.startswith(PLAN):
            return super().handle(action, *args, role=role, **kwargs)
        content = held.plan(self._get_model(), action.removeprefix(PLAN))
        mapped.copies = Copies(held.parts, held.published)
        return self._reply(content, role)

    def _compute_checksum(self, skip_tensor_list: list[str] | None = None, *, role: str) -> dict[str, Any]:
        return self._reply(held.checksum(self._get_model(), self._skip_compare_names(skip_tensor_list)), role)

    def _reply(self, content: dict[str, str], role: str) -> dict[str, Any]:
        where = self._parallelism_info(role=role)
        return ChecksumInfo(
            checksums=content, per_gpu_checksum=overall_checksum(content), parallelism_info=where
        ).model_dump()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run a scheduler process. This is its main function."""
    if (starter := multiprocessing.parent_process()) is not None:
        warm.end_with_parent()
        scheduler.psutil = SimpleNamespace(Process=lambda: SimpleNamespace(parent=lambda: psutil.Process(starter.pid)))
    for module in (parallel_state, shm_broadcast):
        module.make_shm_name = marked
    model_runner.WeightChecker = OurWeightChecker
    model_runner.WeightUpdater = OurWeightUpdater
    # DeepSeek's other methods pass keys and values that `torch_native` does not read: it attends to the cache.
    AttentionBackendRegistry.register("torch_native", lambda *layer_and_batch: AttnForwardMethod.MLA)
    # Routes are kept in pinned memory, which needs a GPU.
    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **ignored: torch.zeros(dims, dtype=dtype)
    scheduler.Scheduler = OurScheduler
    scheduler.run_scheduler_process(*args, **kwargs)


def marked(kind: str) -> str:
    """Return a name for SGLang's shared memory. The mark lets another process remove the memory after this one has died."""
    return f"sgl_{kind}_{scratch.mark()}_{uuid.uuid4().hex[:8]}"


def raise_launch_failure(signum: int, frame: object) -> None:
    """Handle SIGQUIT, with which a child reports a failed start. SGLang's own handler would kill this process."""
    signal.signal(signum, signal.SIG_IGN)
    raise EngineError("one of its processes could not start; the reason is in its output above")


class OurPortArgs:
    """SGLang's socket names with this process's mark, so that the files of a killed engine can be removed."""

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
    """SGLang's engine without a detokenizer. It kills only the processes that it started."""

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
        # The sockets and the shared memory that SGLang leaves.
        addresses = [value for value in vars(self.port_args).values() if isinstance(value, str)]
        files = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc://")]
        for file in [*files, shm_path_for(self.port_args.instance_id)]:
            with contextlib.suppress(OSError):
                os.unlink(file)


def mark_files() -> None:
    """Give sockets and semaphores that SGLang makes in this process names by which `scratch` removes them."""
    engine.PortArgs = OurPortArgs
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.mark()}"  # type: ignore[attr-defined]


def launch(**arguments: Any) -> OurEngine:
    """Start one engine and block until its model is loaded. A failed start kills its processes and raises the error."""
    before = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGQUIT)
    mark_files()
    if warm.is_on():
        engine.mp = warm.Context()
    logging.getLogger(Engine.__module__).setLevel(logging.CRITICAL)  # it logs the handler of SIGQUIT as an error
    try:
        return OurEngine(**arguments, custom_sigquit_handler=raise_launch_failure)
    except BaseException:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # it may arrive again at any time
        kill([child.pid for child in set(multiprocessing.active_children()) - before])
        signal.signal(signal.SIGQUIT, handler)
        raise


def kill(pids: Collection[int | None]) -> None:
    """Kill these children and their children, and wait until they are gone."""
    handles = [child for child in multiprocessing.active_children() if child.pid in pids]
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            processes += [child, *child.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for handle in handles:  # first, because a handle misses an exit status that another wait has collected
        handle.join(60)
    psutil.wait_procs(processes, timeout=60)


def arguments(options: "SGLangOptions") -> dict[str, Any]:
    """Convert the settings of an engine to the arguments of SGLang's engine, without `extra`.

    Raises:
        EngineError: the model cannot attend to `max_context` tokens.
    """
    config = AutoConfig.from_pretrained(options.model_path).get_text_config()
    context = options.max_context + CONTEXT_RESERVE
    limit = get_context_length(config)
    if options.max_context > limit:
        raise EngineError(
            f"max_context ({options.max_context}) is above the {limit} tokens that the model can attend to"
        )
    if context > limit:  # the reserve is never attended to
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    common = {
        "model_path": options.model_path,
        "device": options.device,
        "dtype": str(options.dtype).removeprefix("torch."),
        "context_length": context,
        "max_running_requests": options.max_completions + NUM_SEQUENCES,  # so that a check never waits for a completion
        "tp_size": options.tensor_parallel,
        "skip_tokenizer_init": True,
        "log_level": "error",
        "disable_radix_cache": not options.prefix_cache,
        "random_seed": options.random_seed,
        "enable_return_routed_experts": options.records_routes,
    }
    if options.device != "cpu":
        return common | {
            "mem_fraction_static": options.memory_fraction,
            # Logits are float32 sums of the head's products, as in the learner; SGLang would round them to `dtype` first.
            "enable_fp32_lm_head": True,
            # On a card below 60 GB SGLang has CUDA graphs for up to 32 or 48 completions. Larger batches run without, slower.
            "cuda_graph_max_bs_decode": min(options.max_completions + NUM_SEQUENCES, MOST_IN_A_GRAPH),
        }
    heads, width = cache_of(config)
    room = CACHE_BYTES_ON_CPU // (config.num_hidden_layers * heads * width * options.dtype.itemsize)
    return common | {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "sleep_on_idle": True,
        "max_total_tokens": max(context, min(options.max_completions * context + NUM_SEQUENCES * LENGTH, room)),
    }


# -- a server beside the engines: a teacher ----------------------------------------------------------------------------


def serve(options: "SGLangOptions", address: tuple[str, int], key: str, on_health: Callable[[], None]) -> None:
    """Serve a model with SGLang's own HTTP server until a process of the server ends.

    Call it from the main thread. It may kill this process.

    Args:
        address: host and port to listen at.
        key: bearer token that requests must send.
        on_health: called in a thread after each proof that the model replies.
    Raises:
        EngineError: the server cannot start.
    """
    with importing():
        from sglang.srt.entrypoints.http_server import launch_server
    host, port = address

    def probe() -> None:
        while True:
            with contextlib.suppress(OSError):
                fetch(f"http://{host}:{port}/health_generate", timeout_s=60.0)
                on_health()
            time.sleep(liveness.PROBE_EVERY_S)

    mark_files()
    before = stderr_size()
    try:
        own = arguments(options) | {"host": host, "port": port, "api_key": key}
        launch_server(
            ServerArgs(**own, custom_sigquit_handler=_end_server),
            run_scheduler_process_func=run_scheduler,
            launch_callback=threading.Thread(target=probe, name="health", daemon=True).start,
        )
    except Exception as error:
        why = last_error(before) or error
        raise EngineError(f"SGLang cannot serve the model {options.model_path}: {why}") from error


def _end_server(signum: int, frame: object) -> None:
    """Handle SIGQUIT, with which a child reports its failure. An event loop would swallow an exception."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        kill_process_tree(os.getpid())
    raise_launch_failure(signum, frame)
