"""What several turns teach: a calculator against no calculator, and a game whose replies must be read.

    python -m benchmarks.environments --steps 300

Models of the demo's kind with two layers learn on the CPU, with the torch engine:

- `product`: the answer to `37*8`, with a reward of 1 for the right one. The model is taught beforehand, with cross-entropy, what
  a base model has read: half of the rows write `37*8=` and repeat what they are told, half answer at once, with digits that
  are drawn. With `environment.name=calculator` it can learn to ask; without it has to know.
- `guess`: a number from 0 to 6 in three guesses, each answered with `<` or `>`, from random weights. Who does not read the
  replies finds three of seven numbers, a mean reward of at most 0.39; halving finds each in three guesses, which is 0.84.

Each row is a whole run, `asyncgrpo train`, with its audit.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.recording.events import read_events

REWARD = """
def compute_score(solution_str, ground_truth):
    return float(solution_str.rpartition("\\n")[2] == ground_truth)
"""
COMMON = ["generators.engine=torch", "generators.gpus_each=0", "model.dtype=float32", "run.epochs=null"]
COMMON += [
    "sampling.max_tokens=40",
    "data.max_prompt_tokens=32",
    "algorithm.group_size=32",
    "buffer.prompts_per_step=8",
]
COMMON += ["learner.lr=1e-3", "run.checkpoint_every=1000000"]
RUNS = {
    "product, no tool": ("taught", "product", ["reward.function=score.py"]),
    "product, calculator": ("taught", "product", ["reward.function=score.py", "environment.name=calculator"]),
    "guess": ("random", "guess", ["environment.name=guess", "environment.max_turns=3"]),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), arguments.seed)
        for name in arguments.only:
            print(json.dumps({"run": name} | train(Path(folder), name, arguments.steps, arguments.seed)), flush=True)


def prepare(folder: Path, seed: int) -> None:
    """The two models, the two tasks and the reward file."""
    for name in ("random", "taught"):
        make_demo_model(folder / name, seed=seed, layers=2, likely="0123456789*=")
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(2, 9)) for _ in range(2000)]
    rows = [{"prompt": f"{a}*{b}", "ground_truth": str(a * b), "data_source": "product"} for a, b in pairs]
    write(folder / "product.jsonl", rows)
    rows = [{"prompt": "0-6", "ground_truth": str(i % 7), "data_source": "guess", "extra_info": {"largest": 6}}
            for i in range(700)]  # fmt: skip
    write(folder / "guess.jsonl", rows)
    (folder / "score.py").write_text(REWARD)
    teach(folder / "taught", seed)


def teach(path: Path, seed: int, *, steps: int = 1500, rows: int = 64) -> None:
    """Teach the form of calls and of answers: next-token cross-entropy on rows whose answers are drawn at random."""
    tokenizer = load_tokenizer(str(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=2e-3), random.Random(seed)
    for _ in range(steps):
        texts = [_conversation(draw) for _ in range(rows)]
        ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = padded.masked_fill(padded == tokenizer.pad_token_id, -100)
        optimizer.zero_grad()
        model(input_ids=padded, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(path)


def _conversation(draw: random.Random) -> str:
    prompt, number = f"{draw.randint(10, 99)}*{draw.randint(2, 9)}", str(draw.randint(20, 891))
    asked = f"<assistant>{prompt}=<eos><user>{number}" if draw.random() < 0.5 else ""
    return f"<user>{prompt}{asked}<assistant>{number}<eos>"


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, name: str, steps: int, seed: int) -> dict[str, object]:
    """Run it, and read its curve: means of the steps before each tenth of the run."""
    model, task, settings = RUNS[name]
    out = folder / name.replace(", ", "-").replace(" ", "-")
    command = [sys.executable, "-m", "asyncgrpo", "train", f"model.path={model}", f"data.train={task}.jsonl", *COMMON]
    command += [*settings, f"run.out={out}", f"run.steps={steps}", f"run.seed={seed}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    audit = subprocess.run([sys.executable, "-m", "asyncgrpo", "audit", str(out)], stdout=subprocess.DEVNULL)
    events = list(read_events(out / "metrics.jsonl"))
    every = [event for event in events if event["event"] == "step"]
    rewards = [event["reward_mean"] for event in every]
    tenth = max(1, steps // 10)

    def curve(values: list[float]) -> list[float]:
        return [round(sum(values[end - tenth : end]) / tenth, 3) for end in range(tenth, steps + 1, tenth)]

    return {
        "steps": steps,
        "seed": seed,
        "reward": curve(rewards),
        "logprob_gap_max": max(event["logprob_gap_max"] or 0.0 for event in every),
        "seconds": round(events[-1]["time"] - every[0]["time"], 1),
        "audit": audit.returncode,
    }


if __name__ == "__main__":
    main()
