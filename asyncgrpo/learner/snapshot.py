"""A snapshot of the weights in the arenas of a publication. The next step may begin once it is copied.

Each rank writes its own rows of every tensor and waits for that copy only; weights are not gathered. The ranks of a machine share
the arenas of its leader, the rank with the lowest number: rank 0 has the publisher's, the leader of another machine has its own
and sends them (`weights/lane.py`). Adapters are small and always gathered. Weights are gathered if rank 0 has no shared memory.

Each rank raises its flag behind the arenas after its write. A thread of the leader polls all flags of its machine.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.publishing import Part, PublishedWeights, fill_arena, fill_parts
from asyncgrpo.scratch import same_machine
from asyncgrpo.weights.arena import Arenas, IsWritten, Layout, MappedArenas, Stream, dtype_of, stride
from asyncgrpo.weights.lane import Sender
from asyncgrpo.wire.sockets import Keys

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.001
T = TypeVar("T")


class Snapshot:
    """One rank's side of the snapshots of a run."""

    def __init__(
        self,
        sent: PublishedWeights,
        config: WeightsConfig,
        *,
        rank: int,
        world: int,
        device: torch.device,
    ) -> None:
        """Find out which ranks share a machine, and who owns which bytes. Collective.

        Args:
            config: timeout of the writes of other ranks (extended for large models).
            device: of this rank.
        Raises:
            WeightsError: the shared memory of a machine is too small for its arenas.
        """
        self._sent, self._rank, self._device = sent, rank, device
        self._number = 0
        self._layout = Layout(sent.layout())
        self._timeout_s = config.timeout_s + self._layout.num_bytes / liveness.READ_BYTES_PER_S
        self._mapped: MappedArenas | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        machines = _gather(same_machine(), world)
        leaders = [machines.index(machine) for machine in machines]
        self._leader = leaders[rank]
        self._mates = [other for other in range(world) if leaders[other] == rank != other]
        """The other ranks that write into arenas of this one."""
        self._others = sorted(set(leaders) - {0})
        """Leaders of other machines; the sender of each has its place in this list, from 1, as its number."""
        self.streams: list[Stream] = []
        """Bytes that each of them sends."""
        self._arenas = Arenas(self._layout) if rank in self._others else None
        self._files = _gather(self._arenas.file if self._arenas else "", world)
        self._sender: Sender | None = None
        if self._others:
            if missing := [leader for leader in self._others if not self._files[leader]]:
                trouble = self._arenas.trouble if self._arenas else ""
                raise WeightsError(f"learner ranks {missing} have too little shared memory for the weights {trouble}")
            owned = _gather(self._runs(), world)
            self.streams = [
                Stream(run for rank, runs in enumerate(owned) if leaders[rank] == leader for run in runs)
                for leader in self._others
            ]
            if rank == 0:
                log.info("learner ranks %s send the weights of their own machines", self._others)
        if self._arenas is not None and device.type == "cuda":
            self._arenas.pin()

    def connect(self, endpoint: str, host: str, keys: Keys | None) -> None:
        """Connect to the publisher of rank 0, if this rank sends the weights of its machine.

        Args:
            endpoint: of the publisher.
            host: address of this process for the generators.
        """
        if self._arenas is not None:
            number = 1 + self._others.index(self._rank)
            stream = self.streams[number - 1]
            self._sender = Sender(number, self._arenas, stream, endpoint=endpoint, host=host, keys=keys)

    def write(self, flat: Tensor, file: str = "") -> IsWritten | None:
        """Write the weights of rank 0 into its arena. Collective; the other ranks `join`.

        Args:
            flat: [num_bytes] uint8, the arena.
            file: of the arenas; empty if other ranks cannot map them, so that weights are gathered.
        """
        if not (self._mates or self._others):
            return fill_parts(self._parts(), self._layout, flat)
        if not file:
            return fill_arena(self._sent.weights(), self._layout, flat)
        return self._lead(flat, self._map(file).flags)

    def join(self, file: str, start: int) -> None:
        """Take part in a snapshot of rank 0. Collective.

        Args:
            file: as in `write`.
            start: offset of the arena in the file, bytes.
        """
        if not file:
            for _ in self._sent.weights():
                pass
        elif self._arenas is not None:
            slot = start // stride(self._layout)
            writes = self._arenas.begin(slot)
            is_written = self._lead(self._arenas.slots[slot], self._arenas.flags)
            assert self._sender is not None, "`connect` comes first"
            self._sender.written(slot, writes, is_written)
        else:
            arenas = self._map(self._files[self._leader] or file)
            written = fill_parts(self._parts(), self._layout, arenas.read(start, self._layout.num_bytes))
            self._number += 1
            self._threads.submit(self._raise_flag, arenas.flags, self._number, written)

    def close(self) -> None:
        """End all threads. Every rank must have joined the same snapshots."""
        self._threads.shutdown()
        if self._sender is not None:
            self._sender.close()
        if self._arenas is not None:
            self._arenas.close()

    def _lead(self, flat: Tensor, flags: Tensor) -> IsWritten:
        """Write this rank's parts. Returns a function that is true once all ranks of this machine have written theirs."""
        mine = fill_parts(self._parts(), self._layout, flat)
        self._number += 1
        number, deadline = self._number, time.monotonic() + self._timeout_s

        def is_written() -> bool:
            if bool((flags[self._mates] >= number).all()) and (mine is None or mine()):
                return True
            if time.monotonic() > deadline:
                raise WeightsError(f"not every rank has written its weights within {self._timeout_s:.0f} s")
            return False

        return is_written

    def _raise_flag(self, flags: Tensor, number: int, written: IsWritten | None) -> None:
        while written is not None and not written():
            time.sleep(POLL_EVERY_S)
        flags[self._rank] = number

    def _parts(self) -> Iterator[Part]:
        return self._sent.parts(self._rank)

    def _runs(self) -> list[tuple[int, int]]:
        """Compute start and end of each part of this rank in a publication, bytes. Collective."""
        places = {info.name: (info, at) for info, at in zip(self._layout.tensors, self._layout.offsets, strict=True)}
        runs = []
        for name, first, tensor in self._sent.parts(self._rank, merged=False):
            info, at = places[name]
            start = at + first * dtype_of(info).itemsize
            runs.append((start, start + tensor.numel() * dtype_of(info).itemsize))
        return runs

    def _map(self, file: str) -> MappedArenas:
        if self._mapped is None or self._mapped.file != file:
            self._mapped = MappedArenas(file)
            if self._rank != self._leader and self._device.type == "cuda":
                self._mapped.pin()
        return self._mapped


def _gather(mine: T, world: int) -> list[T]:
    """Return a value of plain types of every rank. Collective."""
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    everyone = [data.new_zeros(int(max(sizes))) for _ in range(world)]
    dist.all_gather(everyone, nn.functional.pad(data, (0, len(everyone[0]) - len(data))))
    parts = (one[: int(size)].numpy().tobytes() for one, size in zip(everyone, sizes, strict=True))
    return [msgspec.msgpack.decode(part, type=type(mine)) for part in parts]
