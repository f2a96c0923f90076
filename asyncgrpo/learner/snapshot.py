"""A snapshot of the weights in a publication's arena, after which the next step may begin.

Each rank writes its own rows of every tensor, and waits for the copy of its shard alone: nothing is gathered. Ranks on the
machine of rank 0 map the arena. One on another machine copies its rows into memory of its own, from where a thread sends them
into the arena beside the next step. Adapters are always gathered: they are small. So are whole weights where the arena
cannot be mapped.

A rank that has written raises its flag behind the arenas; the publisher's thread looks at all flags before it hashes.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.publishing import Part, PublishedAdapters, PublishedWeights, copy_parts, fill_arena, fill_parts
from asyncgrpo.weights.arena import ALIGNMENT, IsWritten, Layout, MappedArenas, dtype_of, same_machine
from asyncgrpo.weights.publisher import READ_BYTES_PER_S

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.001
MACHINE_BYTES = 128
"""Of a machine's name (`arena.same_machine`), which has about 60."""
UNDER_WAY = 2
"""Snapshots whose rows still come from other machines: as many as there are arenas."""


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
        """Find out which ranks share the machine of rank 0. Collective.

        Args:
            device: of this rank.
            timeout_s: how long rank 0 waits for the others to have written, and more where there are many bytes.
        """
        self._sent, self._rank, self._world, self._device = sent, rank, world, device
        self._number = 0
        self._layout = Layout(sent.layout())
        self._timeout_s = timeout_s + self._layout.num_bytes / READ_BYTES_PER_S
        self._arenas: MappedArenas | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.is_by_rows = world > 1 and isinstance(sent, PublishedWeights)
        """Whether each rank writes its own rows, where the arenas can be mapped."""
        away = _away(world) if self.is_by_rows else []
        self._near = [other for other in range(1, world) if other not in away]
        self._sender: RowSender | None = None
        self._receivers: list[RowReceiver] = []
        for other in away:  # all ranks enter this for each
            pair = dist.new_group([0, other], timeout=timedelta(seconds=self._timeout_s), backend="gloo")
            if rank == 0:
                log.info("the rows of rank %d come from another machine", other)
                self._receivers.append(RowReceiver(other, pair))
            elif rank == other:
                self._sender = RowSender(self._layout, pair, pins=device.type == "cuda")

    @property
    def is_behind(self) -> bool:
        """Rank 0: whether so much is still to come from other machines that no other snapshot may be made now."""
        return any(receiver.is_behind for receiver in self._receivers)

    def write(self, flat: Tensor, file: str = "") -> IsWritten | None:
        """Rank 0: write the weights into an arena. Collective; the others `join`.

        Args:
            flat: [num_bytes] uint8, the arena.
            file: of the arenas; empty: no other rank can map them, so the weights are gathered.
        """
        if not file:
            return fill_arena(self._sent.weights(), self._layout, flat)
        mine = fill_parts(self._parts(), self._layout, flat)
        self._number += 1
        number, flags = self._number, self._mapped(file).flags
        arriving = [receiver.receive(flat) for receiver in self._receivers]
        deadline = time.monotonic() + self._timeout_s

        def is_written() -> bool:
            for job in arriving:
                if job.done() and job.exception() is not None:
                    raise WeightsError(f"the weights of a rank on another machine did not come: {job.exception()}")
            have_written = all(job.done() for job in arriving) and bool((flags[self._near] >= number).all())
            if have_written and (mine is None or mine()):
                return True
            if time.monotonic() > deadline:
                raise WeightsError(f"not every rank has written its weights within {self._timeout_s:.0f} s")
            return False

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
        elif self._sender is not None:
            self._sender.send(self._parts(), start)
        else:
            arenas = self._mapped(file)
            written = fill_parts(self._parts(), self._layout, arenas.read(start, self._layout.num_bytes))
            self._number += 1
            self._threads.submit(self._raise_flag, arenas.flags, self._number, written)

    def close(self) -> None:
        """Return once no rows are on their way any more. All ranks have taken part in the same snapshots."""
        for receiver in self._receivers:
            receiver.close()
        if self._sender is not None:
            self._sender.close()

    def _raise_flag(self, flags: Tensor, number: int, written: IsWritten | None) -> None:
        wait_until(written)
        flags[self._rank] = number

    def _parts(self) -> Iterator[Part]:
        assert isinstance(self._sent, PublishedWeights)
        return self._sent.parts(self._rank)

    def _mapped(self, file: str) -> MappedArenas:
        if self._arenas is None or self._arenas.file != file:
            self._arenas = MappedArenas(file)
            if self._rank and self._device.type == "cuda":
                self._arenas.pin()
        return self._arenas


def wait_until(written: IsWritten | None) -> None:
    """Return once every byte is there."""
    while written is not None and not written():
        time.sleep(LOOK_EVERY_S)


def _away(world: int) -> list[int]:
    """The ranks that cannot map a file in shared memory of rank 0. Collective."""
    mine = torch.frombuffer(bytearray(same_machine().encode().ljust(MACHINE_BYTES)[:MACHINE_BYTES]), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return [rank for rank, machine in enumerate(everyone) if not torch.equal(machine, everyone[0])]


# -- from other machines -----------------------------------------------------------------------------------------------


class RowSender:
    """Sends the rows of a rank on another machine to rank 0: first their places in a publication, then those of each."""

    def __init__(self, layout: Layout, pair: dist.ProcessGroup, *, pins: bool) -> None:
        """
        Args:
            pair: of this rank and rank 0.
            pins: a GPU writes into the memory.
        """
        self._infos = {info.name: (info, start) for info, start in zip(layout.tensors, layout.offsets, strict=True)}
        self._pair, self._pins = pair, pins
        self._places: list[tuple[int, int]] | None = None  # until the first snapshot
        self._memory: dict[int, Tensor] = {}  # of each arena: one is sent while the next step's rows are written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def send(self, parts: Iterator[Part], arena: int) -> None:
        """Copy the parts, and begin to send them."""
        rows = [part for part in parts if part[2].numel()]
        if self._places is None:
            self._places = [self._place(part) for part in rows]
            places = torch.tensor(self._places, dtype=torch.int64)
            self._thread.submit(self._send, torch.tensor(places.shape[:1]), *([places] if rows else []))
        if arena not in self._memory:
            size = sum(_aligned(length) for _, length in self._places)
            self._memory[arena] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
        pieces = list(self._pieces(self._memory[arena], self._places))
        dtypes = [dtype_of(self._infos[name][0]) for name, _, _ in rows]
        targets = (piece.view(dtype) for piece, dtype in zip(pieces, dtypes, strict=True))
        written = copy_parts(zip(targets, (tensor for _, _, tensor in rows), strict=True))
        self._thread.submit(self._send, *pieces, written=written)

    def _place(self, part: Part) -> tuple[int, int]:
        """First byte in a publication, and number of bytes."""
        (info, offset), (_, first, tensor) = self._infos[part[0]], part
        return offset + first * dtype_of(info).itemsize, tensor.numel() * dtype_of(info).itemsize

    def _pieces(self, memory: Tensor, places: list[tuple[int, int]]) -> Iterator[Tensor]:
        start = 0
        for _, length in places:
            yield memory[start : start + length]
            start += _aligned(length)

    def close(self) -> None:
        """Return once all has been sent."""
        self._thread.shutdown()

    def _send(self, *tensors: Tensor, written: IsWritten | None = None) -> None:
        try:
            wait_until(written)
            for tensor in tensors:
                dist.send(tensor, 0, self._pair)
        except Exception:  # rank 0 gives up when nothing comes
            log.exception("the weights of this rank could not be sent to rank 0")


class RowReceiver:
    """Rank 0's end: receives the rows of one rank on another machine, straight into the arena."""

    def __init__(self, rank: int, pair: dist.ProcessGroup) -> None:
        self._rank, self._pair = rank, pair
        self._places: Tensor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"snapshot-{rank}")
        self._jobs: list[Future[None]] = []

    @property
    def is_behind(self) -> bool:
        self._jobs = [job for job in self._jobs if not job.done()]
        return len(self._jobs) >= UNDER_WAY

    def receive(self, flat: Tensor) -> Future[None]:
        """Begin to receive into an arena, [num_bytes] uint8."""
        job = self._thread.submit(self._receive, flat)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Return once all has come that is under way."""
        self._thread.shutdown()

    def _receive(self, flat: Tensor) -> None:
        if self._places is None:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, self._rank, self._pair)
            self._places = torch.zeros(int(count), 2, dtype=torch.int64)
            if count:
                dist.recv(self._places, self._rank, self._pair)
        for start, length in self._places.tolist():
            dist.recv(flat[start : start + length], self._rank, self._pair)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
