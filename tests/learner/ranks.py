"""Runs a function on several real ranks: processes with a gloo group, as the learner has them where there is no GPU.

`python -m tests.learner.ranks RANK WORLD STORE MODULE:FUNCTION ARGUMENT` is one of them.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def run_on_ranks(world: int, function: Callable[[int, int, str], None], argument: str, timeout_s: float = 120) -> None:
    """Call `function(rank, world, argument)` on every rank; raises with the output of a rank that fails."""
    name = f"{function.__module__}:{function.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.learner.ranks"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), f"{folder}/store", name, argument],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output


def main() -> None:
    import torch.distributed as dist

    rank, world, store, name, argument = sys.argv[1:]
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    module, function = name.split(":")
    getattr(importlib.import_module(module), function)(int(rank), int(world), argument)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
