"""Small tasks that somebody would invent with the demo's model: does each learn, and if not, what would make it?

python -m benchmarks.small_tasks --tasks reverse parity --ways demo wide deep --seeds 0 1

In one process (`one_process.py`), from fixed seeds, with the largest lag that quickstart allows. A way changes the model,
a setting, the reward or the number of steps. One JSON line a training, with what the run itself would have warned of.
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
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.config.files import shipped
from asyncgrpo.config.load import load_config
from asyncgrpo.data.demo import TASKS, make_demo_model
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.learner.watch import TrainingWatch
from benchmarks import one_process


class Task(NamedTuple):
    """A task about a few digits."""

    answer: Callable[[str], str]
    """To a prompt."""
    digits: int = 3
    """Of a prompt."""
    marks: str = ""
    """One of these letters stands before the digits of each prompt, in turn: a mixture of tasks."""
    prompts: int = 800
    """To train on."""


SMALL: dict[str, Task] = {
    "copy": Task(TASKS["copy"]),
    "increment": Task(TASKS["increment"]),
    "reverse": Task(TASKS["reverse"]),
    "sort": Task(TASKS["sort"]),
    "first": Task(lambda digits: digits[0]),
    "largest": Task(max),
    "count": Task(lambda digits: str(sum(digit in "02468" for digit in digits))),
    "parity": Task(lambda digits: str(sum(map(int, digits)) % 2)),
    "add": Task(lambda digits: str(int(digits[:1]) + int(digits[1:]))),
    "first-sort": Task(lambda p: p[1] if p[0] == "f" else "".join(sorted(p[1:])), marks="fs", prompts=300),
    "first-count": Task(
        lambda p: p[1] if p[0] == "f" else str(sum(digit in "02468" for digit in p[1:])), marks="fc", prompts=300
    ),
}
"""`count`: how many digits are even. `parity`: whether their sum is odd. `add`: the first digit to the other two. Two names:
half of the prompts are of one task and half of the other."""

WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "demo": ({}, []),
    "exact": ({"reward": "exact_match"}, []),
    "curriculum": ({}, ["data.curriculum=success", "run.epochs=null"]),
    "exact-curriculum": ({"reward": "exact_match"}, ["data.curriculum=success", "run.epochs=null"]),
    "calm": ({"steps": 2}, ["learner.lr=2e-3"]),
    "calm-curriculum": ({"steps": 2}, ["learner.lr=2e-3", "data.curriculum=success", "run.epochs=null"]),
    "long": ({"steps": 3}, []),
    "wide": ({"hidden": 128}, ["learner.lr=2.5e-3"]),
    "deep": ({"layers": 2}, []),
    "deep-long": ({"layers": 2, "steps": 3}, []),
    "deep-slow-long": ({"layers": 2, "steps": 3}, ["learner.lr=2e-3"]),
    "slow": ({}, ["learner.lr=1e-3"]),
    "slow-long": ({"steps": 3}, ["learner.lr=2e-3"]),
    "fast": ({}, ["learner.lr=2e-2"]),
    "few": ({}, ["algorithm.group_size=4"]),
    "many": ({}, ["algorithm.group_size=64", "buffer.prompts_per_step=12"]),
    "no-entropy": ({}, ["algorithm.entropy_coef=0"]),
    "entropy": ({}, ["algorithm.entropy_coef=0.1"]),
    "lag-0": ({}, ["buffer.max_lag=0"]),
    "lag-16": ({}, ["buffer.max_lag=16"]),
    "cold": ({}, ["sampling.temperature=0.5"]),
    "kl": ({}, ["algorithm.kl_coef=0.05"]),
    "in-place": ({"reward": "in_place"}, []),
    "in-place-long": ({"reward": "in_place", "steps": 3}, []),
    "in-place-deep-long": ({"reward": "in_place", "layers": 2, "steps": 3}, []),
    "exact-long": ({"reward": "exact_match", "steps": 3}, []),
    "exact-few": ({"reward": "exact_match"}, ["algorithm.group_size=4"]),
    "exact-fast": ({"reward": "exact_match"}, ["learner.lr=2e-2"]),
    "exact-deep-long": ({"reward": "exact_match", "layers": 2, "steps": 3}, []),
    "exact-no-entropy": ({"reward": "exact_match"}, ["algorithm.entropy_coef=0"]),
}
"""The model, the reward and the steps as multiples of the demo's 80; and settings. The reward of a way counts parts of an
answer, `asyncgrpo.rewards.rules.demo_score`, unless it says `exact_match`: 1 for the whole answer, and 0; or `in_place`: the
share of characters that are right in their places."""
STEPS, EVAL_EVERY, TAUGHT = 80, 10, 800
IN_PLACE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return right / max(len(solution_str), len(ground_truth))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["demo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--events", type=Path, help="folder for the step events of each training")
    parser.add_argument("--taught", action="store_true", help="teach the answers instead: what the model can do at all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for way in arguments.ways:
            for task in arguments.tasks:
                found = (
                    measure_taught(task, way, seed) if arguments.taught else measure(task, way, seed, arguments.events)
                )
                print(json.dumps(found), flush=True)


def measure(task: str, way: str, seed: int, events_folder: Path | None = None) -> dict:
    """Measure one training."""
    how, settings = WAYS[way]
    steps = STEPS * how.get("steps", 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {key: how[key] for key in ("hidden", "layers") if key in how}
        make_demo_model(folder / "model", seed=seed, **model)
        answers = write_task(folder, SMALL[task], how.get("reward", "demo_copy"), seed)
        (folder / "reward.py").write_text(IN_PLACE)
        scored = [f"reward.function={folder}/reward.py"] if how.get("reward") == "in_place" else []
        config = load_config(
            shipped("quickstart"),
            [
                f"model.path={folder}/model",
                f"data.train={folder}/train.jsonl",
                f"data.eval={folder}/eval.jsonl",
                f"run.out={folder}/run",
                f"run.seed={seed}",
                f"run.steps={steps + 1}",  # the last evaluation is of the weights after `steps`
                "generators.engine=torch",
                *scored,
                *settings,
            ],
        )
        started = time.process_time()
        trained = asyncio.run(_all(one_process.train(config, eval_every=EVAL_EVERY)))
    evaluations = [step.evaluation for step in trained if step.evaluation]
    events = list(map(event_of, trained))
    if events_folder is not None:
        events_folder.mkdir(exist_ok=True)
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (events_folder / f"{task}-{way}-{seed}.jsonl").write_text(lines)
    return {
        "what": "a small task",
        "task": task,
        "way": way,
        "seed": seed,
        "steps": steps,
        "by_chance": round(max(map(answers.count, answers)) / len(answers), 2),
        "evals": [round(statistics.fmean(values), 3) for values in evaluations],
        "right": round(statistics.fmean(value >= 1.0 for value in evaluations[-1]), 3),
        "evals_by_mark": {
            mark: [round(statistics.fmean(values[i :: len(SMALL[task].marks)]), 3) for values in evaluations]
            for i, mark in enumerate(SMALL[task].marks)
        },
        "signal": round(1 - statistics.fmean(e["zero_signal_groups"] / sum(e["lags"].values()) for e in events), 3),
        "entropy_last": round(events[-1]["entropy"], 4),
        "no_signal_last": round(
            statistics.fmean(e["zero_signal_groups"] / sum(e["lags"].values()) for e in events[-10:]), 2
        ),
        "warnings": warnings_of(events),
        "cpu_s": round(time.process_time() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def measure_taught(task: str, way: str, seed: int) -> dict:
    """Whether the model of a way can do the task at all: the same prompts, taught with their answers (cross-entropy)."""
    how, lr = WAYS[way][0], 5e-3
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo_model(folder / "model", seed=seed, **{key: how[key] for key in ("hidden", "layers") if key in how})
        write_task(folder, SMALL[task], "demo_copy", seed)
        tokenizer, model = load_tokenizer(str(folder / "model")), AutoModelForCausalLM.from_pretrained(folder / "model")
        train, held_out = (_taught_rows(folder / f"{split}.jsonl", tokenizer) for split in ("train", "eval"))
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95)), random.Random(seed)
    for update in range(TAUGHT):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (update + 1) / 20, 2 * (1 - update / TAUGHT))
        ids, labels = _padded(draw.sample(train, 128))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ids, labels = _padded(held_out)
    with torch.no_grad():
        said = model(input_ids=ids).logits[:, :-1].argmax(-1)
    is_right = ((said == labels[:, 1:]) | (labels[:, 1:] == -100)).all(-1)
    return {
        "what": "a small task, taught",
        "task": task,
        "way": way,
        "seed": seed,
        "updates": TAUGHT,
        "right": round(is_right.double().mean().item(), 3),
        "cpu_s": round(time.process_time() - started, 1),
    }


def _taught_rows(path: Path, tokenizer: Any) -> list[tuple[list[int], int]]:
    """Token ids of prompt, answer and end, and how many of them are the prompt."""
    rows = []
    for row in map(json.loads, path.read_text().splitlines()):
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids, answer = tokenizer(prompt).input_ids, tokenizer(row["ground_truth"]).input_ids
        rows.append(([*prompt_ids, *answer, tokenizer.eos_token_id], len(prompt_ids)))
    return rows


def _padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, L] token ids and labels; what is no answer has the label -100."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([[-100] * n + ids[n:] + [-100] * (longest - len(ids)) for ids, n in rows])
    return ids, labels


def write_task(folder: Path, task: Task, source: str, seed: int) -> list[str]:
    """Write the prompts to train and 100 held out, and return the answers."""
    drawn = random.Random(seed).sample(range(10**task.digits), task.prompts + 100)
    marks = task.marks or ("",)
    numbers = [f"{marks[i % len(marks)]}{number:0{task.digits}d}" for i, number in enumerate(drawn)]
    rows = [json.dumps({"prompt": p, "ground_truth": task.answer(p), "data_source": source}) + "\n" for p in numbers]
    (folder / "train.jsonl").write_text("".join(rows[: task.prompts]))
    (folder / "eval.jsonl").write_text("".join(rows[task.prompts :]))
    return list(map(task.answer, numbers))


def event_of(step: one_process.Step) -> dict[str, Any]:
    """The fields of a `step` event that warnings are made of."""
    report = step.report
    rewards = [r.score.value for group in step.groups for r in group.rollouts if r.score.value is not None]
    return {
        "event": "step",
        "step": step.number + 1,
        "reward_mean": step.reward_mean,
        "reward_max": max(rewards),
        "zero_signal_groups": report.zero_signal_groups,
        "lags": {"0": len(step.groups)},
        "entropy": report.entropy,
        "clip_ratio": report.clip_ratio,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "signal_share": report.signal_share,
        "diagnostics": report.diagnostics,
        "skipped": report.skipped,
    }


def warnings_of(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """What a run with these events would have warned of: after which step, and about what."""
    watch = TrainingWatch()
    seen = [(event["step"], watch.see(event)) for event in events]
    return [(step, warning[0]) for step, warning in seen if warning is not None]


async def _all(steps) -> list[one_process.Step]:
    async with aclosing(steps):
        return [step async for step in steps]


if __name__ == "__main__":
    main()
