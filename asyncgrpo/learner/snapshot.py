"""A snapshot of the weights in the arenas of a publication. The next step may begin once it is copied.

Each rank writes its own rows of every tensor and waits for that copy only; weights are not gathered. The ranks of a machine share
arenas: the publisher's on the machine of rank 0, elsewhere those of the first rank there. Adapters are small and always gathered.

The ranks of each machine send what is in its arenas, a part each (`weights/lane.py`). Each rank raises its flag behind the
arenas after its write. A thread of each sender polls all flags of its machine.
"""

import logging
import time
from collections import Counter
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
from asyncgrpo.learner.publishing import Part, PublishedWeights, fill_parts
from asyncgrpo.scratch import same_machine
from asyncgrpo.weights.arena import Arenas, IsWritten, Layout, Stream
from asyncgrpo.weights.lane import Sender, Written
from asyncgrpo.wire.sockets import Keys

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.001
T = TypeVar("T")


class Snapshot:
    """One rank's side of the snapshots of a run."""

    def __init__(
        self, sent: PublishedWeights, config: WeightsConfig, rank: int, world: int, device: torch.device
    ) -> None:
        """Find out which ranks share a machine, who sends, and who owns which bytes. Collective.

        Args:
            config: timeout of the writes of other ranks (extended for large models).
            device: of this rank.
        Raises:
            WeightsError: the shared memory of this machine is too small for its arenas.
        """
        self._sent, self._rank, self._world, self._device = sent, rank, world, device
        self._number = 0
        self._writes: Counter[int] = Counter()
        """Of each arena."""
        self._layout = Layout(sent.layout())
        self._timeout_s = config.timeout_s + liveness.copy_s(self._layout.num_bytes)
        self._mapped: Arenas | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        machines = _gather(same_machine(), world)
        mates = {machine: [other for other in range(world) if machines[other] == machine] for machine in machines}
        self._mates = mates[machines[rank]]
        """Ranks of this machine. The first one has its arenas."""
        self.is_whole = len(mates) == 1
        """True if all ranks write into the arenas of rank 0."""
        self._arenas = Arenas.create(self._layout) if rank == self._mates[0] != 0 else None
        self._files = _gather(self._arenas.file if self._arenas else "", world)
        whole = [[(0, self._layout.num_bytes)], *[[]] * (world - 1)]
        runs = whole if self.is_whole else _gather(self._runs(), world)
        self._parts_sent: dict[int, Stream] = {}
        """What each rank sends that sends."""
        for ranks in mates.values():
            parts = Stream(run for other in ranks for run in runs[other]).split(len(ranks))
            self._parts_sent |= zip(ranks, parts, strict=False)  # of a small model there are fewer parts
        self._sender: Sender | None = None
        if rank == 0 and len(self._parts_sent) > 1:
            log.info("learner ranks %s send the weights", ", ".join(map(str, self._parts_sent)))

    @property
    def streams(self) -> list[Stream]:
        """What each sender but rank 0 sends."""
        return list(self._parts_sent.values())[1:]

    def connect(self, endpoint: str, host: str, keys: Keys | None) -> None:
        """Connect to the publisher of rank 0, if this rank sends.

        Args:
            endpoint: of the publisher.
            host: address of this process for the generators.
        """
        if self._rank in self._parts_sent:
            number = list(self._parts_sent).index(self._rank)
            stream = self._parts_sent[self._rank]
            self._sender = Sender(number, stream, endpoint=endpoint, host=host, keys=keys, layout=self._layout)

    def write(self, arenas: Arenas, slot: int) -> IsWritten | None:
        """Write the weights of rank 0 into its arena number `slot`. Collective; the other ranks `join`.

        Returns:
            A function that is true once all ranks of this machine have written; None: they have.
        """
        if self._world == 1:
            return fill_parts(self._parts(), self._layout, arenas.arena(self._layout, slot))
        return self._fill(arenas, slot)

    def join(self, file: str, slot: int) -> None:
        """Take part in a snapshot of rank 0 into arena number `slot` of its file. Collective."""
        arenas = self._map(self._files[self._mates[0]] or file)
        is_written = self._fill(arenas, slot)
        if self._sender is not None:
            self._writes[slot] += 1
            self._sender.written(Written(slot, self._writes[slot], arenas.arena(self._layout, slot), is_written))

    def close(self) -> None:
        """End all threads. Every rank must have joined the same snapshots."""
        self._threads.shutdown()
        if self._sender is not None:
            self._sender.close()
        if self._arenas is not None:
            self._arenas.close()

    def _fill(self, arenas: Arenas, slot: int) -> IsWritten:
        """Write this rank's rows, then raise its flag. Returns a function that is true once all of its machine have."""
        written, flags = fill_parts(self._parts(), self._layout, arenas.arena(self._layout, slot)), arenas.flags
        self._number += 1
        number, deadline = self._number, time.monotonic() + self._timeout_s
        self._threads.submit(self._raise_flag, flags, number, written)

        def are_written() -> bool:
            if bool((flags[self._mates] >= number).all()):
                return True
            if time.monotonic() > deadline:
                raise WeightsError(f"not every rank has written its weights within {self._timeout_s:.0f} s")
            return False

        return are_written

    def _raise_flag(self, flags: Tensor, number: int, written: IsWritten | None) -> None:
        while written is not None and not written():
            time.sleep(POLL_EVERY_S)
        flags[self._rank] = number

    def _parts(self) -> Iterator[Part]:
        return self._sent.parts(self._rank)

    def _runs(self) -> list[tuple[int, int]]:
        """Compute start and end of each part of this rank in a publication, bytes. Collective."""
        return [
            self._layout.run(name, first, tensor.numel())
            for name, first, tensor in self._sent.parts(self._rank, merged=False)
        ]

    def _map(self, file: str) -> Arenas:
        """Map the arenas of another rank."""
        if self._mapped is None or self._mapped.file != file:
            self._mapped = Arenas(file)
            if self._device.type == "cuda":
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
