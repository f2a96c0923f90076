"""One publication against one flat broadcast of the same bytes: CPU seconds, the learner's stall, the engine's pause.

    python -m benchmarks.weights_speed --models s25m s100m s500m --engines 1 2 --ranks 1

The learner's side is the real learner, whose float32 weights are cast to bfloat16, and the real publisher; each engine is a
process with the real receiver, whose swap copies every tensor into its place and takes a checksum of all of them. Beside it, in
turns, gloo broadcasts a flat buffer of as many bytes to as many processes, with nothing else done. CPU seconds are those of all
processes. `mapped`: engines on the learner's machine load out of its memory; `broadcast`: gloo brings the bytes; `delta`: 1 % of
the elements change from one version to the next, and only they are sent. The stall is that of rank 0 against a copy of its rows,
made alone and while the other rank copies its own.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncgrpo.cluster.wiring import joined_ranks
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.engines.torch.engine import replace_tensors
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, IsWritten
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.group import GlooGroup
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from benchmarks.cells import MODELS, make_model
from benchmarks.measuring import show, where
from tests.learner.helpers import config
from tests.weights.publishing import HOST, land

LANES = ("mapped", "broadcast", "delta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["s25m", "s100m"], choices=MODELS)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lanes", nargs="+", default=list(LANES), choices=LANES)
    parser.add_argument("--ranks", type=int, default=1, choices=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            path = make_model(Path(folder), model)
            for engines in arguments.engines:
                for lane in arguments.lanes:
                    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
                    others = [(path, store.port, lane)] * (arguments.ranks - 1)
                    with spawned(follow, others) as ranks, joined_ranks(store, 0, arguments.ranks, "cpu", 600.0):
                        learner = learner_of(path, 0, arguments.ranks)
                        show({"model": model} | measure(learner, ranks, engines, lane, arguments.rounds))


def learner_of(path: str, rank: int, world: int) -> Learner:
    return Learner(config(path, model={"dtype": "bfloat16"}), rank=rank, world=world, device="cpu")


def follow(path: str, port: int, lane: str) -> None:
    """Be rank 1 of 2."""
    torch.set_num_threads(1)
    with joined_ranks(dist.TCPStore(HOST, port, is_master=False), 1, 2, "cpu", 600.0):
        learner = learner_of(path, 1, 2)
        masters = [local(parameter) for parameter in learner.model.parameters()]
        learner.snapshot.connect(told(), HOST, None)
        while True:
            place = told()
            if place is None:
                one_copy(masters)
                continue
            for master in masters:
                change(master, lane)
            learner.snapshot.join(*place)


def told(command: Any = None) -> Any:
    """Return what rank 0 tells. Collective."""
    box = [command]
    dist.broadcast_object_list(box)
    return box[0]


def measure(learner: Learner, ranks: list[psutil.Process], engines: int, lane: str, rounds: int) -> dict[str, Any]:
    """Of `rounds` publications, each beside a broadcast: medians."""
    layout = learner.layout()
    masters = [local(parameter) for parameter in learner.model.parameters()]
    settings, maps = WeightsConfig(timeout_s=120.0, deltas=lane == "delta"), lane == "mapped"
    publisher = Publisher(settings, maps=maps, backend="gloo", bind=HOST, host=HOST, keys=None)

    def fill(arenas: Arenas, slot: int) -> IsWritten | None:
        told((arenas.file, slot))
        started = time.perf_counter()
        written = learner.snapshot.write(arenas, slot)
        stalls.append(time.perf_counter() - started)
        return written

    publisher.start(layout, others=learner.snapshot.streams)
    told(publisher.endpoint)
    num_bytes = publisher._layout.num_bytes
    with (
        receivers(publisher.endpoint, layout, engines) as (processes, pauses),
        broadcasts(engines, num_bytes) as raw,
    ):
        processes += ranks
        publisher.wait_for(lambda: engines, 120.0, lambda what, seconds: None)
        found, stalls = [], []
        for version in range(rounds + 2):
            for master in masters:
                change(master, lane)
            began, at = cpu_s(processes), time.perf_counter()
            publication = land(publisher, PolicyVersion(1, version), fill)
            seconds, ours = time.perf_counter() - at, cpu_s(processes) - began
            alone_s = one_copy(masters)
            told()
            found.append((ours, seconds, stalls.pop(), alone_s, one_copy(masters), *raw()))
        pause = max(statistics.median(engine[2:]) for engine in pauses)
    publisher.close()
    # The first ones make what is made once.
    ours, seconds, stall, copy, together, theirs, their_s = np.array(found[2:]).T
    return {
        "parameters_m": round(sum(master.numel() for master in masters) / 1e6),
        "engines": engines,
        "ranks": 1 + len(ranks),
        "lane": lane,
        "mb": round(num_bytes / 1e6),
        "sent_mb": round(publication.sent_bytes / 1e6, 1),
        "cpu_s": middle(ours, 4),
        "broadcast_cpu_s": middle(theirs, 4),
        "broadcast_to_publication_cpu": middle(theirs / ours),
        "spread": [round(min(theirs / ours), 2), round(max(theirs / ours), 2)],
        "seconds": middle(seconds, 4),
        "broadcast_s": middle(their_s, 4),
        "stall_to_copy": middle(stall / copy),
        "stall_to_copies": middle(stall / together),
        "stall_s": middle(stall, 4),
        "pause_s": round(pause, 4),
        "pause_to_copy": middle(pause / copy),
        "seed": 0,
    } | where()


def middle(values: np.ndarray, digits: int = 2) -> float:
    return round(float(np.median(values)), digits)


def change(master: Tensor, lane: str) -> None:
    """Some other weights: in 1 % of the places that bfloat16 sees, or all of them in float32."""
    if lane != "delta":
        master.add_(1e-3)
        return
    flat = master.view(-1)
    flat[torch.randperm(len(flat))[: len(flat) // 100]] *= 1.02


def local(parameter: Tensor) -> Tensor:
    """The memory of a parameter."""
    own = parameter.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def one_copy(masters: list[Tensor]) -> float:
    """Seconds of one copy of this rank's weights into memory that is there: what a stall cannot be below."""
    size = sum(master.numel() for master in masters)
    target = one_copy.__dict__.setdefault(size, torch.zeros(size, dtype=torch.bfloat16))
    started, at = time.perf_counter(), 0
    for master in masters:
        target[at : at + master.numel()].copy_(master.view(-1))
        at += master.numel()
    return time.perf_counter() - started


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds of this process and of these, by the clock that Linux has for each process (clock_getcpuclockid)."""
    return time.process_time() + sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)


# -- the other processes -----------------------------------------------------------------------------------------------


@contextmanager
def spawned(target: Callable[..., None], each: list[tuple[Any, ...]]) -> Iterator[list[psutil.Process]]:
    """Processes of `target`, one for each tuple of arguments, until the end of the block."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=target, args=arguments, daemon=True) for arguments in each]
    for process in started:
        process.start()
    try:
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.join()


@contextmanager
def receivers(endpoint: str, layout: list[TensorInfo], count: int) -> Iterator[tuple[list[psutil.Process], list]]:
    """Processes that receive as generators, and lists of the seconds that each of their swaps took."""
    manager = multiprocessing.Manager()
    pauses = [manager.list() for _ in range(count)]
    with spawned(receive, [(endpoint, f"generator-{i}", layout, pauses[i]) for i in range(count)]) as processes:
        yield processes, pauses


def receive(endpoint: str, name: str, layout: list[TensorInfo], pauses: list) -> None:
    """Receive as a generator whose engine copies every tensor into its place."""
    torch.set_num_threads(1)
    places = {info.name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in layout}

    def apply(tensors: Any, version: PolicyVersion) -> Checksum:
        started = time.perf_counter()
        replace_tensors(places, tensors)
        pauses.append(time.perf_counter() - started)
        return Checksum.of([tensor_digest(tensor, name) for name, tensor in places.items()])

    Receiver(endpoint, generator_id=name, incarnation="0", host=HOST, apply=apply, keys=None).start()
    while True:
        time.sleep(10.0)


@contextmanager
def broadcasts(count: int, num_bytes: int) -> Iterator[Any]:
    """A function that broadcasts `num_bytes` once to `count` processes; it returns CPU seconds of all, and seconds."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ends = [multiprocessing.Pipe() for _ in range(count)]
    members = [(store.port, rank + 1, count + 1, num_bytes, ends[rank][1]) for rank in range(count)]
    with spawned(take, members) as processes:
        group, flat = GlooGroup(store, 0, count + 1, HOST, 120.0), torch.zeros(num_bytes, dtype=torch.uint8)

        def once() -> tuple[float, float]:
            for ours, _ in ends:
                ours.send(None)
            began, at = cpu_s(processes), time.perf_counter()
            group.broadcast(flat)
            for ours, _ in ends:
                ours.recv()
            return cpu_s(processes) - began, time.perf_counter() - at

        yield once


def take(port: int, rank: int, world: int, num_bytes: int, told: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False)
    group, flat = GlooGroup(store, rank, world, HOST, 120.0), torch.zeros(num_bytes, dtype=torch.uint8)
    while True:
        told.recv()
        group.broadcast(flat)
        told.send(None)


if __name__ == "__main__":
    main()
