"""Whether a model that has learnt the task keeps it: evaluations over many steps, for several ways to make a step.

python -m benchmarks.stability --steps 500 --seeds 0 1 --ways root whole whole-no-entropy
python -m benchmarks.stability --task mixture --steps 300 --ways root whole

In one process (`one_process.py`), at the largest lag that quickstart allows. `demo` is the demo's task, which is solved
after some 40 steps; `mixture` has one prompt in ten that is two digits longer, solved much later than the others.
One JSON line a training.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import torch

from asyncgrpo.config.files import shipped
from asyncgrpo.config.load import load_config
from asyncgrpo.data.demo import TASKS, make_demo_model, write_demo_task
from benchmarks import one_process

WAYS: dict[str, tuple[list[str], float | None]] = {
    "root": ([], None),
    "from-a-quarter": (["learner.full_lr_signal=0.25"], None),
    "whole": (["learner.full_lr_signal=0"], None),
    "whole-no-entropy": (["learner.full_lr_signal=0", "algorithm.entropy_coef=0"], None),
    "whole-eps-1e-5": (["learner.full_lr_signal=0"], 1e-5),
}
"""Settings, and AdamW's epsilon, by name. `root` is the default: the learning rate falls with the root of the signal."""
EVAL_EVERY = 5
GOOD = 0.98
EASY, LONG = 90, 10
"""Long prompts among 100 of the mixture. Of both kinds 50 are held out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["root", "whole"])
    parser.add_argument("--task", choices=["demo", "mixture"], default="demo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--after", type=int, default=80, help="step from which evaluations are judged")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for way in arguments.ways:
            print(json.dumps(measure(way, arguments.task, seed, arguments.steps, arguments.after)), flush=True)


def measure(way: str, task: str, seed: int, steps: int, after: int) -> dict:
    """Measure one training."""
    settings, adam_eps = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo_model(folder / "model", seed=seed)
        if task == "demo":
            write_demo_task(folder / "train.jsonl", folder / "eval.jsonl", seed=seed)
        else:
            _write_mixture(folder, seed)
        config = load_config(
            shipped("quickstart"),
            [
                f"model.path={folder}/model",
                f"data.train={folder}/train.jsonl",
                f"data.eval={folder}/eval.jsonl",
                f"run.seed={seed}",
                f"run.steps={steps}",
                f"sampling.max_tokens={4 if task == 'demo' else 6}",
                "generators.engine=torch",
                *settings,
            ],
        )
        started = time.process_time()
        trained = asyncio.run(_all(one_process.train(config, eval_every=EVAL_EVERY, adam_eps=adam_eps)))
    judged = {step.number: step.evaluation for step in trained if step.number >= after and step.evaluation}
    means = [statistics.fmean(values) for values in judged.values()]
    return {
        "what": "evaluations after the task is learnt",
        "way": way,
        "task": task,
        "seed": seed,
        "steps": steps,
        "eval_min": round(min(means), 3),
        f"evals_below_{GOOD}": sum(mean < GOOD for mean in means),
        "evals": len(means),
        "eval_last": round(means[-1], 3),
        "eval_last_of_long": None if task == "demo" else round(statistics.fmean(list(judged.values())[-1][50:]), 3),
        "reward_mean": round(statistics.fmean(step.reward_mean for step in trained[after:]), 4),
        "signal_share": round(statistics.fmean(step.report.signal_share for step in trained[after:]), 3),
        "cpu_s": round(time.process_time() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


async def _all(steps) -> list[one_process.Step]:
    async with aclosing(steps):
        return [step async for step in steps]


def _write_mixture(folder: Path, seed: int) -> None:
    """Write the mixture: add one to each of three digits, or of five for one prompt in ten."""
    numbers = [f"{number:03d}" for number in random.Random(seed).sample(range(1000), 900)]
    is_long = [(n % 100) >= EASY if n < 800 else n >= 850 for n in range(900)]
    prompts = [number + number[: 2 * long] for number, long in zip(numbers, is_long, strict=True)]
    rows = [
        json.dumps({"prompt": p, "ground_truth": TASKS["increment"](p), "data_source": "demo_increment"}) + "\n"
        for p in prompts
    ]
    (folder / "train.jsonl").write_text("".join(rows[:800]))
    (folder / "eval.jsonl").write_text("".join(rows[800:]))


if __name__ == "__main__":
    main()
