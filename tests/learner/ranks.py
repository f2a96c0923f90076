"""Runs a function on several real ranks: processes with a gloo group, as the learner has them where there is no GPU.

`python -m tests.learner.ranks` imports the learner and then forks a process for each line that it reads, which forks the
ranks. So what takes longest, importing torch and transformers, is done once for all tests of a worker.
"""

import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

FORK = multiprocessing.get_context("fork")


def run_on_ranks(
    function: Callable[[int, int, str], None], argument: str, *worlds: int, timeout_s: float = 600
) -> None:
    """Call `function(rank, world, argument)` on every rank of each world, one world after the other.

    Raises with what was printed if a rank fails.
    """
    importer = start_importer()
    assert importer.stdin is not None and importer.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        name = f"{function.__module__}:{function.__name__}"
        importer.stdin.write(json.dumps([dict(os.environ), folder, name, argument, worlds]) + "\n")
        importer.stdin.flush()
        if not select.select([importer.stdout], [], [], timeout_s)[0]:
            os.killpg(importer.pid, signal.SIGKILL)
        code = importer.stdout.readline()
        if not code:  # it is killed, here or elsewhere
            start_importer.cache_clear()
        assert code == "0\n", Path(folder, "output").read_text() or f"no end within {timeout_s:.0f} s"


@cache
def start_importer() -> "subprocess.Popen[str]":
    """The process that has imported the learner. It ends with this one, which closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.learner.ranks"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def main() -> None:
    importlib.import_module("asyncgrpo.learner.learner")
    for line in sys.stdin:
        process = FORK.Process(target=run_worlds, args=json.loads(line))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


def run_worlds(environment: dict[str, str], folder: str, name: str, argument: str, worlds: list[int]) -> None:
    """What is printed goes to the file `output` in `folder`."""
    output = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    module, function = name.split(":")
    call = getattr(importlib.import_module(module), function)
    for world in worlds:
        run_world(world, f"{folder}/{world}", call, argument)


def run_world(world: int, store: str, call: Callable[[int, int, str], None], argument: str) -> None:
    """Exits with an error as soon as one rank fails; the others, which wait for it, are ended."""
    ranks = [FORK.Process(target=one_rank, args=(rank, world, store, call, argument)) for rank in range(world)]
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
