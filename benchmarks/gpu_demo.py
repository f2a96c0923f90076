"""The whole system on one card that learner and generator share: `asyncgrpo demo` with the torch engine, read and audited.

    python -m benchmarks.gpu_demo                     the demo's small model in bfloat16: does it learn, is all proved
    python -m benchmarks.gpu_demo --shape 0.6b        a random model of Qwen3-0.6B's shape: memory and seconds of 5 steps

Needs ray. The second one rewards at random, because random weights give no completion that any rule would reward.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring import device_parser, rounded, show, where
from benchmarks.trials import Fence, events

SEED = 0
SHARED = (
    "cluster.share_gpu=true",
    "generators.count=1",
    "generators.gpus_each=1",
    "generators.memory_fraction=0.35",
    "learner.ranks=1",
    "learner.device=cuda",
    "model.dtype=bfloat16",  # so that attention is that of a real run
)
LARGE = (
    "sampling.max_tokens=256",
    "algorithm.group_size=8",
    "buffer.prompts_per_step=16",
    "learner.tokens_per_microbatch=8192",
    "learner.activation_checkpointing=true",
    "learner.lr=1e-6",
)
RANDOM_REWARD = "import random\n\n\ndef compute_score(completion):\n    return random.random()\n"


def main(argv: list[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--shape", help="none: the demo's own model")
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        raise SystemExit("skipped: ray is not installed (python -m benchmarks.gpu_day install)")
    steps = arguments.steps or (2 if arguments.tiny else 5 if arguments.shape else 60)
    settings = list(SHARED) if arguments.device == "cuda" else ["generators.count=1", "learner.ranks=1"]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if arguments.shape:
            settings += [*LARGE, f"reward.function={_prepare(folder, arguments.shape, arguments.device)}"]
        about = {"shape": arguments.shape or "the demo's"} | branch(settings, arguments.device)
        show(run(folder, steps, settings) | about | where())


def branch(settings: list[str], device: str) -> dict[str, str]:
    """The dtype of the run, and the attention kernel that its learner chooses."""
    import torch

    from asyncgrpo.learner.model import choose_kernel

    dtype = "bfloat16" if "model.dtype=bfloat16" in settings else "float32"
    return {"dtype": dtype, "kernel": choose_kernel(torch.device(device), getattr(torch, dtype))}


def run(folder: Path, steps: int, settings: list[str]) -> dict[str, Any]:
    """The line of one run, with its audit. Exits with the run's last words if it failed."""
    command = ["demo", "--engine", "torch", "--out", str(folder), "--steps", str(steps), "--seed", str(SEED), *settings]
    with Fence() as fence:
        with CardMemory() as memory:
            ended = fence.run(*command)
        print(ended.out)
        print(ended.err, file=sys.stderr)
        if ended.exit:
            raise SystemExit(f"the demo ended with {ended.exit}: {' '.join(ended.err.split())[-250:]}")
        audit = fence.run("audit", str(folder))
        print(audit.out)
    found = {"what": "demo on one card", "run_s": rounded(ended.seconds), "peak_card_gib": memory.peak_gib()}
    return found | figures(folder / "metrics.jsonl") | {"audit_exit": audit.exit}


def figures(metrics: Path) -> dict[str, Any]:
    """What the events of a run come to."""
    happened = events(metrics.parent)
    steps, syncs = ([one for one in happened if one["event"] == kind] for kind in ("step", "sync"))
    rewards, times = [one["reward_mean"] for one in steps], [one["time"] for one in steps]
    ends = max(1, len(rewards) // 10)
    between = [later - earlier for earlier, later in pairwise(times)] or [0.0]
    publications = [one["ms"] for one in syncs[1:]] or [0.0]
    phases = sorted({name for one in steps for name in one["seconds"]})
    return {
        "steps": len(steps),
        "reward_first": rounded(statistics.mean(rewards[:ends])),
        "reward_last": rounded(statistics.mean(rewards[-ends:])),
        "step_s": rounded(statistics.median(between)),
        "phases": {name: rounded(statistics.median(one["seconds"].get(name, 0) for one in steps)) for name in phases},
        "publications": len(syncs),
        "proved": sum(one["checksum"] == "ok" and one["engines"] == 1 for one in syncs),
        "publication_ms": rounded(statistics.median(publications)),
        "publication_bytes": syncs[-1].get("bytes"),
        "logprob_gap_mean": rounded(max(one.get("logprob_gap_mean") or 0.0 for one in steps)),
        "restarts": sum(one["event"] == "restart" for one in happened),
        "ended": happened[-1].get("status"),
    }


def _prepare(folder: Path, shape: str, device: str) -> Path:
    """Make the run's folder as `asyncgrpo demo` does, but with a larger model; the file of its reward."""
    from asyncgrpo.data.demo import make_demo_model, write_demo_task
    from benchmarks.shapes import SHAPES, qwen3, write_model

    data = folder / "data"
    data.mkdir(parents=True)
    make_demo_model(folder / "model", seed=SEED)  # for its tokenizer
    special = json.loads((folder / "model" / "config.json").read_text())
    ends = {name: special[name] for name in ("eos_token_id", "pad_token_id")}
    write_model(folder / "model", qwen3(SHAPES[shape], **ends), device=device, seed=SEED)
    write_demo_task(data / "train.jsonl", data / "eval.jsonl", seed=SEED)
    reward = folder / "random_reward.py"
    reward.write_text(RANDOM_REWARD)
    return reward


class CardMemory:
    """The largest memory in use on the card inside the block, of all processes together, as nvidia-smi says it."""

    def __enter__(self) -> "CardMemory":
        self._peak_mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak_gib(self) -> float | None:
        """None where there is no nvidia-smi."""
        return rounded(self._peak_mib / 1024) if self._peak_mib else None

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(0.5):
            try:
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            self._peak_mib = max(self._peak_mib, *map(float, said.split()))


if __name__ == "__main__":
    main()
