"""What our scheduler adds to SGLang's: the label of a token that is under way when weights change, the fences, and the proof.

SGLang's overlap schedule launches a batch before it reads the result of the one before. A fake device stands for the GPU
on which such a batch still runs; that our calls reach a real one is shown by no test here.
"""

import asyncio
import math
from collections.abc import Callable, Iterator

import pytest

from asyncgrpo.types import Completion, PolicyVersion
from asyncgrpo.weights.publication import CheckSequences
from tests.engines.engines import MAX_CONTEXT, VOCAB, Rig, sglang_rig
from tests.engines.shared import shared
from tests.models import make_tiny_qwen3

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

CHUNK = 16
"""Tokens of a prompt that are read at once."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine that reads prompts in chunks and, every few batches, throws keys away and recomputes them."""
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab=VOCAB, layers=1)
    extra = {"chunked_prefill_size": CHUNK, "disable_overlap_schedule": False}
    rig = sglang_rig(folder, extra=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
        rig.start()
    yield rig
    rig.stop()


IGNORED, FUSED = (f"model.layers.0.self_attn.{name}_proj.weight" for name in ("k", "qkv"))
"""SGLang keeps it in one parameter with those of queries and values."""


def test_a_tensor_that_the_engine_ignores_is_found_by_its_first_weights(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep it first. A version that is skipped later: `test_sglang_tensor_parallel.py`."""
    weights, check = rig.weights(1), CheckSequences.draw(VOCAB, MAX_CONTEXT)
    weights["model.unknown"] = weights.pop(IGNORED)

    async def load_without() -> None:
        await rig.engine.load_weights(shared(weights), PolicyVersion(0, 1))
        await rig.engine.checksum()
        assert rig.engine.does_not_follow.endswith(f"model: {FUSED} did not follow them")
        assert all(map(math.isnan, await rig.engine.score(check.tokens, check.start)))
        await rig.load(0)

    rig.run(load_without())
    assert "tensors without a parameter in SGLang's model: model.unknown" in caplog.text


def test_every_token_bears_the_version_that_sampled_it(rig: Rig) -> None:
    """Weights change all the time, while prompts of several chunks, first tokens and later ones are under way."""
    prompts = [tuple((start + step) % VOCAB for step in range(4 + 9 * start % 50)) for start in range(16)]

    async def change_all_the_time() -> list[list[Completion]]:
        running = []
        for change, prompt in enumerate(prompts):
            running.append(asyncio.create_task(rig.sample(prompt, 2, max_tokens=4 + 7 * change)))
            await asyncio.sleep(0.005)
            await rig.load(-1 - change)
        while not all(task.done() for task in running):
            await rig.load(-1 - rig.engine.version.number)
            await asyncio.sleep(0.01)
        return [task.result() for task in running]

    spans = 0
    for prompt, completions in zip(prompts, rig.run(change_all_the_time()), strict=True):
        for completion in completions:
            rig.assert_logprobs(prompt, completion)
            spans += len(completion.spans)
    assert spans > 4 * len(prompts), "the weights changed too seldom"


class FakeDevice:
    """Work on it is done when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self.under_way: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.under_way:
            self.under_way.pop(0)()


def test_weights_are_written_while_the_device_is_idle() -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    from asyncgrpo.engines.sglang.processes import OurScheduler

    device, weights, seen = FakeDevice(), ["old", "old"], []
    scheduler = OurScheduler.__new__(OurScheduler)
    vars(scheduler).update(device_module=device, enable_overlap=True, last_batch=None, disaggregation_mode=None)
    vars(scheduler).update(_pause_started_at=None, _pause_intervals=[], disagg_decode_prealloc_queue=None)

    device.under_way.append(lambda: seen.append(tuple(weights)))  # the batch that was launched before the pause
    scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
    weights[0] = "new"
    device.under_way.append(lambda: weights.__setitem__(1, "new"))  # a write on another stream
    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    seen.append(tuple(weights))  # the next batch waits for no other stream
    assert seen == [("old", "old"), ("new", "new")]


def test_a_version_leaves_nothing_of_the_one_before_it() -> None:
    from sglang.srt.runtime_context import get_context, get_serving

    from asyncgrpo.engines.sglang.processes import OurScheduler

    scheduler = OurScheduler.__new__(OurScheduler)
    vars(scheduler).update(running_batch=None, last_batch=None, chunked_req=None, hisparse_coordinator=None)
    vars(scheduler).update(waiting_queue=[], result_queue=[], enable_continuous_input_polling=False)
    with get_context().override_server_args(weight_version="1.0"):
        get_context().override("another", tp_size=1)
        for number in range(1, 10):
            scheduler.record_weight_version_change(f"1.{number}")
        assert get_serving().weight_version == "1.9"
        assert [fields for _, fields in get_context().overrides_log()] == [{"tp_size": 1}, {"weight_version": "1.9"}]
