"""The `sglang` engine: SGLang samples token ids, reports the version of each token and loads weights in place.

SGLang runs the model in processes of its own; this class lives on the caller's event loop. It must be started from the main
thread, because SGLang's processes end with the thread that started them. The main module needs an
`if __name__ == "__main__"` guard, because they are spawned. A process can have one engine.

    generate ──▶ one message, n SGLang requests ══▶ scheduler ══▶ completions, one by one
    load_weights ──▶ hold new requests │ pause │ write │ label │ resume ──▶ release them under the new label
"""

import asyncio
import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from asyncgrpo.data.images import Images
from asyncgrpo.engines.base import Engine, EngineOccupancy, Request
from asyncgrpo.engines.sglang.proof import Proof, question
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.host import last_error, stderr_size
from asyncgrpo.types import Completion, KeptTokens, PolicyVersion, Sampling, VersionSpan
from asyncgrpo.weights.arena import SharedTensors
from asyncgrpo.weights.publication import Checksum, listed

log = logging.getLogger(__name__)
T = TypeVar("T")

OF_A_SCHEDULER = "Scheduler hit an exception"
"""What SGLang writes before the exception that ends a scheduler."""


class SGLangRequest(Request):
    """A request, its tasks, and SGLang's ids of its completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: list[asyncio.Task[None]] = []
        self.rids: list[str] = []
        self.is_aborted = False


@dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """Settings of an engine."""

    model_path: str
    """Folder in Hugging Face's format, or its hub id."""
    dtype: torch.dtype
    """Of weights, keys and values."""
    max_context: int
    """Longest prompt plus completion, tokens; a completion that reaches it ends with "length"."""
    device: Literal["cuda", "cpu"]
    tensor_parallel: int = 1
    """GPUs of this engine."""
    max_completions: int = 256
    """Completions that run at once. SGLang gets a few more places, so that `score` never waits."""
    memory_fraction: float = 0.85
    """Share of GPU memory for weights and cache."""
    prefix_cache: bool = True
    """True: completions share the keys and values of common prefixes, never across policy versions."""
    random_seed: int = 0
    """Seed of SGLang's sampling; equal seeds and equal requests in equal batches give equal tokens."""
    records_routes: bool = False
    """True: completions have the experts of each token."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `sglang.Engine`, which override all others."""

    def prepare(self) -> None:
        """Set the environment variables that SGLang reads when it is imported."""
        if self.device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores make it ten times slower


class SGLangEngine(Engine[SGLangRequest]):
    """A model in SGLang's processes, see `base.Engine` for the methods.

    The death of one of SGLang's processes is final: close this engine and start another. The `seed` of a request has no
    effect, because SGLang uses seeds of its own.
    """

    request_type = SGLangRequest

    def __init__(self, options: SGLangOptions, images: Images | None = None):
        super().__init__()
        self.options, self.images, self.max_context = options, images, options.max_context
        self._serial = itertools.count()
        self._engine: Any = None
        self._proof: Proof | None = None
        """Mapping from tensors to the model's parameters, once the first weights have arrived."""
        self._ignores, self._differs = "", ""

    @property
    def does_not_follow(self) -> str:
        """A sentence about parameters that do not follow the weights, in general or at the last checksum; empty: none."""
        return self._ignores or self._differs

    async def start(self, version: PolicyVersion) -> None:
        """Start SGLang. Blocks the event loop until the model is loaded: its processes must be children of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise EngineError("the sglang engine must be started from the main thread of its process")
        self.options.prepare()
        self._former_handler, before = signal.getsignal(signal.SIGQUIT), stderr_size()
        try:
            with kept():
                from asyncgrpo.engines.sglang import processes

                own = processes.arguments(self.options)
                self._engine = processes.launch(weight_version=str(version), **own | self.options.extra)
        except Exception as error:
            why = last_error(before) or error
            raise EngineError(f"SGLang cannot start with the model {self.options.model_path}: {why}") from error
        self._connect()
        self.vocab_size = self._manager.model_config.vocab_size
        self._started(version)
        # Imported objects stay; without this every full garbage collection would traverse them.
        await self._manager.freeze_gc()

    async def checksum(self) -> Checksum:
        """Return digests of the weights, and log parameters that are known to differ from those loaded last (`proof.py`)."""
        self._require_running()
        ranks, digest = await self._reply(self._check("checksum"))
        if self._proof is None:
            return Checksum(digest)
        self._differs = ""
        if names := self._proof.differing(ranks):
            self._differs = f"{len(names)} parameters are not those of weights {self._version}: {listed(names)}"
            log.error("%s", self._differs)
        return Checksum(digest, self._proof.held(ranks))

    async def _check(self, action: str) -> tuple[list[dict[str, str]], str]:
        """Run a check of the parameters in all schedulers.

        Returns:
            The result of each scheduler by parameter, and the digest of all results.
        Raises:
            EngineError: a scheduler failed.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        call = self._manager.check_weights(CheckWeightsReqInput(action=action), None)
        success, message, ranks, digest = await call
        if not success or ranks is None or digest is None:
            raise EngineError(f"SGLang cannot check its weights: {message}")
        return [rank["checksums"] for rank in ranks], digest

    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """Score sequences. Their first half may come from the prefix cache, as for a request. The log-probs are NaN if
        parameters are known not to follow the weights."""
        self._require_running()
        if self.does_not_follow:
            return [math.nan] * sum(len(tokens) - start for tokens in sequences)
        return await self._reply(self._score(sequences, start))

    async def _score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        await self._may_submit.wait()
        outputs = await self._send(
            rid=[f"{next(self._serial):010d}-score-{index}" for index in range(len(sequences))],
            input_ids=[list(tokens) for tokens in sequences],
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            logprob_start_len=start - 1,  # the first one has no log-prob
        )

        async def logprobs(output: AsyncIterator[dict[str, Any]]) -> list[float]:
            return [entry[0] for entry in (await anext(output))["meta_info"]["input_token_logprobs"][1:]]

        # Concurrently, because SGLang drops a finished request even if its result was not awaited yet.
        return list(itertools.chain(*await asyncio.gather(*map(logprobs, outputs))))

    async def _send(self, seen: Any = None, **fields: Any) -> list[AsyncIterator[dict[str, Any]]]:
        """Send requests to the scheduler in one message, which is much cheaper than one each. Return the output of each.

        It awaits nothing that blocks before the message is sent, so the version is still right then.

        Args:
            seen: of `_seen`.
            fields: of SGLang's `GenerateReqInput`.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager, count = self._manager, len(fields["rid"])
        # Equal keys share the keys and values of common prefixes.
        keys = [str(self._version)] * count if self.options.prefix_cache else None
        call = GenerateReqInput(return_logprob=True, extra_key=keys, **fields)
        call.normalize_batch_and_arguments()
        manager._init_req_state(call)
        sent = await manager._batch_tokenize_and_process(count, call)
        for one in sent:
            one.mm_inputs = seen
        await manager._send_batch_request(sent)
        return [manager._wait_one_response(call[index]) for index in range(count)]

    def occupancy(self) -> EngineOccupancy:
        """Return the load that the scheduler wrote to shared memory last: after every few batches, and when idle."""
        written = self._manager.load_snapshot_reader.read(0)
        if written is None:
            return EngineOccupancy(0, 0, self.options.max_completions, 0.0)
        # It is written every few steps, so the step in progress lasts at least that fraction of the snapshot's age.
        age_s = (time.time() - written.timestamp) * (written.num_running_reqs > 0)
        steps, _, step_us, *_ = written.decode_moments or (0.0, 0.0, 0.0)
        return EngineOccupancy(
            written.num_running_reqs,
            written.num_waiting_reqs,
            min(written.max_running_requests, self.options.max_completions),
            written.token_usage,
            steps=steps,
            step_s=step_us / 1e6,
            present_s=max(0.0, age_s) / self._manager.server_args.load_snapshot_publish_interval,
        )

    async def probe(self) -> None:
        """Return once every scheduler has replied, between two batches; a long prefill is cut into several."""
        self._require_running()
        await self._reply(self._manager.get_internal_state())

    async def close(self) -> None:
        engine, self._engine, self._is_running = self._engine, None, False
        if engine is None:
            return
        self._fail(EngineError("the engine was closed"))
        await asyncio.sleep(0)  # lets cancelled requests send their aborts to SGLang
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, self._former_handler)
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiving
        engine.shutdown()

    def _connect(self) -> None:
        """Connect SGLang's part of this process to the running event loop."""
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = loop.create_future()
        self._may_submit = asyncio.Event()
        self._may_submit.set()
        self._loading = asyncio.Lock()
        self._manager = self._engine.tokenizer_manager
        # If SGLang started this task itself, it would also handle SIGTERM and kill this process on a failure.
        self._manager.event_loop = loop
        self._manager._handle_batch_output = partial(with_arrays, self._manager._handle_batch_output)
        self._receiving = loop.create_task(self._manager.handle_loop(), name="sglang-receive")
        self._receiving.add_done_callback(lambda task: self._die("its replies cannot be read"))
        loop.add_signal_handler(signal.SIGQUIT, self._die, "one of its processes died")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, request: SGLangRequest) -> None:
        self._spawn(request, self._submit(request))

    async def _submit(self, request: SGLangRequest) -> None:
        """Send all completions of a request, and deliver each when it is complete."""
        seen = await self._seen(request) if request.images else None
        await self._may_submit.wait()
        if request.is_aborted:
            for completion in request.pending:
                completion.complete([], [], "abort")
            return
        num_completions, is_filtered = len(request.pending), keeps_some(request.sampling)
        # SGLang's abort ends every request whose id starts with the given one; a prefix of fixed width keeps ids distinct.
        request.rids = [f"{next(self._serial):010d}-{request.request_id}-{index}" for index in range(num_completions)]
        outputs = await self._send(
            seen,
            rid=request.rids,
            input_ids=[list(request.prompt)] * num_completions,
            sampling_params=sampling_params(request.sampling, room=self.max_context - len(request.prompt)),
            return_sampling_mask=is_filtered,
            sampling_logprobs_mode="selected" if is_filtered else None,
            return_routed_experts=self.options.records_routes,
            routed_experts_start_len=request.routes_from,
        )
        for index, output in enumerate(outputs):
            self._spawn(request, self._receive(request, index, output))

    async def _seen(self, request: SGLangRequest) -> Any:
        """Return the images of a request as SGLang sends them to a scheduler.

        SGLang gets the pixels that the learner builds, not files, which it would decode and resize on its own. So the prompt
        stays as it is, with an image token for each token of an image.
        """
        if self.images is None:
            raise RequestError("its prompt has images, and the engine was started without them")
        pixels = await asyncio.to_thread(self.images.pixels, request.images, f"of request {request.request_id}")
        image = {"format": "processor_output", "pixel_values": pixels.values, "image_grid_thw": pixels.grid}
        without = SimpleNamespace(rid=request.request_id, video_data=None, audio_data=None)
        processor = self._manager.mm_processor
        seen = await processor.process_mm_data_async(
            image_data=[image],
            audio_data=None,
            input_text=list(request.prompt),
            request_obj=without,
            max_req_input_len=self.max_context,
        )
        await processor.hash_executor.set_pad_values(seen.mm_items)  # once, not for each completion in the scheduler
        return seen

    async def _receive(self, request: Request, index: int, outputs: AsyncIterator[dict[str, Any]]) -> None:
        async for output in outputs:  # exactly one, because streaming is off
            request.deliver(completion_of(output, index))

    def _spawn(self, request: SGLangRequest, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for a request. If the task fails, so does the request."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                request.fail(RequestError(f"request {request.request_id}: {error}"))

        request.tasks.append(asyncio.create_task(guarded()))

    def _abort(self, request: SGLangRequest) -> None:
        request.is_aborted = True
        for rid in request.rids:
            self._manager.abort_request(rid)  # ignored for completed ones

    async def _end(self, request: SGLangRequest) -> None:
        self._cancel(request)

    def _cancel(self, request: SGLangRequest) -> None:
        for task in request.tasks:
            task.cancel()
        self._abort(request)

    # -- weights and failures ------------------------------------------------------------------------------------------

    async def _load(self, tensors: SharedTensors, version: PolicyVersion, *, keep_kv: bool) -> None:
        if self._proof is not None:
            await self._write(tensors, version, keep_kv)
            return
        ranks, _ = await self._reply(self._check(question(tensors)))
        self._proof = proof = Proof(tensors, ranks)
        before, _ = await self._reply(self._check("checksum"))
        await self._write(tensors, version, keep_kv)
        proof.rely_on_what_follows(before, (await self._reply(self._check("checksum")))[0])
        log.info("%s", proof.summary())
        if proof.nowhere:
            log.warning("tensors without a parameter in SGLang's model: %s", listed(sorted(proof.nowhere)))
        if proof.do_not_follow:
            names = listed(proof.do_not_follow)
            self._ignores = f"the published weights do not cover the model: {names} did not follow them"
            log.error("%s", self._ignores)

    async def _write(self, tensors: SharedTensors, version: PolicyVersion, keep_kv: bool) -> None:
        await self._reply(self._replace_weights(tensors, version, keep_kv))
        assert self._proof is not None
        await asyncio.to_thread(self._proof.published, tensors)  # outside of the pause

    async def _replace_weights(self, tensors: SharedTensors, version: PolicyVersion, keep_kv: bool) -> None:
        from asyncgrpo.engines.sglang.weights import replace_weights

        async with self._loading:
            self._may_submit.clear()
            try:
                await replace_weights(
                    self._manager,
                    tensors,
                    str(version),
                    keep_kv=keep_kv,
                    num_schedulers=self.options.tensor_parallel,
                    by_plan=self._proof is not None and self._proof.may_copy(tensors),
                )
                self._version = version
            finally:
                self._may_submit.set()

    async def _reply(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for SGLang's reply to a call. Raises EngineError if SGLang dies first.

        Cancelling the caller does not cancel the call, because SGLang would match the late reply to the next call.
        """
        task = asyncio.create_task(call)
        awaited: list[asyncio.Future[Any]] = [task, self._death]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise EngineError(str(self._failure))
        return task.result()

    def _die(self, what: str) -> None:
        """Fail all pending calls and requests after the death of SGLang."""
        if not self._death.done() and self._engine is not None:
            failure = EngineError(f"SGLang ended: {last_error(0, after=OF_A_SCHEDULER) or what}")
            log.error("%s", failure)
            self._fail(failure)
            self._death.set_result(None)

    def _fail(self, failure: EngineError) -> None:
        super()._fail(failure)
        for request in self._requests.values():
            self._cancel(request)


# -- translation to and from SGLang ------------------------------------------------------------------------------------


MOST_KEPT = 4096
"""Most tokens that SGLang records for each sampled one. Top-p alone is limited to as many."""
LOG_OF_ZERO = -1e30
"""Threshold for a log-prob of minus infinity, for which SGLang writes the smallest float."""


def sampling_params(sampling: Sampling, *, room: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters. `room` is the number of tokens that the context leaves for a completion."""
    return {
        "temperature": sampling.temperature,  # at 0 SGLang takes the likeliest token
        "top_p": sampling.top_p,
        "top_k": MOST_KEPT if keeps_some(sampling) and sampling.top_k == -1 else sampling.top_k,
        "max_new_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def keeps_some(sampling: Sampling) -> bool:
    """True if each token is sampled from a part of the vocabulary that is recorded with it.

    SGLang refuses to record with a larger top-k than `MOST_KEPT`. Log-probs are then over the whole vocabulary.
    """
    is_filtered = 1 < sampling.top_k <= MOST_KEPT or (sampling.top_k == -1 and sampling.top_p < 1)
    return sampling.temperature > 0 and is_filtered


async def with_arrays(handle: Callable[[Any], Awaitable[None]], output: Any) -> None:
    """Let SGLang handle an output with its routes as arrays. It passes on arrays, and makes base64 of tensors, which is slow."""
    if routes := getattr(output, "routed_experts", None):
        output.routed_experts = [None if one is None else one.numpy() for one in routes]
    await handle(output)


def completion_of(output: dict[str, Any], index: int) -> Completion:
    """Convert SGLang's output to a completion. It includes a stop token. Raises EngineError if a log-prob is not finite."""
    meta = output["meta_info"]
    token_ids = np.array(output["output_ids"], dtype=np.int32)
    # A completion that was aborted before its first token may have the log-prob of a discarded token.
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"][: len(token_ids)]], dtype=np.float32)
    kept, routes = None, meta.get("routed_experts")
    if "output_token_sampling_mask" in meta:
        masks = meta["output_token_sampling_mask"][: len(token_ids)]
        counts = np.array([len(mask) for mask in masks], dtype=np.int32)
        kept = KeptTokens(np.fromiter(itertools.chain(*masks), np.int32), counts)
        logprobs = np.array(meta["output_token_sampling_logprobs"][: len(token_ids)], dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"SGLang returned {len(token_ids)} tokens with {len(logprobs)} log-probs")
    reason = meta["finish_reason"]
    is_finite = np.isfinite(logprobs) & (logprobs > LOG_OF_ZERO)
    if not is_finite.all() or reason.get("matched") == "NaN happened":
        raise EngineError(f"a log-prob is not finite under weights {meta['weight_version']}, which are probably broken")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
    return Completion(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=tuple(
            VersionSpan(PolicyVersion.parse(span["version"]), span["start"], span["end"])
            for span in spans
            if span["start"] < span["end"]
        ),
        finish_reason=reason["type"],
        kept=kept,
        routes=None if routes is None else routes.astype(np.int16),
    )


# -- state of the host process -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the event loop policy, multiprocessing's start method and the root logger at the end of the block.

    Inside the block warnings are silenced, also in processes started there.
    """
    policy = asyncio.get_event_loop_policy()
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []  # SGLang reconfigures logging and would close existing handlers
    python_warnings = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if python_warnings is not None:
            os.environ["PYTHONWARNINGS"] = python_warnings
        root.handlers, root.level = handlers, level
        multiprocessing.set_start_method(start_method, force=True)
        asyncio.set_event_loop_policy(policy)
