"""The `sglang` engine: SGLang samples completions of token ids, names the version of each token, and loads weights in place.

SGLang runs the model in processes of its own; this class lives on the caller's event loop and talks to them. It must be
started from the main thread (SGLang's processes end with the thread that started them), and the main module needs an
`if __name__ == "__main__"` guard (they are spawned). A process can have one engine.

    generate ──▶ one message, n SGLang requests ══▶ scheduler ══▶ completions, one by one
    load_weights ──▶ hold new requests │ pause │ write │ label │ go on ──▶ let them start, under the new label
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
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.engines.base import EngineBase, EngineOccupancy, Request
from asyncgrpo.engines.sglang.proof import Given, Proof, listed, question
from asyncgrpo.errors import EngineError, RequestError
from asyncgrpo.types import Completion, PolicyVersion, Sampling, VersionSpan
from asyncgrpo.weights.arena import SharedTensors

log = logging.getLogger(__name__)
T = TypeVar("T")


class SGLangRequest(Request):
    """A request, its tasks, and SGLang's ids of its completions."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.tasks: list[asyncio.Task[None]] = []
        self.rids: list[str] = []
        self.is_aborted = False


class SGLangEngine(EngineBase[SGLangRequest]):
    """A model in SGLang's processes, see `base.Engine` for the methods.

    If one of SGLang's processes dies the failure is final: close this engine and start another. SGLang's seeds are its
    own: the `seed` of a request changes nothing.
    """

    request_type = SGLangRequest

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        max_context: int,
        device: str = "auto",
        tensor_parallel: int = 1,
        max_completions: int = 256,
        memory_fraction: float = 0.85,
        prefix_cache: bool = True,
        random_seed: int = 0,
        extra: dict[str, Any] | None = None,
    ):
        """Start nothing before `start`.

        Args:
            model_path: folder in Hugging Face's format, or its hub id.
            dtype: of weights, keys and values.
            max_context: longest prompt plus completion, tokens; a completion that reaches it ends with "length".
            device: "cuda", "cpu", or "auto": cuda where there is a GPU.
            tensor_parallel: GPUs of this engine.
            max_completions: completions that are to run at once. There are a few more places, so that `score` never waits.
            memory_fraction: share of GPU memory for weights and cache.
            prefix_cache: completions share the keys and values of common prefixes, never across policy versions.
            random_seed: of SGLang's sampling; the same seed and the same requests in the same batches repeat.
            extra: further arguments of `sglang.Engine`; they override all others.
        """
        super().__init__()
        self.model_path, self.dtype, self.max_context = model_path, dtype, max_context
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.tensor_parallel = tensor_parallel
        self.max_completions = max_completions
        self.memory_fraction, self.prefix_cache = memory_fraction, prefix_cache
        self.random_seed = random_seed
        self.extra = extra or {}
        self._serial = itertools.count()
        self._engine: Any = None
        self._proof: Proof | None = None
        """Of which tensors the model is made, once the first weights have come."""
        self._ignores, self._differs = "", ""

    @property
    def does_not_follow(self) -> str:
        """What of the model does not follow its weights, in a sentence: in general, or at the last checksum."""
        return self._ignores or self._differs

    async def start(self, version: PolicyVersion) -> None:
        """Blocks the event loop until the model is loaded: SGLang's processes must be children of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise EngineError("the sglang engine must be started from the main thread of its process")
        if self.device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores make it ten times slower
        self._former_handler = signal.getsignal(signal.SIGQUIT)
        try:
            with kept():
                from asyncgrpo.engines.sglang import processes

                own = processes.arguments(
                    self.model_path,
                    dtype=self.dtype,
                    max_context=self.max_context,
                    device=self.device,
                    tensor_parallel=self.tensor_parallel,
                    max_completions=self.max_completions,
                    memory_fraction=self.memory_fraction,
                )
                switches = {"disable_radix_cache": not self.prefix_cache, "random_seed": self.random_seed}
                self._engine = processes.launch(weight_version=str(version), **own | switches | self.extra)
        except Exception as error:
            raise EngineError(f"SGLang cannot start with the model {self.model_path}: {error}") from error
        self._connect()
        self.vocab_size = self._manager.model_config.vocab_size
        self._started(version)
        # What was imported stays; without this every full garbage collection would walk all of it.
        await self._manager.freeze_gc()

    async def checksum(self) -> str:
        """Also compares the model with the tensors that were loaded last (`proof.py`): what differs goes into the log."""
        self._require_running()
        ranks, digest = await self._reply(self._check("checksum"))
        names = self._proof.differing(ranks) if self._proof is not None else []
        self._differs = ""
        if names:
            self._differs = f"{len(names)} parameters are not those of weights {self._version}: {listed(names)}"
            log.error("%s", self._differs)
        return digest

    async def _check(self, action: str) -> tuple[list[dict[str, str]], str]:
        """Have all schedulers look at their parameters.

        Returns:
            What each says of every parameter, and the digest of all of it.
        Raises:
            EngineError: one of them could not.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        call = self._manager.check_weights(CheckWeightsReqInput(action=action), None)
        success, message, ranks, digest = await call
        if not success or ranks is None or digest is None:
            raise EngineError(f"SGLang cannot look at its weights: {message}")
        return [rank["checksums"] for rank in ranks], digest

    async def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """The first half of a sequence may come from the prefix cache, as it would for a request. No numbers, where parts of
        the model are known not to follow the weights."""
        self._require_running()
        if self.does_not_follow:
            return [math.nan] * sum(len(tokens) - start for tokens in sequences)
        return await self._reply(self._score(sequences, start))

    async def _score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._manager
        await self._may_submit.wait()
        call = GenerateReqInput(
            rid=[f"{next(self._serial):010d}-score-{index}" for index in range(len(sequences))],
            input_ids=[list(tokens) for tokens in sequences],
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=start - 1,  # nothing is said of the first one
            extra_key=self._prefix_keys(len(sequences)),
        )
        call.normalize_batch_and_arguments()
        manager._init_req_state(call)
        await manager._send_batch_request(await manager._batch_tokenize_and_process(len(sequences), call))

        async def logprobs(index: int) -> list[float]:
            output = await anext(manager._wait_one_response(call[index]))
            return [entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]]

        # All at once: SGLang forgets a request when it has ended, whether or not somebody waits for it.
        return list(itertools.chain(*await asyncio.gather(*map(logprobs, range(len(sequences))))))

    def _prefix_keys(self, count: int) -> list[str] | None:
        """Requests with the same key share the keys and values of common prefixes."""
        return [str(self._version)] * count if self.prefix_cache else None

    def occupancy(self) -> EngineOccupancy:
        """What the scheduler last wrote into shared memory: after some batches, and when it has nothing to do."""
        written = self._manager.load_snapshot_reader.read(0)
        if written is None:
            return EngineOccupancy(0, 0, self.max_completions, 0.0)
        # It is written once in so many steps, so the one under way lasts for that part of its age at least.
        age_s = (time.time() - written.timestamp) * (written.num_running_reqs > 0)
        steps, _, step_us, *_ = written.decode_moments or (0.0, 0.0, 0.0)
        return EngineOccupancy(
            written.num_running_reqs,
            written.num_waiting_reqs,
            min(written.max_running_requests, self.max_completions),
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
        await asyncio.sleep(0)  # requests just cancelled tell SGLang so
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
        # SGLang would start this task itself, and with it take over SIGTERM and kill this process when something fails.
        self._manager.event_loop = loop
        self._receiving = loop.create_task(self._manager.handle_loop(), name="sglang-receive")
        self._receiving.add_done_callback(lambda task: self._die("its replies cannot be read"))
        loop.add_signal_handler(signal.SIGQUIT, self._die, "one of its processes died")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, request: SGLangRequest) -> None:
        self._spawn(request, self._submit(request))

    async def _submit(self, request: SGLangRequest) -> None:
        """Send all completions of a request to the scheduler in one message, which costs much less than one for each."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._manager
        await self._may_submit.wait()
        if request.is_aborted:
            for completion in request.pending:
                completion.complete([], [], "abort")
            return
        # Nothing waits from here until the message is sent, so the version is still right then. When SGLang aborts an
        # id, it ends every request whose id starts with it; a number of fixed width in front keeps ids apart.
        num_completions = len(request.pending)
        call = GenerateReqInput(
            rid=[f"{next(self._serial):010d}-{request.request_id}-{index}" for index in range(num_completions)],
            input_ids=[list(request.prompt)] * num_completions,
            sampling_params=sampling_params(request.sampling, room=self.max_context - len(request.prompt)),
            return_logprob=True,
            extra_key=self._prefix_keys(num_completions),
        )
        call.normalize_batch_and_arguments()
        manager._init_req_state(call)
        request.rids = call.rid
        await manager._send_batch_request(await manager._batch_tokenize_and_process(num_completions, call))
        for index in range(num_completions):
            self._spawn(request, self._receive(request, index, manager._wait_one_response(call[index])))

    async def _receive(self, request: Request, index: int, outputs: AsyncIterator[dict[str, Any]]) -> None:
        async for output in outputs:  # there is one, as no stream is asked for
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
            self._manager.abort_request(rid)  # ignored for those that are complete

    async def _end(self, request: SGLangRequest) -> None:
        self._cancel(request)

    def _cancel(self, request: SGLangRequest) -> None:
        for task in request.tasks:
            task.cancel()
        self._abort(request)

    # -- weights and failures ------------------------------------------------------------------------------------------

    async def _load(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion, *, keep_kv: bool) -> None:
        given = tensors if isinstance(tensors, SharedTensors) else list(tensors)
        if self._proof is not None:
            await self._write(given, version, keep_kv)
            return
        ranks, _ = await self._reply(self._check(question(given)))
        self._proof = proof = Proof(given, ranks)
        before, _ = await self._reply(self._check("checksum"))
        await self._write(given, version, keep_kv)
        proof.rely_on_what_follows(before, (await self._reply(self._check("checksum")))[0])
        self._say(proof)

    async def _write(self, given: Given, version: PolicyVersion, keep_kv: bool) -> None:
        await self._reply(self._replace_weights(given, version, keep_kv))
        assert self._proof is not None
        await asyncio.to_thread(self._proof.published, given)  # outside of the pause

    async def _replace_weights(self, given: Given, version: PolicyVersion, keep_kv: bool) -> None:
        from asyncgrpo.engines.sglang.weights import replace_weights

        async with self._loading:
            self._may_submit.clear()
            try:
                await replace_weights(
                    self._manager, given, str(version), keep_kv=keep_kv, num_schedulers=self.tensor_parallel
                )
                self._version = version
            finally:
                self._may_submit.set()

    def _say(self, proof: Proof) -> None:
        """Say in the log what the first weights showed."""
        log.info("%s", proof.summary())
        if proof.nowhere:
            log.warning("tensors that are in no parameter of SGLang's model: %s", listed(sorted(proof.nowhere)))
        if proof.do_not_follow:
            names = listed(proof.do_not_follow)
            self._ignores = f"the weights that were sent are not all of the model: {names} did not follow them"
            log.error("%s", self._ignores)

    async def _reply(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for SGLang's reply to a call. Raises EngineError if SGLang dies first.

        Cancelling the caller does not cancel the call: SGLang would take its late reply for that of the next call.
        """
        task = asyncio.create_task(call)
        awaited: list[asyncio.Future[Any]] = [task, self._death]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise EngineError(str(self._failure))
        return task.result()

    def _die(self, what: str) -> None:
        """Fail everything that is awaited: SGLang is gone."""
        if not self._death.done() and self._engine is not None:
            log.error("SGLang ended: %s", what)
            self._fail(EngineError(f"SGLang ended: {what}"))
            self._death.set_result(None)

    def _fail(self, failure: EngineError) -> None:
        super()._fail(failure)
        for request in self._requests.values():
            self._cancel(request)


# -- translation to and from SGLang ------------------------------------------------------------------------------------


LOG_OF_ZERO = -1e30
"""SGLang writes the smallest float where a log-prob is minus infinity; anything below this is one."""


def sampling_params(sampling: Sampling, *, room: int) -> dict[str, Any]:
    """SGLang's sampling parameters; `room` is how many tokens the context leaves for a completion."""
    return {
        "temperature": sampling.temperature,  # at 0 SGLang takes the likeliest token
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def completion_of(output: dict[str, Any], index: int) -> Completion:
    """The completion that SGLang returned. A stop token is its last token. Raises EngineError if a log-prob is not finite."""
    meta = output["meta_info"]
    token_ids = np.array(output["output_ids"], dtype=np.int32)
    # A completion that was aborted before its first token may have the log-prob of a token that was not kept.
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"][: len(token_ids)]], dtype=np.float32)
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
    )


# -- keeping the host process as it was --------------------------------------------------------------------------------


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the event loop policy, the start method of multiprocessing and the root logger at the end.

    Inside, warnings are silenced, also those of processes that are started there.
    """
    policy = asyncio.get_event_loop_policy()
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []  # SGLang configures logging anew, and would close the handlers that it finds
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
