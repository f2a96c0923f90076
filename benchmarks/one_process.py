"""Training in one process: the model, task, torch engine, rewards and learner of a run, without buffer, wire and Ray.

Step k trains the groups that the weights of step k - `buffer.max_lag` sampled. So every group has the largest lag that is
allowed, and the same seed gives the same training. `tests/test_synchronous.py` compares it with a whole run.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from asyncgrpo.buffer.buffer import group_seed
from asyncgrpo.cluster.wiring import sampling_of
from asyncgrpo.config.schema import Config
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource, load_prompts
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from asyncgrpo.engines.build import build_engine
from asyncgrpo.generators.rollout import GroupInFlight
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import reshard
from asyncgrpo.learner.packing import pack
from asyncgrpo.learner.report import StepReport
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import Group, Lease, PolicyVersion, Prompt, Sampling


class Step(NamedTuple):
    """One optimizer step."""

    number: int
    """From 0."""
    evaluation: list[float] | None
    """Reward of each held-out prompt under the weights before the step; None where no evaluation was due."""
    reward_mean: float
    groups: list[Group]
    """That were trained."""
    report: StepReport
    learner: Learner
    """Has the weights after the step, until the next one."""
    sample_share: float | None
    """Effective sample share of the weights before the step over those that sampled, by `sample_share`; None: not asked for."""


def mean_reward(groups: Sequence[Group]) -> float:
    """The mean reward of all completions that have one."""
    return statistics.fmean(r.score.value for g in groups for r in g.rollouts if r.score.value is not None)


@torch.no_grad()
def sample_share(learner: Learner, groups: Sequence[Group]) -> float:
    """(Σρ)² / (n Σρ²) over all sampled tokens, ρ = present weights / behaviour, from a forward pass of its own."""
    rows = pack(
        groups, None, rank=0, world=1, tokens_per_microbatch=learner.config.learner.tokens_per_microbatch
    ).trained
    rho = torch.cat([learner.model(row).scores.logprobs - row.behaviour_logprobs for row in rows]).double().exp()
    reshard(learner.model)
    return (rho.sum() ** 2 / (rho.numel() * rho.square().sum())).item()


async def train(
    config: Config, *, eval_every: int | None = None, adam_eps: float | None = None, with_share: bool = False
) -> AsyncIterator[Step]:
    """Train, and yield each of the `run.steps` steps. At most `generators.groups_in_flight` groups are sampled at once.

    Args:
        eval_every: steps between evaluations of `data.eval`; None: never.
        adam_eps: replaces AdamW's epsilon.
        with_share: measure `Step.sample_share`.
    Raises:
        TrainingError: where `Learner.step` raises it.
    """
    tokenizer = load_tokenizer(config.model.path)
    stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    prompts = load_prompts(config.data.train, "train", tokenizer, config.data)
    held_out = load_prompts(config.data.eval, "eval", tokenizer, config.data) if config.data.eval else ()
    curriculum = Curriculum(
        Path(config.run.out) / "curriculum", is_on=config.data.curriculum == "success", success=config.reward.success
    )
    source = PromptSource(
        prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=None, curriculum=curriculum
    )
    engine, reward = build_engine(config, seed=config.run.seed), build_reward(config.reward)
    learner = Learner(config, rank=0, world=1, device="cpu")
    for group in learner.optimizer.param_groups:
        group["eps"] = group["eps"] if adam_eps is None else adam_eps
    decode = decoder(tokenizer, keep_special=False)
    sampling, greedy = (sampling_of(config, stops, evaluation=evaluation) for evaluation in (False, True))

    slots = asyncio.Semaphore(config.generators.groups_in_flight)

    async def sample(purpose: str, number: int, prompt: Prompt, completions: int, how: Sampling) -> Group:
        lease = Lease(
            lease_id=f"{purpose}.{number}.0",
            group_id=f"{purpose}.{number}",
            attempt=0,
            prompt_index=number,
            purpose=purpose,
            prompt=prompt,
            num_completions=completions,
            with_greedy=purpose == "train" and config.algorithm.advantage == "remax",
            sampling=how,
            seed=group_seed(config.run.seed, number, 0),
        )
        async with slots:
            return await GroupInFlight(lease, engine, reward, decode).generate("bench")

    async def sample_step() -> list[Group]:
        wanted = [source.next() or (0, prompts[0]) for _ in range(config.buffer.prompts_per_step)]
        return list(
            await asyncio.gather(*(sample("train", n, p, config.algorithm.group_size, sampling) for n, p in wanted))
        )

    async def evaluate() -> list[float]:
        groups = await asyncio.gather(*(sample("eval", n, p, 1, greedy) for n, p in enumerate(held_out)))
        return [mean_reward([group]) for group in groups]

    waiting: deque[list[Group]] = deque()
    await engine.start(PolicyVersion(1, 0))
    try:
        for step in range(config.run.steps or 0):
            version = PolicyVersion(1, step)
            await engine.load_weights([(info.name, tensor) for info, tensor in learner.weights()], version)
            evaluation = await evaluate() if eval_every and step % eval_every == 0 else None
            for _ in range(config.buffer.max_lag + 1 if step == 0 else 1):
                waiting.append(await sample_step())
            groups = waiting.popleft()
            share = sample_share(learner, groups) if with_share else None
            report = learner.step(groups, version)
            for group in groups:
                source.done(group.prompt_index, [r.score.value for r in group.rollouts if r.score.value is not None])
            yield Step(step, evaluation, mean_reward(groups), groups, report, learner, share)
    finally:
        await engine.close()
        await reward.close()
