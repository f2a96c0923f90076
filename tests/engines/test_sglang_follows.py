"""An SGLang engine that does not take all that it is sent is found by its first weights.

A version that is skipped later: `test_sglang_tensor_parallel.py`. The engine is alone in its event loop.
"""

import asyncio
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.files import disk_tensors
from asyncgrpo.weights.publication import CheckSequences
from tests.models import make_tiny_qwen3

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

MAX_CONTEXT = 200
CHECK = CheckSequences.draw(260, MAX_CONTEXT)


DROPPED = "model.layers.1.self_attn.k_proj.weight"
"""SGLang keeps it in one parameter with those of queries and values."""
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


def test_a_tensor_that_the_engine_ignores_is_found_by_its_first_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_qwen3(tmp_path, tie=True)
    engine = SGLangEngine(
        SGLangOptions(
            model_path=str(path), dtype=torch.bfloat16, max_context=MAX_CONTEXT, device="cpu", max_completions=4
        )
    )
    weights = disk_tensors(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))

    async def load_without() -> None:
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
