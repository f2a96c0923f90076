"""Groups a second through the product's sockets, codec, checks and buffer, beside raw PUSH/PULL of the same frames.

    python -m benchmarks.transport --groups 2000 --rounds 9

Two processes, one connection over loopback TCP. The ways, interleaved in each round:

    raw              PUSH to PULL, nothing is copied, nothing is looked at
    memory           encrypted (CURVE), as in every run, from a `Group` to its acknowledgement: packed, digested, sent under a
                     lease, checked, kept, acknowledged
    written          the same, and in the journal, handed to the operating system
    fsync_interval   the same, acknowledged once it is on the disk

A group is 8 completions of 1,536 tokens (98 KB). Batches are taken as soon as they are complete, by a call instead of a
message. Of each round the ratio to raw is taken before the median of rounds. `codec` is each half by itself.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.format import FORMAT, RunStarted
from asyncgrpo.journal.history import History
from asyncgrpo.journal.log import InMemory, Journal, Ledger
from asyncgrpo.types import Completion, Group, Lease, PolicyVersion, Prompt, Rollout, Sampling, VersionSpan
from asyncgrpo.wire import PROTOCOL
from asyncgrpo.wire.codec import check_group, decode, encode, pack_group, unpack_group
from asyncgrpo.wire.rollouts import Ack, Grant, Register, Serving
from asyncgrpo.wire.sockets import Client, Keys, Server
from benchmarks.measuring import line, rounded, show
from benchmarks.rollouts import Lengths, make_groups

VOCABULARY = 151_936
COMPLETIONS = 8
PER_STEP, MAX_LAG = 32, 3
WINDOW = 2 * PER_STEP
WAYS = ("raw", "memory", "written", "fsync_interval")
Done = tuple[float, float]
"""Groups a second, and the receiver's CPU microseconds for each group."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000, help="in each measurement")
    parser.add_argument("--tokens", type=int, default=1536, help="of a completion")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--folder", default=None, help="for the journal; a temporary one if not given")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    group = make_group(arguments.tokens, arguments.seed)
    frames = encode(*pack_group(group))
    about = {"bytes": sum(map(len, frames)), "groups": arguments.groups}
    show_codec(group, arguments.rounds, arguments.seed, about)
    found: dict[str, list[Done]] = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for number in range(-1, arguments.rounds):  # one that does not count
            for way in arguments.ways[:: 1 if number % 2 else -1]:
                done = measure(way, group, arguments.groups, Path(folder) / f"{way}-{number}")
                if number >= 0:
                    found[way].append(done)
    raw = [speed for speed, _ in found.get("raw", [])]
    for way, done in found.items():
        show(line(f"transport {way}", [speed for speed, _ in done], "groups/s", seed=arguments.seed, **about,
                  receiver_cpu_us=rounded(sorted(cpu for _, cpu in done)[len(done) // 2])))  # fmt: skip
        if raw and way != "raw":
            ratios = [speed / beside for (speed, _), beside in zip(done, raw, strict=True)]
            show(line(f"transport {way} / raw", ratios, "ratio", seed=arguments.seed, **about))


def make_group(tokens: int, seed: int) -> Group:
    """A group of completions of `tokens` tokens, each sampled by two versions in turn."""
    (group,) = make_groups(Lengths([200], [[tokens] * COMPLETIONS]), vocabulary=VOCABULARY, seed=seed)
    return of_lease(group, 0, group)


def of_lease(group: Group, version: int, lease: Lease | Group) -> Group:
    """The same completions for another lease, half sampled by `version`."""
    half = len(group.rollouts[0].completion.token_ids) // 2
    spans = VersionSpan(PolicyVersion(1, version), 0, half), VersionSpan(PolicyVersion(1, version + 1), half, 2 * half)
    rollouts = tuple(
        Rollout(
            Completion(done.index, done.token_ids[: 2 * half], done.logprobs[: 2 * half], spans, done.finish_reason),
            rollout.score,
        )
        for rollout in group.rollouts
        if (done := rollout.completion)
    )
    fields = {
        name: getattr(lease, name) for name in ("group_id", "lease_id", "attempt", "prompt_index", "purpose", "prompt")
    }
    return Group(**fields, rollouts=rollouts, generator_id="generator-0", timings={"generate": 1.0, "reward": 0.1})


# -- the codec ---------------------------------------------------------------------------------------------------------


def show_codec(group: Group, rounds: int, seed: int, about: dict[str, Any]) -> None:
    message, payload = pack_group(group)
    frames = encode(message, payload)
    parts: dict[str, Callable[[], object]] = {
        "pack and encode": lambda: encode(*pack_group(group)),
        "decode": lambda: decode(frames),
        "check": lambda: check_group(message, payload, VOCABULARY),
        "unpack, with its check": lambda: unpack_group(message, payload),
    }
    for name, part in parts.items():
        show(line(f"codec {name}", [cpu_us(part) for _ in range(rounds)], "us", seed=seed, **about))


def cpu_us(part: Callable[[], object], times: int = 2000) -> float:
    started = time.process_time()
    for _ in range(times):
        part()
    return (time.process_time() - started) / times * 1e6


# -- the transport -----------------------------------------------------------------------------------------------------


def measure(way: str, group: Group, count: int, folder: Path) -> Done:
    """Send `count` groups from this process to another."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    send, receive = (send_raw, receive_raw) if way == "raw" else (send_groups, receive_groups)
    receiver = context.Process(target=receive, args=(there, way, count, folder))
    receiver.start()
    send(*here.recv(), group, count)
    done: Done = here.recv()
    receiver.join()
    return done


def send_raw(endpoint: str, keys: None, group: Group, count: int) -> None:
    frames = encode(*pack_group(group))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(endpoint)
        for _ in range(count):
            socket.send_multipart(frames, copy=False)


def receive_raw(pipe: Connection, way: str, count: int, folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        pipe.send((f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", None))
        socket.recv_multipart(copy=False)
        watch = Watch()
        for _ in range(count - 1):
            socket.recv_multipart(copy=False)
        pipe.send(watch.done(count - 1))


def send_groups(endpoint: str, keys: Keys, group: Group, count: int) -> None:
    """Send as a generator whose groups are ready as soon as they are leased."""
    client = Client(endpoint, "generator-0-a", keys)
    client.send(Register(protocol=PROTOCOL, generator_id="generator-0", incarnation="a", window=WINDOW))
    client.send(Serving(generator_id="generator-0", version=PolicyVersion(1, 10**6)))
    acknowledged = 0
    while acknowledged < count:
        received = client.receive(10.0)
        assert received is not None, "no message from the buffer"
        message, _ = received
        if isinstance(message, Grant):
            lease = message.lease
            # As new as a lease of this place in the order can be, at the least.
            version = max(0, lease.prompt_index // PER_STEP - MAX_LAG)
            client.send(*pack_group(of_lease(group, version, lease)))
        elif isinstance(message, Ack):
            acknowledged += 1
    client.close()


def receive_groups(pipe: Connection, way: str, count: int, folder: Path) -> None:
    """Receive as the buffer's process; batches are taken by a call."""
    source = prompts(count)
    buffer = Buffer(
        BufferConfig(prompts_per_step=PER_STEP, max_lag=MAX_LAG, lease_timeout_s=1e9),
        AlgorithmConfig(group_size=COMPLETIONS),
        source,
        Sampling(),
        seed=0,
        lineage=1,
        journal=ledger(way, source, folder),
    )
    keys = Keys.make()
    server = Server("127.0.0.1", keys)
    service = BufferService(server, buffer, Evaluations((), Sampling(), 0, 1e9), VOCABULARY)
    step = 0
    buffer.trained(PolicyVersion(1, step))
    pipe.send((server.endpoint, keys))
    service.serve(10.0)
    watch = Watch()
    while buffer.outcomes["accepted"] < count:
        service.serve(0.1)
        while buffer.count(State.READY) >= PER_STEP and buffer.take(PolicyVersion(1, step)) is not None:
            step += 1
            buffer.trained(PolicyVersion(1, step))
    while service._unacknowledged:
        service.serve(0.01)
    pipe.send(watch.done(count))
    server.close()


def prompts(count: int) -> PromptSource:
    prompt = Prompt(prompt_id="train/0", token_ids=tuple(range(200)), text="x" * 600, answer="42")
    return PromptSource((prompt,) * count, seed=0, shuffle=False, epochs=1)


def ledger(way: str, source: PromptSource, folder: Path) -> Ledger:
    if way == "memory":
        return InMemory()
    began = RunStarted(
        format=FORMAT, lineage=1, parent=None, compatibility_key={}, max_lag=MAX_LAG, prompts=source.state()
    )
    return Journal(History(folder, []), began, "written" if way == "written" else "fsync_interval")


class Watch:
    """Measure from now on."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def done(self, count: int) -> Done:
        return count / (time.perf_counter() - self._wall_s), (time.process_time() - self._cpu_s) / count * 1e6


if __name__ == "__main__":
    main()
