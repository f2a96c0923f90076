"""What only SGLang can get wrong: its queue, its end tokens, its processes, and what it does to its host process.
What all engines promise is in `test_engine.py`.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from asyncgrpo import scratch
from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions
from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, PolicyVersion
from asyncgrpo.weights.publication import NUM_SEQUENCES, CheckSequences
from tests.engines.engines import Rig, sglang_rig
from tests.engines.shared import shared
from tests.models import make_tiny_qwen3
from tests.runs import shared_memory

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

PROMPT = tuple(range(3, 43))
"""Long enough for the prefix cache to want it."""
LONG = 150
MAX_CONTEXT = 200
AT_ONCE = 4
PLACES = AT_ONCE + NUM_SEQUENCES
"""With those for the check sequences."""
END_TOKENS = list(range(0, 260, 10))
"""End tokens of the model's own configuration: most completions would soon meet one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), tie=True)
    config = json.loads((folder / "config.json").read_text())
    # As long as the context, so that SGLang's reserve does not fit.
    config |= {"eos_token_id": END_TOKENS, "max_position_embeddings": MAX_CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKENS}))
    return folder


@pytest.fixture(scope="module")
def rig(folder: Path) -> Iterator[Rig]:
    # Engines of another module may have overlapped in this process, which a run's never do: each then restores what it
    # found, and the last one found the other's handler.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    rig = sglang_rig(folder, max_context=MAX_CONTEXT, max_completions=AT_ONCE, prefix_cache=True)
    before = process_wide()
    rig.start()
    assert process_wide() == before
    yield rig
    rig.stop()
    assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL


def process_wide() -> list[object]:
    """What belongs to the whole process, and SGLang sets when it is imported or launched."""
    root = logging.getLogger()
    return [
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGINT),
        os.environ.get("PYTHONWARNINGS"),
        root.level,
        *root.handlers,
    ]


def test_a_model_that_cannot_be_loaded_is_an_error_and_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    before = set(multiprocessing.active_children()), signal.getsignal(signal.SIGQUIT), process_wide()
    engine = SGLangEngine(SGLangOptions(model_path=str(tmp_path), dtype=torch.float32, max_context=64, device="cpu"))
    with pytest.raises(EngineError, match=str(tmp_path)):
        asyncio.run(engine.start(PolicyVersion(0, 0)))
    assert (set(multiprocessing.active_children()), signal.getsignal(signal.SIGQUIT), process_wide()) == before


def test_what_a_killed_engine_would_leave_bears_our_mark(rig: Rig) -> None:
    shared = [path.name for path in shared_memory(psutil.Process().children(recursive=True))]
    assert any(name.startswith("sem.") for name in shared) and any(name.startswith("sglang_") for name in shared)
    assert [name for name in shared if scratch.mark() not in name] == []
    assert any(path.is_socket() for path in scratch.folder().iterdir())


def test_a_context_longer_than_the_model_can_attend_to_is_refused(folder: Path) -> None:
    engine = SGLangEngine(
        SGLangOptions(model_path=str(folder), dtype=torch.float32, max_context=MAX_CONTEXT + 1, device="cpu")
    )
    with pytest.raises(EngineError, match=rf"max_context \({MAX_CONTEXT + 1}\)"):
        asyncio.run(engine.start(PolicyVersion(0, 0)))


def test_a_queued_request_can_be_aborted_and_does_not_find_old_keys(rig: Rig) -> None:
    async def queue_behind_long_ones() -> list[Completion]:
        await rig.sample(PROMPT, max_tokens=2)  # now the prefix cache holds PROMPT
        long = asyncio.create_task(rig.sample(PROMPT[:2], PLACES, max_tokens=LONG))
        while len(rig.engine._manager.rid_to_state) < PLACES:
            await asyncio.sleep(0.01)
        queued = asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=8))
        aborted = asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=8, request_id="aborted"))
        while len(rig.engine._manager.rid_to_state) < PLACES + 4:
            await asyncio.sleep(0.01)
        await rig.engine.abort("aborted")
        for completion in await aborted:
            assert (len(completion.token_ids), completion.spans, completion.finish_reason) == (0, (), "abort")
        version = await rig.load(1)
        completions = await queued
        assert all(completion.spans[0].version == version for completion in completions)
        assert all(len(completion.spans) == 2 for completion in await long)
        return completions

    for completion in rig.run(queue_behind_long_ones()):
        rig.assert_logprobs(PROMPT, completion)


def test_the_prefix_cache_is_used_within_a_version(rig: Rig) -> None:
    async def cached_tokens() -> int:
        from sglang.srt.managers.io_struct import GenerateReqInput

        await rig.load(0)
        await rig.sample(PROMPT, max_tokens=2)
        call = GenerateReqInput(
            input_ids=list(PROMPT), sampling_params={"max_new_tokens": 1}, extra_key=str(rig.engine.version)
        )
        (output,) = [output async for output in rig.engine._manager.generate_request(call)]
        return output["meta_info"]["cached_tokens"]

    assert rig.run(cached_tokens()) >= len(PROMPT) - 1


CHECK = CheckSequences.draw(260, MAX_CONTEXT)


def test_scores_wait_for_no_completion(rig: Rig) -> None:
    async def score_beside() -> bool:
        busy = asyncio.create_task(rig.sample(PROMPT, AT_ONCE, max_tokens=LONG))
        while rig.engine.occupancy().running < AT_ONCE:
            await asyncio.sleep(0.01)
        await rig.engine.score(CHECK.tokens, CHECK.start)
        was_busy = not busy.done()
        await busy
        return was_busy

    assert rig.run(score_beside())
    assert rig.engine.occupancy().places == AT_ONCE


def test_the_end_tokens_of_the_model_do_not_end_a_completion(rig: Rig) -> None:
    for stop in [(), (7,)]:
        completions = rig.run(rig.sample(PROMPT, 8, max_tokens=30, stop_token_ids=stop))
        met = {token for completion in completions for token in completion.token_ids[:-1].tolist()}
        assert met & set(END_TOKENS)
        assert {completion.finish_reason for completion in completions} <= {"length", "stop"}
        assert all(
            (completion.finish_reason == "stop") == (completion.token_ids[-1] in stop) for completion in completions
        )


def test_a_completion_may_fill_the_whole_context(rig: Rig) -> None:
    for length in (MAX_CONTEXT - 1, 5):
        prompt = tuple(token % 260 for token in range(length))
        (completion,) = rig.run(rig.sample(prompt, max_tokens=MAX_CONTEXT))
        assert (len(completion.token_ids), completion.finish_reason) == (MAX_CONTEXT - length, "length")
        rig.assert_logprobs(prompt, completion)


def test_abort_spares_requests_whose_id_begins_the_same(rig: Rig) -> None:
    async def abort_one() -> list[Completion]:
        tasks = [
            asyncio.create_task(rig.sample(PROMPT, request_id=name, max_tokens=40)) for name in ("g", "g-0", "g-00")
        ]
        await rig.sample((1,), max_tokens=3)
        await rig.engine.abort("g")
        return [completion for (completion,) in await asyncio.gather(*tasks)]

    assert [completion.finish_reason for completion in rig.run(abort_one())] == ["abort", "length", "length"]


def test_a_scheduler_finds_tensors_where_they_lie() -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    from asyncgrpo.engines.sglang import weights
    from asyncgrpo.weights import arena

    def got(given: arena.SharedTensors) -> dict[str, torch.Tensor]:
        return dict(mapped.tensors(MultiprocessingSerializer.deserialize(weights.payloads(given, 1, by_plan=False)[0])))

    tensors = {
        "a": torch.randn(3, dtype=torch.bfloat16),
        "c": torch.randn(6, 4).t(),
        "d": torch.ones(()),
        "e": torch.ones(24),
    }
    mapped, given = weights.Mapped(), shared(tensors)
    found = got(given)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    given[0][1].fill_(7.0)
    assert found["a"].tolist() == [7.0] * 3, "the same pages"
    first = given.arenas.file
    del given
    got(shared(tensors))
    assert first not in mapped._files, "a file that is gone is not kept"


def test_tensors_in_another_order_than_the_plan_get_to_their_places(rig: Rig) -> None:
    rig.run(rig.load(1))
    backwards, version = dict(reversed(rig.weights(2).items())), PolicyVersion(0, rig.engine.version.number + 1)
    rig._changes[version] = 2
    rig.run(rig.engine.load_weights(shared(backwards), version))
    for completion in rig.run(rig.sample(PROMPT, 2, max_tokens=8)):
        rig.assert_logprobs(PROMPT, completion)


def test_a_log_prob_that_is_not_finite_is_an_error_that_names_the_request(rig: Rig) -> None:
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in rig.weights(0).items()}
    rig.run(rig.engine.load_weights(shared(broken), rig.engine.version))
    with pytest.raises(EngineError, match=r"request mine: .*not finite"):
        rig.run(rig.sample(PROMPT, AT_ONCE, request_id="mine"))
    rig.run(rig.load(0))
    for completion in rig.run(rig.sample(PROMPT, AT_ONCE, max_tokens=10)):
        rig.assert_logprobs(PROMPT, completion)  # whatever the broken weights left in the cache


def test_a_load_that_is_cancelled_is_a_failed_load(rig: Rig) -> None:
    async def cancel() -> None:
        loading = asyncio.create_task(rig.engine.load_weights(shared(rig.weights(1)), PolicyVersion(0, 999_999)))
        while rig.engine._may_submit.is_set():
            await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        with pytest.raises(EngineError, match="does not sample"):
            await rig.sample(PROMPT)
        await rig.load(2)

    rig.run(cancel())
    (completion,) = rig.run(rig.sample(PROMPT, max_tokens=8))
    rig.assert_logprobs(PROMPT, completion)


def test_a_dead_scheduler_fails_what_waits_and_harms_no_other_process(rig: Rig) -> None:
    """Ends the engine of this module: keep it last."""
    rig.run(rig.load(0))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    schedulers = [psutil.Process(pid) for pid in rig.engine._engine.get_all_child_pids()]

    async def kill_midway() -> None:
        running = asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=LONG))
        await rig.sample(PROMPT, max_tokens=3)
        for scheduler in schedulers:
            scheduler.kill()
        with pytest.raises(EngineError, match="one of its processes died"):
            await running
        with pytest.raises(EngineError, match="one of its processes died"):
            await rig.load(1)
        with pytest.raises(EngineError, match="one of its processes died"):
            await rig.engine.checksum()
        with pytest.raises(EngineError, match="does not sample"):
            await rig.sample(PROMPT)
        await rig.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await rig.load(1)

    try:
        rig.run(kill_midway())
        assert bystander.poll() is None
        assert not any(scheduler.is_running() for scheduler in schedulers)
    finally:
        bystander.kill()
        bystander.wait()
