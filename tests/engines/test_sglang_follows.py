"""An SGLang engine that does not take all that it is sent says so: from its first weights on, or from the version that it skips.

Each engine is alone in its event loop, so these are not in `test_sglang_engine.py`.
"""

import asyncio
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.engines.sglang.engine import SGLangEngine
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.files import disk_tensors
from asyncgrpo.weights.publication import CheckSequences
from tests.models import make_tiny_qwen3

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

MAX_CONTEXT = 200
CHECK = CheckSequences.draw(260, MAX_CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tie=True)


DROPPED = "model.layers.1.self_attn.k_proj.weight"
"""SGLang keeps it in one parameter with those of queries and values."""
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


def bfloat16_engine(folder: Path) -> tuple[SGLangEngine, dict[str, torch.Tensor]]:
    """It and the weights that it starts with."""
    engine = SGLangEngine(str(folder), dtype=torch.bfloat16, max_context=MAX_CONTEXT, device="cpu", max_completions=4)
    return engine, disk_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def test_a_tensor_that_the_engine_ignores_is_found_by_its_first_weights(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def load_without() -> None:
        engine, weights = bfloat16_engine(folder)
        weights["model.unknown"] = weights.pop(DROPPED)
        await engine.start(PolicyVersion(0, 0))
        try:
            await engine.load_weights(weights.items(), PolicyVersion(0, 1))
            await engine.checksum()
            assert engine.does_not_follow.endswith(f"model: {FUSED} did not follow them")
            assert all(map(math.isnan, await engine.score(CHECK.tokens, CHECK.start)))
        finally:
            await engine.close()

    asyncio.run(load_without())
    assert "tensors without a parameter in SGLang's model: model.unknown" in caplog.text


def test_an_update_that_the_engine_skips_later_is_found_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few elements by one unit in the last place, less than any rounding of the log-probs."""
    from asyncgrpo.engines.sglang import weights

    payloads, skipped = weights.payloads, set[str]()

    def as_unknown(tensors, num_schedulers):
        tensors[:] = [("model.unknown" if name in skipped else name, tensor) for name, tensor in tensors]
        return payloads(tensors, num_schedulers)

    monkeypatch.setattr(weights, "payloads", as_unknown)

    async def skip_the_second() -> None:
        engine, given = bfloat16_engine(folder)
        await engine.start(PolicyVersion(0, 0))
        try:
            for number, fault in enumerate([(), (DROPPED,), (), (DROPPED,)], 1):
                bits = given[DROPPED].detach().clone().view(torch.int16)
                bits[:3, number] += 1
                given[DROPPED] = bits.view(torch.bfloat16)
                skipped.clear()
                skipped.update(fault)
                await engine.load_weights(given.items(), PolicyVersion(0, number))
                await engine.checksum()
                scores = await engine.score(CHECK.tokens, CHECK.start)
                assert engine.does_not_follow == (
                    f"1 parameters are not those of weights 0.{number}: {FUSED}" if fault else ""
                )
                assert all(map(math.isnan if fault else math.isfinite, scores))
        finally:
            await engine.close()

    asyncio.run(skip_the_second())
