"""A snapshot of the weights in a publication's arena. The next step may begin once it is copied.

Each rank writes its own rows of every tensor and waits for that copy only; weights are not gathered. Ranks on the machine of
rank 0 map the arena. A rank on another machine copies its rows into a staging buffer and sends them beside the next step
(`rows.py`). Adapters are small and always gathered. Weights are gathered if the arena cannot be mapped.

Each rank raises its flag behind the arenas after its write. The publisher's thread polls all flags before it hashes.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.publishing import Part, PublishedWeights, fill_arena, fill_parts
from asyncgrpo.learner.rows import RowReceiver, RowSender, wait_until
from asyncgrpo.scratch import same_machine
from asyncgrpo.weights.arena import IsWritten, Layout, MappedArenas

log = logging.getLogger(__name__)

MACHINE_BYTES = 128
"""Size of a machine's identity (`scratch.same_machine`), which has about 60 bytes."""


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
        """Find out which ranks share the machine of rank 0. Collective.

        Args:
            config: timeout of the writes of other ranks (extended for large models), and deltas between machines.
            device: of this rank.
        """
        self._sent, self._rank, self._world, self._device = sent, rank, world, device
        self._number = 0
        self._layout = Layout(sent.layout())
        self._timeout_s = config.timeout_s + self._layout.num_bytes / liveness.READ_BYTES_PER_S
        self._arenas: MappedArenas | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        away = _away(world) if world > 1 else []
        self._near = [other for other in range(1, world) if other not in away]
        self._sender: RowSender | None = None
        self._receivers: list[RowReceiver] = []
        for other in away:  # collective: all ranks create each group
            pair = dist.new_group([0, other], timeout=timedelta(seconds=self._timeout_s), backend="gloo")
            if rank == 0:
                log.info("the rows of rank %d come from another machine", other)
                self._receivers.append(RowReceiver(other, pair))
            elif rank == other:
                self._sender = RowSender(self._layout, pair, pins=device.type == "cuda", deltas=config.deltas)

    @property
    def is_behind(self) -> bool:
        """True on rank 0 while transfers from other machines are too far behind for another snapshot."""
        return any(receiver.is_behind for receiver in self._receivers)

    def write(self, flat: Tensor, file: str = "") -> IsWritten | None:
        """Write the weights into an arena on rank 0. Collective; the other ranks `join`.

        Args:
            flat: [num_bytes] uint8, the arena.
            file: of the arenas; empty if other ranks cannot map them, so that weights are gathered.
        """
        is_alone = not (self._near or self._receivers)
        if not (file or is_alone):
            return fill_arena(self._sent.weights(), self._layout, flat)
        mine = fill_parts(self._parts(), self._layout, flat)
        if is_alone:
            return mine
        self._number += 1
        number, flags = self._number, self._mapped(file).flags
        arriving = [receiver.receive(flat) for receiver in self._receivers]
        deadline = time.monotonic() + self._timeout_s

        def is_written() -> bool:
            for job in arriving:
                if job.done() and job.exception() is not None:
                    raise WeightsError(f"the weights of a rank on another machine did not arrive: {job.exception()}")
            have_written = all(job.done() for job in arriving) and bool((flags[self._near] >= number).all())
            if have_written and (mine is None or mine()):
                return True
            if time.monotonic() > deadline:
                raise WeightsError(f"not every rank has written its weights within {self._timeout_s:.0f} s")
            return False

        return is_written

    def join(self, file: str, start: int) -> None:
        """Take part in a snapshot of rank 0. Collective.

        Args:
            file: as in `write`.
            start: offset of the arena in the file, bytes.
        """
        if not file:
            for _ in self._sent.weights():
                pass
        elif self._sender is not None:
            self._sender.send(self._parts(), start)
        else:
            arenas = self._mapped(file)
            written = fill_parts(self._parts(), self._layout, arenas.read(start, self._layout.num_bytes))
            self._number += 1
            self._threads.submit(self._raise_flag, arenas.flags, self._number, written)

    def close(self) -> None:
        """Wait for all transfers. Every rank must have joined the same snapshots."""
        for receiver in self._receivers:
            receiver.close()
        if self._sender is not None:
            self._sender.close()

    def _raise_flag(self, flags: Tensor, number: int, written: IsWritten | None) -> None:
        wait_until(written)
        flags[self._rank] = number

    def _parts(self) -> Iterator[Part]:
        return self._sent.parts(self._rank)

    def _mapped(self, file: str) -> MappedArenas:
        if self._arenas is None or self._arenas.file != file:
            self._arenas = MappedArenas(file)
            if self._rank and self._device.type == "cuda":
                self._arenas.pin()
        return self._arenas


def _away(world: int) -> list[int]:
    """Return the ranks that cannot map shared memory of rank 0. Collective."""
    mine = torch.frombuffer(bytearray(same_machine().encode().ljust(MACHINE_BYTES)[:MACHINE_BYTES]), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return [rank for rank, machine in enumerate(everyone) if not torch.equal(machine, everyone[0])]
