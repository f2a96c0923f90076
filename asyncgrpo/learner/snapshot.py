"""A snapshot of the weights in a publication's arena, after which the next step may begin.

Where all ranks are on one machine, each maps the arena and writes its own rows of every tensor: nothing is gathered, and every
rank waits for the copy of its shard alone. Otherwise rank 0 gathers tensor by tensor and writes them. Adapters are gathered
always: they are small.

A rank that has written raises its flag behind the arenas; the publisher's thread waits for all flags before it hashes.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.publishing import PublishedAdapters, PublishedWeights, fill_arena, fill_parts
from asyncgrpo.weights.arena import Layout, MappedArenas, same_machine

IsWritten = Callable[[], None] | None
"""Returns once every byte is there; none: all are."""
LOOK_EVERY_S = 0.001
MACHINE_BYTES = 128
"""Of a machine's name (`arena.same_machine`), which has about 60."""


class Snapshot:
    """One rank's part in the snapshots of a run."""

    def __init__(
        self,
        sent: PublishedWeights | PublishedAdapters,
        *,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Find out whether all ranks share a machine. Collective.

        Args:
            device: of this rank.
            timeout_s: how long rank 0 waits for the others to have written.
        """
        self._sent, self._rank, self._world, self._device = sent, rank, world, device
        self._timeout_s = timeout_s
        self._number = 0
        self._layout = Layout(sent.layout())
        self._arenas: MappedArenas | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.is_together = world > 1 and isinstance(sent, PublishedWeights) and _share_machine(world)
        """Whether each rank writes its own rows, where the arenas can be mapped."""

    def write(self, flat: Tensor, file: str = "") -> IsWritten:
        """Rank 0: write the weights into an arena. Collective; the others `join`.

        Args:
            flat: [num_bytes] uint8, the arena.
            file: of the arenas; empty: no other rank can map them, so the weights are gathered.
        """
        if not file:
            return fill_arena(self._sent.weights(), self._layout, flat)
        mine = self._write_rows(flat)
        self._number += 1
        number, flags = self._number, self._mapped(file).flags

        def is_written() -> None:
            if mine is not None:
                mine()
            deadline = time.monotonic() + self._timeout_s
            while int(flags[1 : self._world].min()) < number:
                if time.monotonic() > deadline:
                    raise WeightsError(f"not every rank has written its weights within {self._timeout_s:.0f} s")
                time.sleep(LOOK_EVERY_S)

        return is_written

    def join(self, file: str, start: int) -> None:
        """Another rank: take part in what rank 0 does. Collective.

        Args:
            file: as rank 0 was given it.
            start: the arena's first byte in the file.
        """
        if not file:
            for _ in self._sent.weights():
                pass
            return
        arenas = self._mapped(file)
        written = self._write_rows(arenas.read(start, self._layout.num_bytes))
        self._number += 1
        number = self._number

        def raise_flag() -> None:
            if written is not None:
                written()
            arenas.flags[self._rank] = number

        if written is None:
            raise_flag()
        else:
            self._threads.submit(raise_flag)

    def _write_rows(self, flat: Tensor) -> IsWritten:
        assert isinstance(self._sent, PublishedWeights)
        return fill_parts(self._sent.parts(self._rank), self._layout, flat)

    def _mapped(self, file: str) -> MappedArenas:
        if self._arenas is None or self._arenas.file != file:
            self._arenas = MappedArenas(file)
            if self._rank and self._device.type == "cuda":
                self._arenas.pin()
        return self._arenas


def _share_machine(world: int) -> bool:
    """Whether all ranks can map one file in shared memory. Collective."""
    mine = torch.frombuffer(bytearray(same_machine().encode().ljust(MACHINE_BYTES)[:MACHINE_BYTES]), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)
