"""CPU time of the buffer's process for each trained group, by the number of generators.

    python -m benchmarks.buffer_scale --generators 16 256 1024

The buffer is the process of a run: its loop, journal and encrypted socket. Each generator is a socket of this process that
returns a group as soon as it has a lease, with a heartbeat a second; the learner is another one that trains at once. Groups
have 8 completions of 100 tokens. No file is synced (`buffer.durability=written`), and every generator may hold the same
number of groups, so that the groups in flight do not depend on the number of generators.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.recovery import reopen
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import RunStarted
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling, Score, VersionSpan
from asyncgrpo.wire.rollouts import (
    Batch,
    Cancel,
    Deliver,
    Finished,
    Grant,
    Register,
    RolloutHeader,
    Serving,
    Take,
    Trained,
)  # fmt: skip
from asyncgrpo.wire.sockets import Client, Keys, Server, _Dealer
from benchmarks.measuring import line, show

SIZE, TOKENS = 8, 100
PAYLOAD = bytes(8 * SIZE * TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--groups-per-step", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="after two that warm up")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # four descriptors a socket
    values: dict[int, list[float]] = {count: [] for count in options.generators}
    for _ in range(options.repetitions):  # interleaved
        for count, measured in values.items():
            measured.append(trial(count, options.groups_per_step, options.steps))
    for count, measured in values.items():
        sizes = {"generators": count, "groups_per_step": options.groups_per_step, "max_lag": 3}
        show(line("CPU of the buffer's process for each trained group", measured, "ms", seed=0, **sizes))


def serve(connection: Connection, keys: Keys, folder: Path, per_step: int) -> None:
    """Run a buffer until the learner has finished."""
    config = BufferConfig(prompts_per_step=per_step, max_lag=3, durability="written")
    prompts = PromptSource(
        [Prompt(prompt_id=f"train/{n}", token_ids=(1,) * 100) for n in range(10_000)], seed=0, shuffle=True, epochs=None
    )
    state = prompts.state().without_shares
    same = {"compatibility_key": {}, "config": {}, "policy": config.policy}
    start = RunStarted(lineage=1, parent=None, max_lag=3, prompts=state, **same)
    journal = reopen(folder, start, prompts, config).journal
    algorithm = AlgorithmConfig(group_size=SIZE)
    buffer = Buffer(config, algorithm, prompts, Sampling(), seed=0, lineage=1, journal=journal)
    server = Server("127.0.0.1", keys)
    connection.send(server.endpoint)
    BufferService(server, buffer, Evaluations((), Sampling(), 0, 600.0), emit=lambda event, **fields: None).run()
    server.close()


class Peer(Client):
    """A client that shares the threads of the others."""

    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 10_000)  # before the first one

    def __init__(self, endpoint: str, name: str, keys: Keys) -> None:
        _Dealer.__init__(self, self.context, endpoint, name, keys)
        self.name = name
        self.leases: deque[Lease] = deque()

    def work(self, version: PolicyVersion) -> None:
        """Return a group if there is a lease."""
        while (received := self.receive(0.0)) is not None:
            match received[0]:
                case Grant(lease=lease):
                    self.leases.append(lease)
                case Cancel(lease_ids=gone):
                    self.leases = deque(lease for lease in self.leases if lease.lease_id not in gone)
        if self.leases:
            self.send(group(self.leases.popleft(), self.name, version), PAYLOAD)

    def tell(self, version: PolicyVersion) -> None:
        held = tuple(lease.lease_id for lease in self.leases)
        self.send(Serving(generator_id=self.name, version=version, token_s=0.01, running=SIZE, leases=held))


def group(lease: Lease, name: str, version: PolicyVersion) -> Deliver:
    spans = (VersionSpan(version, 0, TOKENS),)
    same = {name: getattr(lease, name) for name in ("group_id", "lease_id", "attempt", "prompt_index", "prompt")}
    rollouts = tuple(
        RolloutHeader(index=n, num_tokens=TOKENS, spans=spans, finish_reason="stop", score=Score(value=float(n % 2)))
        for n in range(SIZE)
    )
    return Deliver(**same, purpose="train", rollouts=rollouts, generator_id=name, timings={})


def trial(count: int, per_step: int, steps: int) -> float:
    """Return CPU milliseconds a group, of all threads of the buffer's process."""
    keys, (ours, theirs) = Keys.make(), multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (theirs, keys, Path(folder), per_step)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        process.start()
        endpoint = ours.recv()
        learner, version = Peer(endpoint, "learner-0", keys), PolicyVersion(1, 0)
        learner.send(Trained(version=version))
        learner.send(Take(version=version))
        generators = [Peer(endpoint, f"generator-{n}", keys) for n in range(count)]
        for one in generators:
            one.send(Register(generator_id=one.name, incarnation="0", window=-(-4 * per_step // count)))
            one.tell(version)
        began, told_s = 0.0, time.monotonic()
        while version.number < 2 + steps:
            for one in generators:
                one.work(version)
            received = learner.receive(0.0)
            if received is not None and isinstance(received[0], Batch):
                version = PolicyVersion(1, version.number + 1)
                began = cpu_s(process.pid) if version.number == 2 else began
                learner.send(Trained(version=version))
                learner.send(Take(version=version))
                told_s = 0.0  # each generator tells what it serves
            if time.monotonic() - told_s > 1.0:
                told_s = time.monotonic()
                for one in generators:
                    one.tell(version)
        spent = cpu_s(process.pid) - began
        learner.send(Finished())
        process.join()
        for one in (learner, *generators):
            one._socket.close()
        return 1000 * spent / (steps * per_step)


def cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
