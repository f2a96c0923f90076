"""A mixture of experts goes from the learner into the `torch` engine, and both give its tokens the same log-probs."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncgrpo.engines.torch.engine import TorchEngine
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from tests.learner.helpers import VERSION, config, make_group, random_groups
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

PROMPT = (5, 77, 130, 9, 201)


@pytest.mark.parametrize("make", [make_tiny_qwen3_moe, make_tiny_deepseek_v3])
def test_the_learner_agrees_with_what_the_engine_samples(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The gap that a run reports: between the engine's log-probs and the learner's own, under the same weights."""
    path = make(tmp_path)
    trained = Learner(config(path, learner={"lr": 1e-2}), rank=0, world=1, device="cpu")
    for seed in range(2):
        trained.step(random_groups(4, 4, seed=seed), VERSION)

    async def sample() -> list[Completion]:
        engine = TorchEngine(
            str(path), dtype=torch.float32, device=torch.device("cpu"), max_context=64, max_completions=8
        )
        await engine.start(PolicyVersion(0, 0))
        await engine.load_weights(((info.name, tensor) for info, tensor in trained.weights()), VERSION)
        completions = [a async for a in engine.generate("r", PROMPT, 8, Sampling(max_tokens=24), 0)]
        await engine.close()
        return completions

    completions = asyncio.run(sample())
    token_ids, logprobs = zip(*((one.token_ids, one.logprobs) for one in completions), strict=True)
    group = make_group(0, [float(index % 2) for index in range(8)], token_ids, prompt=PROMPT, logprobs=logprobs)
    assert trained.step([group], VERSION).logprob_gap_max < 1e-4
