"""Publications to another machine, with a link of its own for each process: seconds, and the bytes of each link.

    python -m tests.weights.links --mb 64 --mbit 400 --senders 1 2

A learner of two ranks and two generators, each a process in its own network namespace. The two ranks share memory, and so do
the two generators. With one sender, one rank sends everything to one generator; the other links carry no weights. Needs root
and `ip`; a limit of the rate needs `tc`.
"""

import argparse
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout, Stream
from asyncgrpo.weights.lane import Sender, Written
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire.sockets import Keys
from benchmarks.measuring import show, where
from tests.gpu_rehearsals.cluster import Cluster, ip
from tests.weights.publishing import land

LEARNER, OTHER_RANK, *GENERATORS = 1, 2, 3, 4
CLONE_NEWNET = 0x40000000


def enter(node: str) -> None:
    """Move this process into the network namespace of a node."""
    descriptor = os.open(f"/var/run/netns/{node}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {node}")
    torch.set_num_threads(1)


def layout_of(mb: int) -> Layout:
    return Layout([TensorInfo(name="weights", shape=(mb, 2**19), dtype="bfloat16")])


def learn(
    node: str, address: str, keys: Keys, mb: int, senders: int, count: int, told: "SimpleQueue[Any]", go: Event
) -> None:
    """Publish `count` versions as rank 0, after a first one that forms the groups."""
    enter(node)
    layout, settings = layout_of(mb), WeightsConfig(timeout_s=300.0, deltas=False)
    publisher = Publisher(settings, maps=False, backend="gloo", bind=address, host=address, keys=keys)
    _, *others = Stream([(0, layout.num_bytes)]).split(senders)
    publisher.start(list(layout.tensors), others=others)
    told.put((publisher.endpoint, publisher._arenas.file, [other.runs for other in others]))
    publisher.wait_for(lambda: len(GENERATORS), 240.0, lambda what, seconds: None)

    def fill(arenas: Arenas, slot: int) -> None:
        arenas.arena(layout, slot).view(torch.int64)[:: 2**9] += 1
        arenas.flags[slot] = arenas.flags[-1 - slot]  # the other rank sees the number of writes

    land(publisher, PolicyVersion(1, 0), fill)
    told.put("formed")
    go.wait()
    for number in range(1, count + 1):
        started = time.perf_counter()
        land(publisher, PolicyVersion(1, number), fill)
        told.put(time.perf_counter() - started)
    publisher.close()


def send(
    node: str, address: str, keys: Keys, mb: int, endpoint: str, file: str, runs: Sequence[tuple[int, int]]
) -> None:
    """Send as the other rank, which has written when rank 0 has."""
    enter(node)
    arenas, layout, written = Arenas(file), layout_of(mb), [0, 0]
    sender = Sender(1, Stream(runs), endpoint=endpoint, host=address, keys=keys, layout=layout)
    while True:
        for slot, before in enumerate(written):
            if (now := int(arenas.flags[slot])) > before:
                written[slot] = now
                flat = arenas.arena(layout, slot)
                sender.written(Written(slot, now, flat, lambda: True))
        time.sleep(0.001)


def generate(node: str, address: str, keys: Keys, endpoint: str) -> None:
    """Receive as a generator whose engine looks at every byte."""
    enter(node)

    def apply(tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> Checksum:
        return Checksum(str([int(tensor.view(torch.int64).sum()) for _, tensor in tensors]))

    receiver = Receiver(
        endpoint, generator_id=f"generator-{node[-1]}", incarnation="0", host=address, apply=apply, keys=keys
    )
    receiver.machine = "another"
    receiver.start()
    time.sleep(3600.0)


@contextmanager
def network(mbit: int = 0) -> Iterator[Cluster]:
    """Four nodes, each with a link of so many Mbit/s both ways; 0: unlimited."""
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder))
        try:
            for node in (LEARNER, OTHER_RANK, *GENERATORS):
                made.add(node)
                for where_, device in ((made._node(node), "net0"), (made._hub, f"p{node}")) if mbit else ():
                    limit = ["rate", f"{mbit}mbit", "burst", "256k", "latency", "100ms"]
                    ip("netns", "exec", where_, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
            yield made
        finally:
            made.close()


def carried(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Return the bytes that each node has sent and received."""
    counted = {}
    for node in (LEARNER, OTHER_RANK, *GENERATORS):
        files = [f"/sys/class/net/net0/statistics/{way}_bytes" for way in ("tx", "rx")]
        done = cluster.run(node, "ip", "netns", "exec", cluster._node(node), "cat", *files)
        sent, received = map(int, done.stdout.split())
        counted[node] = sent, received
    return counted


def publications(cluster: Cluster, mb: int, senders: int, count: int) -> tuple[list[float], dict[int, tuple[int, int]]]:
    """Publish. Returns the seconds of each publication, and the bytes that each node sent and received for all of them."""
    context = multiprocessing.get_context("spawn")
    told: SimpleQueue[Any] = context.SimpleQueue()
    keys, go = Keys.make(), context.Event()

    def start(target: Any, node: int, *arguments: Any) -> None:
        given = (cluster._node(node), cluster.address(node), keys, *arguments)
        processes.append(context.Process(target=target, args=given, daemon=True))
        processes[-1].start()

    processes: list[Any] = []
    try:
        start(learn, LEARNER, mb, senders, count, told, go)
        endpoint, file, others = told.get()
        for runs in others:
            start(send, OTHER_RANK, mb, endpoint, file, runs)
        for node in GENERATORS:
            start(generate, node, endpoint)
        assert told.get() == "formed"
        before = carried(cluster)
        go.set()
        seconds = [told.get() for _ in range(count)]
        after = carried(cluster)
    finally:
        for process in processes:
            process.kill()
            process.join()
        tidy = "from asyncgrpo import scratch; scratch.folder()"  # a new process removes the memory of those that ended
        subprocess.run([sys.executable, "-c", tidy], check=True)
    return seconds, {n: (after[n][0] - before[n][0], after[n][1] - before[n][1]) for n in before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--count", type=int, default=5)
    given = parser.parse_args()
    for senders in given.senders:
        with network(given.mbit) as cluster:
            seconds, moved = publications(cluster, given.mb, senders, given.count)
        mb = {node: [round(way / given.count / 2**20, 1) for way in both] for node, both in moved.items()}
        row = {"senders": senders, "mb": given.mb, "mbit": given.mbit, "seconds": round(statistics.median(seconds), 2)}
        show(row | {"spread": [round(min(seconds), 2), round(max(seconds), 2)], "mb_sent_received": mb} | where())


if __name__ == "__main__":
    main()
