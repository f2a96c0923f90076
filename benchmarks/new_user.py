"""Nine runs of a new user: three tasks in three file formats, each killed and resumed after one change.

    python -m benchmarks.new_user                 all nine, a JSON line each and a summary
    python -m benchmarks.new_user --only evens    the runs of one task, format or change

A task consists of files alone: prompts, and a reward function as a person would write it. Each run is `asyncgrpo
train` with a small random model on the CPU; its driver is killed at a random step, as a full memory would; then the
same command runs again with one change. A change that is refused is taken back, and the run goes on.
"""

import argparse
import itertools
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncgrpo.data.demo import make_demo_model
from benchmarks.measuring import show, where
from benchmarks.trials import Ended, Fence, audited, events, last_step, rewards

STEPS = 60
START_WITHIN_S = 240.0
TOLD = ("changed", "going on", "error", "warning", "note", "no effect", "starting again")

IN_PLACE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    size = max(len(solution_str), len(ground_truth), 1)
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    found = sum(solution_str.count(c) > 0 for c in set(ground_truth)) / len(set(ground_truth))
    return {"score": 0.7 * right / size + 0.3 * found, "exact": float(solution_str == ground_truth)}
"""
EVENS = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As many even digits as the right answer says, and nothing else."""
    wanted = int(ground_truth)
    return sum(c in "02468" for c in solution_str[:wanted]) / max(wanted, len(solution_str))
'''


@dataclass(frozen=True)
class Task:
    """A task, and how its completions are scored."""

    name: str
    answer: Callable[[str], str]
    reward: str
    """The text of the reward file."""

    def rows(self, seed: int, count: int) -> list[tuple[str, str]]:
        """Prompts of three digits with their right answers."""
        prompts = random.Random(f"{self.name} {seed}").sample(range(1000), count)
        return [(f"{prompt:03d}", self.answer(f"{prompt:03d}")) for prompt in prompts]


TASKS = [
    Task("complement", lambda digits: "".join(str(9 - int(digit)) for digit in digits), IN_PLACE),
    Task("first", lambda digits: digits[0] * 3, IN_PLACE),
    Task("evens", lambda digits: "3", EVENS),
]


def as_seeds(task: Task, prompt: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """A plain object."""
    return {"prompt": prompt, "ground_truth": answer, "data_source": task.name}


def as_trl(task: Task, prompt: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """A conversation as in TRL, with the ground truth in a column of its own."""
    return {"prompt": [{"role": "user", "content": prompt}], "solution": answer}


def as_verl(task: Task, prompt: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """A row as verl's examples of data preprocessing write it."""
    return {
        "data_source": task.name,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "digits",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def write(folder: Path, split: str, kind: str, rows: list[dict[str, Any]]) -> None:
    """Write a file of rows as the users of this format have it."""
    path = folder / f"{split}{FORMATS[kind][1]}"
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)


FORMATS = {"seeds": (as_seeds, ".json"), "trl": (as_trl, ".jsonl"), "verl": (as_verl, ".parquet")}


@dataclass(frozen=True)
class Change:
    """What changes before the command runs again."""

    name: str
    flags: dict[str, str]
    do: Callable[[Path], object] = lambda folder: None
    """Changes the files; `undo` takes it back."""
    undo: Callable[[Path], object] = lambda folder: None


def _edit_reward(folder: Path) -> None:
    path = folder / "reward.py"
    path.write_text(path.read_text() + "\n# the same, said otherwise\n")


def _swap_data(folder: Path) -> None:
    """Put other rows into the same file."""
    for path in folder.glob("train.*"):
        other = folder / f"other{path.suffix}"
        kept = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(kept)


CHANGES = [
    Change("learning rate", {"--lr": "2e-3"}),
    Change("steps", {"--steps": str(STEPS + 10)}),
    Change("rollout-n", {"--rollout-n": "8"}),
    Change("evaluation", {"run.eval_every": "3"}),
    Change("text of the reward", {}, _edit_reward),
    Change("model", {"--model": "./other_model"}),
    Change("rows of the data", {}, _swap_data, _swap_data),
    Change("max-lag", {"--max-lag": "1"}),
    Change("algorithm", {"--algorithm": "dr_grpo"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a task's, a format's or a change's name")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = []
    with Fence() as fence:
        for (task, kind), change in zip(itertools.product(TASKS, FORMATS), CHANGES, strict=True):
            if options.only in f"{task.name} {kind} {change.name}":
                found.append(trial(fence, task, kind, change, options.seed))
                show(found[-1])
    totals = {
        "runs": len(found),
        "ended_well": sum(one["exit_at_end"] == 0 for one in found),
        "audited_without_difference": sum(not one["audit_differences"] for one in found),
        "left_nothing_at_the_end": sum(not any(one["left_at_the_end"].values()) for one in found),
        "silent_about_the_change": [one["changed"] for one in found if not one["says_the_change"]],
    }
    show({"benchmark": "new user"} | totals | where())


def trial(fence: Fence, task: Task, kind: str, change: Change, seed: int) -> dict[str, Any]:
    """Make one run: start it, kill it, and resume it with the change, or without where the change is refused."""
    began = time.monotonic()
    folder = fence.work / f"{task.name}-{kind}"
    make(folder, task, kind, seed)
    rng = random.Random(f"{task.name} {kind} {seed}")
    kill_at = rng.randrange(6, STEPS - 15)
    killed = kill(fence, folder, command(folder), kill_at)
    after_kill = fence.left(clear=False)  # the next start may clear it away, and nobody else does
    change.do(folder)
    resumed = again = fence.run(*command(folder, change.flags), cwd=folder)
    if resumed.exit != 0:
        change.undo(folder)
        again = fence.run(*command(folder), cwd=folder)
    found = audited(fence, folder / "run")
    said = told(resumed)
    return {
        "benchmark": "new user",
        "task": task.name,
        "format": kind,
        "killed_at_step": killed,
        "left_by_the_kill": after_kill,
        "changed": change.name,
        "exit_of_the_resume": resumed.exit,
        "said": said,
        "says_the_change": resumed.exit != 0 or any("changed" in line or "effect" in line for line in said),
        "traceback": resumed.has_traceback or again.has_traceback,
        "exit_at_end": again.exit,
        "steps": last_step(folder / "run"),
        "events": sorted({e["event"] for e in events(folder / "run")}),
        "reward": rewards(folder / "run"),
        "audit_differences": found["differences"],
        "left_at_the_end": fence.left(),
        "seconds": round(time.monotonic() - began),
    }


def make(folder: Path, task: Task, kind: str, seed: int) -> None:
    """Write the files of a new user."""
    folder.mkdir()
    make_demo_model(folder / "model", seed=seed)
    make_demo_model(folder / "other_model", seed=seed + 1)
    rows = task.rows(seed, 500)
    for name, part in (("train", rows[:400]), ("eval", rows[400:420]), ("other", rows[100:])):
        write(folder, name, kind, [FORMATS[kind][0](task, *row, name, index) for index, row in enumerate(part)])
    (folder / "reward.py").write_text(task.reward)


def command(folder: Path, flags: dict[str, str] | None = None) -> list[str]:
    """The command as it is typed, with some flags or keys changed."""
    train, held_out = (next(folder.glob(f"{name}.*")).name for name in ("train", "eval"))
    typed = {"--model": "./model", "--data": train, "--eval-data": held_out, "--reward-func": "reward.py"}
    typed |= {"--n-gpus": "0", "--engine": "torch", "--steps": str(STEPS), "--out": "run", "--rollout-n": "16"}
    typed |= {"--lr": "5e-3", "--max-lag": "2", "data.max_prompt_tokens": "32", "sampling.max_tokens": "4"}
    typed |= {"buffer.prompts_per_step": "32", "run.checkpoint_every": "5", "run.eval_every": "20"}
    typed |= flags or {}
    options = [part for key, value in typed.items() if key.startswith("--") for part in (key, value)]
    return ["train", *options, *(f"{key}={value}" for key, value in typed.items() if not key.startswith("--"))]


def kill(fence: Fence, folder: Path, arguments: list[str], step: int) -> int | str:
    """Start a run and kill its driver at this step or soon after. Returns the last step it told, or how it ended before."""
    process = fence.start(*arguments, cwd=folder)
    deadline = time.monotonic() + START_WITHIN_S
    while last_step(folder / "run") < step:
        if process.poll() is not None or time.monotonic() > deadline:
            fence.kill_all()
            return f"exit {process.wait()} before step {step}: {fence.output().strip()[-300:]}"
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return last_step(folder / "run")


def told(ended: Ended) -> list[str]:
    """The lines that a resume prints about itself and its changes."""
    return [line[:300] for line in ended.text.splitlines() if line.lower().startswith(TOLD)]


if __name__ == "__main__":
    main()
