"""From a lease to a group: sample the answers, score each as soon as it is complete, put them together.

A misfortune of one answer (its reward hung, it was aborted) is part of the group, by name. A misfortune of the engine is
an exception.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from asyncgrpo.generators.engine import Engine
from asyncgrpo.rewards.base import Reward
from asyncgrpo.types import Completion, Group, Lease, Rollout, Score

Decode = Callable[[Sequence[int]], str]
"""Token ids to the text that the reward sees."""


async def generate_group(lease: Lease, engine: Engine, reward: Reward, decode: Decode, generator_id: str) -> Group:
    """The completed group of `lease`.

    Raises:
        EngineError: the engine failed; the lease must be returned.
    """
    started = time.monotonic()
    tasks: list[tuple[Completion, asyncio.Task[Score]]] = []
    try:
        async for completion in engine.generate(
            lease.lease_id, lease.prompt.token_ids, lease.num_answers, lease.sampling, lease.seed
        ):
            tasks.append((completion, asyncio.create_task(_score(completion, lease, reward, decode))))
        generated = time.monotonic()
        rollouts = [Rollout(completion, await task) for completion, task in tasks]
    finally:
        for _, task in tasks:
            task.cancel()
    rollouts.sort(key=lambda r: r.completion.index)
    return Group(
        group_id=lease.group_id,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        order=lease.order,
        purpose=lease.purpose,
        prompt=lease.prompt,
        rollouts=tuple(rollouts),
        generator_id=generator_id,
        timings={"generate": generated - started, "reward": time.monotonic() - generated},
    )


async def _score(completion: Completion, lease: Lease, reward: Reward, decode: Decode) -> Score:
    if completion.finish_reason == "abort":
        return Score(failure="aborted")
    return await reward.score(lease.prompt, decode(completion.token_ids.tolist()))
