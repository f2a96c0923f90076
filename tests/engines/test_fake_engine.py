"""What only the `fake` engine promises: lengths with a long tail, and tokens that take longer beside others."""

import asyncio
import math

import numpy as np
import pytest

from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from tests.simulation.virtual import VirtualLoop

PROMPT = (1, 2, 3)


async def started(**options) -> FakeEngine:
    engine = FakeEngine(**options)
    await engine.start(PolicyVersion(0, 0))
    return engine


async def sample(engine: FakeEngine, request_id: str = "r", **knobs) -> list[Completion]:
    return [completion async for completion in engine.generate(request_id, PROMPT, 3, Sampling(**knobs), 7)]


async def test_lengths_can_have_a_long_tail_of_which_the_prompt_has_a_part() -> None:
    engine = await started(median_tokens=50, sigma=1.0, max_context=100_000)
    lengths = []
    for prompt in range(1, 101):
        sampling = Sampling(max_tokens=90_000, stop_token_ids=(0, 255))
        completions = [a async for a in engine.generate(str(prompt), (prompt,), 4, sampling, seed=prompt << 20)]
        assert all(a.finish_reason == "stop" and (a.token_ids[:-1] % 255).all() for a in completions)
        lengths.append([math.log(len(a.token_ids)) for a in completions])
    table = np.array(lengths)
    assert abs(np.median(table) - math.log(50)) < 0.2 and abs(table.std() - 1.0) < 0.15
    assert abs(np.cov(table, rowvar=False)[np.triu_indices(4, 1)].mean() - 0.5) < 0.25, "half of the variance is shared"


@pytest.mark.parametrize("requests", [1, 4])
def test_each_completion_that_runs_can_make_tokens_slower(requests: int) -> None:
    loop = VirtualLoop()  # type: ignore[abstract]

    async def sample_all() -> None:
        engine = await started(seconds_per_token=0.01, seconds_per_completion=0.002)
        await asyncio.gather(*(sample(engine, str(name), max_tokens=10) for name in range(requests)))

    task = loop.create_task(sample_all())
    loop.run_until(math.inf, task.done)
    assert loop.time() == pytest.approx(10 * (0.01 + 0.002 * 3 * requests))
