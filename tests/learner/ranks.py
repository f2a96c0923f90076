"""Runs a function on several real ranks: processes with a gloo group, as the learner has them where there is no GPU.

`python -m tests.learner.ranks STORES MODULE:FUNCTION ARGUMENT WORLD...` imports the function once and forks the ranks,
so what takes longest, importing torch and transformers, is done once for all of them.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path


def run_on_ranks(
    function: Callable[[int, int, str], None], argument: str, *worlds: int, timeout_s: float = 240
) -> None:
    """Call `function(rank, world, argument)` on every rank of each world, one world after the other.

    Raises with what was printed if a rank fails.
    """
    with tempfile.TemporaryDirectory() as stores:
        process = subprocess.run(
            [
                *(sys.executable, "-m", "tests.learner.ranks", stores),
                *(f"{function.__module__}:{function.__name__}", argument, *map(str, worlds)),
            ],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    assert process.returncode == 0, process.stdout


def main() -> None:
    stores, name, argument, *worlds = sys.argv[1:]
    module, function = name.split(":")
    call = getattr(importlib.import_module(module), function)
    for world in map(int, worlds):
        run_world(world, f"{stores}/{world}", call, argument)


def run_world(world: int, store: str, call: Callable[[int, int, str], None], argument: str) -> None:
    """Exits with an error as soon as one rank fails; the others, which wait for it, are ended."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, world, store, call, argument)) for rank in range(world)]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                for other in running.values():
                    other.kill()
                sys.exit(f"rank {ranks.index(process)} of {world} ended with {process.exitcode}")


def one_rank(rank: int, world: int, store: str, call: Callable[[int, int, str], None], argument: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    call(rank, world, argument)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
