"""From a lease to a group: sample the answers, score each as soon as it is complete, put them together.

A misfortune of one answer (its reward hung, it was aborted) is part of the group, by name. A misfortune of the engine is
an exception.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

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
        async for completion in _answers(lease, engine):
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


def request_ids(lease_id: str) -> tuple[str, str]:
    """What the engine knows a lease by: its sampled answers, and its greedy one."""
    return lease_id, f"{lease_id}.greedy"


async def _answers(lease: Lease, engine: Engine) -> AsyncIterator[Completion]:
    """All answers of `lease`, each as soon as it is complete; the greedy one last."""
    sampled, greedy = request_ids(lease.lease_id)
    baseline = asyncio.create_task(_greedy(greedy, lease, engine)) if lease.with_greedy else None
    try:
        async for completion in engine.generate(
            sampled, lease.prompt.token_ids, lease.num_answers, lease.sampling, lease.seed
        ):
            yield completion
        if baseline is not None:
            yield await baseline
    finally:
        if baseline is not None:
            baseline.cancel()


async def _greedy(request_id: str, lease: Lease, engine: Engine) -> Completion:
    sampling = msgspec.structs.replace(lease.sampling, temperature=0.0, top_p=1.0, top_k=-1)
    found = [c async for c in engine.generate(request_id, lease.prompt.token_ids, 1, sampling, lease.seed)]
    return dataclasses.replace(found[0], index=lease.num_answers)


async def _score(completion: Completion, lease: Lease, reward: Reward, decode: Decode) -> Score:
    if completion.finish_reason == "abort":
        return Score(failure="aborted")
    return await reward.score(lease.prompt, decode(completion.token_ids.tolist()))
