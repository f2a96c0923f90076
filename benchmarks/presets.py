"""Which algorithms learn the demo's task, and at which lag: steps to a mean reward of 0.9. One JSON line a run.

python -m benchmarks.presets --algorithms grpo gspo --lags 0 4 8 --seeds 0
python -m benchmarks.presets --algorithms tis --lags 1 2 4 8 16 algorithm.entropy_coef=0.02 algorithm.anchor=interpolated

`share_seen` is the effective sample share by which `buffer.max_lag=auto` would decide, `share_true` that of a forward pass of
its own before the step; both are means over the steps whose groups have the whole lag, `share_error` is the largest difference.
The same model and task as `asyncgrpo demo --algorithm`, in one process (`one_process.py`).
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import torch

from asyncgrpo.config.files import algorithm_names, shipped
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.errors import TrainingError
from benchmarks import one_process

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
    """Measure one run."""
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
        rewards, shares, ended = asyncio.run(train(config))
    seen, true = zip(*shares[lag:], strict=True) if len(shares) > lag else ((), ())
    means = [statistics.fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    return {
        "what": "steps to reward 0.9",
        "algorithm": algorithm,
        "lag": lag,
        "seed": seed,
        "steps_to_goal": next((i + WINDOW for i, mean in enumerate(means) if mean >= GOAL), None),
        "reward_best5": round(max(means, default=0.0), 3),
        "reward_last5": round(means[-1], 3) if means else None,
        "share_seen": round(statistics.fmean(seen), 4) if seen else None,
        "share_true": round(statistics.fmean(true), 4) if seen else None,
        "share_error": max((round(abs(a - b), 7) for a, b in zip(seen, true, strict=True)), default=None),
        "steps": len(rewards),
        "ended": ended,
        "overrides": overrides,
        "cpu_s": round(time.process_time() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


async def train(config: Config) -> tuple[list[float], list[tuple[float, float]], str]:
    """The mean reward and both sample shares of each step, and how training ended. It ends once the goal is held."""
    rewards: list[float] = []
    shares: list[tuple[float, float]] = []
    try:
        async with aclosing(one_process.train(config, with_share=True)) as steps:
            async for step in steps:
                rewards.append(step.reward_mean)
                assert step.sample_share is not None
                within = step.report.shares_within
                shares.append((within[max(within)] if within else 1.0, step.sample_share))
                if len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= GOAL:
                    return rewards, shares, "goal"
    except TrainingError as error:
        return rewards, shares, str(error)
    return rewards, shares, "steps"


if __name__ == "__main__":
    main()
