"""A mixture of experts goes from the learner into the `torch` engine, and both give its tokens the same log-probs."""

import asyncio
from pathlib import Path

import pytest
import torch

from asyncgrpo.engines.torch.engine import TorchEngine
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from tests.learner.helpers import VERSION, config, make_group, random_groups
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

PROMPT = (5, 77, 130, 9, 201)
MAKERS = {"qwen3_moe": make_tiny_qwen3_moe, "deepseek_v3": make_tiny_deepseek_v3}


@pytest.fixture(scope="module", params=MAKERS)
def path(request, tmp_path_factory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


def engine_of(path: Path) -> TorchEngine:
    return TorchEngine(str(path), dtype=torch.float32, device=torch.device("cpu"), max_context=64, max_completions=8)


@pytest.fixture
def trained(path) -> Learner:
    learner = Learner(config(path, learner={"lr": 1e-2}), rank=0, world=1, device="cpu")
    for seed in range(2):
        learner.step(random_groups(4, 4, seed=seed), VERSION)
    return learner


def test_the_learner_agrees_with_what_the_engine_samples(path, trained):
    """The gap that a run reports: between the engine's log-probs and the learner's own, under the same weights."""

    async def sample() -> list[Completion]:
        engine = engine_of(path)
        await engine.start(PolicyVersion(0, 0))
        await engine.load_weights(((info.name, tensor) for info, tensor in trained.weights()), VERSION)
        completions = [a async for a in engine.generate("r", PROMPT, 8, Sampling(max_tokens=24), 0)]
        await engine.close()
        return completions

    completions = asyncio.run(sample())
    group = make_group(
        0,
        [float(index % 2) for index in range(8)],
        [completion.token_ids for completion in completions],
        prompt=PROMPT,
        logprobs=[completion.logprobs for completion in completions],
    )
    assert trained.step([group], VERSION).logprob_gap_max < 1e-4
