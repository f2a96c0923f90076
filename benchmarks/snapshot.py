"""What a publication's snapshot costs several learner ranks on one machine: rows into one arena, and a gather, in turns.

`python -m benchmarks.snapshot --model s25m --ranks 2` prints one JSON line. Seconds are of the slowest rank, medians over the
rounds; a copy is that of a rank's shard, cast, into memory that is there. With `--apart` the last rank cannot map the arena, as
on another machine, and sends its rows (here through loopback), in turns as a delta and whole: `arrived` is when the last are
there, which no rank waits for. `--changed` of all elements change before each. Gloo on a CPU, where a gather is slow: the ratio
to the copy carries over to GPUs, that to the gather does not.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.config.schema import Config
from asyncgrpo.learner import snapshot
from asyncgrpo.learner.learner import Learner
from asyncgrpo.weights.arena import Arenas, Layout
from benchmarks.cells import MODELS, make_model
from benchmarks.measuring import show, where
from tests.learner.ranks import run_on_ranks


def copy_of_shard(learner: Learner, target: Tensor) -> float:
    started, at = time.perf_counter(), 0
    for parameter in learner.parameters:
        rows = parameter.to_local()  # type: ignore[attr-defined]
        target[at : at + rows.numel()].copy_(rows.detach().view(-1))
        at += rows.numel()
    return time.perf_counter() - started


def change(learner: Learner, share: float) -> None:
    """As a step would: random elements, by more than bfloat16 rounds away."""
    with torch.no_grad():
        for parameter in learner.parameters:
            rows = parameter.to_local().view(-1)  # type: ignore[attr-defined]
            rows[torch.randint(0, max(1, rows.numel()), (int(share * rows.numel()),))] *= 1.02


def slowest(seconds: float) -> float:
    most = torch.tensor(seconds)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def rank(number: int, world: int, argument: str) -> None:
    path, rounds, changed, is_apart = argument.rsplit(" ", 3)
    torch.set_num_threads(1)
    if is_apart == "True":
        snapshot.same_machine = lambda: f"machine {number == world - 1}"
    settings = msgspec.convert(
        {"model": {"path": path}, "data": {"train": "none"}, "learner": {"device": "cpu"}}, Config
    )
    learner = Learner(settings, rank=number, world=world, device="cpu")
    layout = Layout(learner.layout())
    arenas = Arenas(layout) if number == 0 else None
    file = [arenas.file if arenas is not None else ""]
    dist.broadcast_object_list(file)
    target = torch.zeros(sum(p.to_local().numel() for p in learner.parameters), dtype=torch.bfloat16)  # type: ignore[attr-defined]
    ways = {"rows": file[0], "whole rows": file[0], "gather": ""}
    if is_apart != "True":
        del ways["whole rows"]
    spent: dict[str, list[float]] = defaultdict(list)
    came: dict[str, list[int]] = defaultdict(list)
    for _ in range(int(rounds) + 2):
        for way, used in ways.items():
            change(learner, float(changed) if used else 0.0)
            if learner.snapshot._sender is not None:
                learner.snapshot._sender._deltas = way == "rows"
            dist.barrier()
            started = time.perf_counter()
            if arenas is None:
                learner.snapshot.join(used, 0)
            else:
                is_written = learner.snapshot.write(arenas.slots[0], used)
            spent[way].append(slowest(time.perf_counter() - started))
            if arenas is not None:
                snapshot.wait_until(is_written)
            if used:
                spent[f"{way} arrived"].append(slowest(time.perf_counter() - started))
                for receiver in learner.snapshot._receivers:
                    came[way].append(receiver.came_bytes)
        dist.barrier()
        spent["copy"].append(slowest(copy_of_shard(learner, target)))
    if arenas is not None:
        arenas.close()
        seconds = {way: round(statistics.median(each[2:]), 5) for way, each in spent.items()}
        figures = {f"{way}, x a copy": round(s / seconds["copy"], 2) for way, s in seconds.items() if way != "copy"}
        figures |= {f"{way}, MB": round(statistics.median(sizes) / 1e6, 2) for way, sizes in came.items()}
        about = {"what": "snapshot", "ranks": world, "mb": round(layout.num_bytes / 1e6), "changed": float(changed)}
        Path(path, "measured.json").write_text(json.dumps(about | seconds | figures | where()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=list(MODELS), default="s25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="the last rank is on another machine, as far as it knows")
    parser.add_argument("--changed", type=float, default=0.015, help="share of the elements in a round (default 0.015)")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), arguments.model)
        from benchmarks.snapshot import rank as on_a_rank  # by the name under which the ranks find it

        run_on_ranks(on_a_rank, f"{path} {arguments.rounds} {arguments.changed} {arguments.apart}", arguments.ranks)
        show(json.loads((path / "measured.json").read_text()))


if __name__ == "__main__":
    main()
