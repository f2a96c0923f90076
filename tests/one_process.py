"""Training in one process: the model, task, torch engine, rewards and learner of a run, without buffer, wire and Ray.

Step k trains the groups that the weights of step k - `buffer.max_lag` sampled. So every group has the largest lag that is
allowed, and the same seed gives the same training. `tests/test_synchronous.py` compares it with a whole run.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from asyncgrpo.buffer.buffer import group_seed
from asyncgrpo.cluster.wiring import sampling_of
from asyncgrpo.config.schema import Config
from asyncgrpo.data.loading import Prompts
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from asyncgrpo.engines.build import build_engine
from asyncgrpo.generators.rollout import GroupInFlight
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.report import StepReport
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import Group, Lease, PolicyVersion, Prompt


class Step(NamedTuple):
    """One optimizer step."""

    reward_mean: float
    report: StepReport


async def train(config: Config) -> AsyncIterator[Step]:
    """Train, and yield each of the `run.steps` steps. At most `generators.groups_in_flight` groups are sampled at once."""
    tokenizer = load_tokenizer(config.model.path)
    stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    prompts = Prompts(config.data.sources, "train", tokenizer, config.data)
    source = PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=None)
    engine, reward = build_engine(config, seed=config.run.seed), build_reward(config.reward)
    learner = Learner(config, rank=0, world=1, device="cpu")
    decode = decoder(tokenizer, keep_special=False)
    sampling = sampling_of(config, stops, evaluation=False)
    slots = asyncio.Semaphore(config.generators.groups_in_flight)

    async def sample(number: int, prompt: Prompt) -> Group:
        lease = Lease(
            lease_id=f"train.{number}.0",
            group_id=f"train.{number}",
            attempt=0,
            prompt_index=number,
            purpose="train",
            prompt=prompt,
            num_completions=config.algorithm.group_size,
            with_greedy=config.algorithm.advantage == "remax",
            sampling=sampling,
            seed=group_seed(config.run.seed, number, 0),
        )
        async with slots:
            return await GroupInFlight(lease, engine, reward, decode).generate("one")

    async def sample_step() -> list[Group]:
        wanted = [source.next() or (0, prompts[0]) for _ in range(config.buffer.prompts_per_step)]
        return list(await asyncio.gather(*(sample(number, prompt) for number, prompt in wanted)))

    waiting: deque[list[Group]] = deque()
    await engine.start(PolicyVersion(1, 0))
    try:
        for step in range(config.run.steps or 0):
            version = PolicyVersion(1, step)
            await engine.load_weights([(info.name, tensor) for info, tensor in learner.weights()], version)
            for _ in range(config.buffer.max_lag + 1 if step == 0 else 1):
                waiting.append(await sample_step())
            groups = waiting.popleft()
            rewards = [r.score.value for group in groups for r in group.rollouts if r.score.value is not None]
            yield Step(statistics.fmean(rewards), learner.step(groups, version))
    finally:
        await engine.close()
        await reward.close()
