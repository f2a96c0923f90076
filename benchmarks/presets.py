"""Which algorithms learn the demo's task, and at which lag: steps to a mean reward of 0.9. One JSON line a run.

python -m benchmarks.presets --algorithms grpo gspo --lags 0 4 8 --seeds 0

One process instead of a run: the same model, task, torch engine, rewards and learner as `asyncgrpo demo --algorithm`,
but step k trains exactly the groups that the weights of step k - lag sampled. So every group has the largest lag that
is allowed, nothing depends on who is faster, and a run is the same for the same seed.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import torch

from asyncgrpo.buffer.seeds import group_seed
from asyncgrpo.cluster.actors import sampling_of
from asyncgrpo.config import Config
from asyncgrpo.config_files import algorithm_names, shipped
from asyncgrpo.config_loading import load_config
from asyncgrpo.data.demo import demo_rules, make_demo_model, write_demo_task
from asyncgrpo.data.prompts import PromptSource, load_prompts
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from asyncgrpo.errors import TrainingError
from asyncgrpo.generators.build import build_engine
from asyncgrpo.generators.rollout import GroupUnderWay
from asyncgrpo.learner.learner import Learner
from asyncgrpo.rewards import build_reward
from asyncgrpo.types import Group, Lease, WeightVersion

WINDOW = 5
GOAL = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=algorithm_names(), help="names in configs/algorithms")
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for algorithm in arguments.algorithms:
        for lag in arguments.lags:
            for seed in arguments.seeds:
                print(json.dumps(measure(algorithm, lag, seed, arguments.steps, arguments.overrides)), flush=True)


def measure(algorithm: str, lag: int, seed: int, steps: int, overrides: list[str]) -> dict:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        make_demo_model(Path(folder) / "model", seed=seed)
        write_demo_task(Path(folder) / "train.jsonl", Path(folder) / "eval.jsonl", seed=seed)
        config = load_config(
            shipped("quickstart"),
            [
                f"model.path={folder}/model",
                f"data.train={folder}/train.jsonl",
                "data.eval=null",
                f"run.seed={seed}",
                f"run.steps={steps}",
                f"buffer.max_lag={lag}",
                "generators.engine=torch",
                "generators.count=1",
                *overrides,
            ],
            algorithm=algorithm,
        )
        started = time.process_time()
        rewards, ended = asyncio.run(train(config))
    means = [statistics.fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    return {
        "what": "steps to reward 0.9",
        "algorithm": algorithm,
        "lag": lag,
        "seed": seed,
        "steps_to_goal": next((i + WINDOW for i, mean in enumerate(means) if mean >= GOAL), None),
        "reward_best5": round(max(means, default=0.0), 3),
        "reward_last5": round(means[-1], 3) if means else None,
        "steps": len(rewards),
        "ended": ended,
        "overrides": overrides,
        "cpu_s": round(time.process_time() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


async def train(config: Config) -> tuple[list[float], str]:
    """Mean reward of the groups that each step trained, and how it ended; over as soon as the goal is held."""
    tokenizer = load_tokenizer(config.model.path)
    sampling = sampling_of(config, tuple(stop_token_ids(tokenizer, config.model.path, ())), evaluation=False)
    prompts = load_prompts(config.data.train, "train", tokenizer, config.data).prompts
    source = PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=None)
    engine, reward = build_engine(config, seed=config.run.seed), build_reward(config.reward, extra_rules=demo_rules())
    learner = Learner(config, rank=0, world=1, device="cpu")
    waiting: deque[list[Group]] = deque()
    rewards: list[float] = []

    async def sample() -> Group:
        order, prompt = source.next() or (0, prompts[0])
        lease = Lease(
            lease_id=f"1.{order}.0",
            group_id=f"1.{order}",
            attempt=0,
            order=order,
            purpose="train",
            prompt=prompt,
            num_answers=config.algorithm.group_size,
            with_greedy=config.algorithm.advantage == "remax",
            sampling=sampling,
            seed=group_seed(config.run.seed, order, 0),
        )
        decode = decoder(tokenizer, keep_special=False)
        return await GroupUnderWay(lease, engine, reward, decode).generate("bench")

    await engine.start(WeightVersion(1, 0))
    try:
        for step in range(config.run.steps or 0):
            version = WeightVersion(1, step)
            await engine.load_weights([(info.name, tensor) for info, tensor in learner.weights()], version)
            for _ in range(config.buffer.max_lag + 1 if step == 0 else 1):
                waiting.append(list(await asyncio.gather(*(sample() for _ in range(config.buffer.prompts_per_step)))))
            groups = waiting.popleft()
            learner.step(groups, version)
            values = [r.score.value for g in groups for r in g.rollouts if r.score.value is not None]
            rewards.append(statistics.fmean(values))
            if len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= GOAL:
                return rewards, "goal"
    except TrainingError as error:
        return rewards, str(error)
    finally:
        await engine.close()
        await reward.close()
    return rewards, "steps"


if __name__ == "__main__":
    main()
