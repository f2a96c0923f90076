"""A snapshot of the weights in a publication's arena. The next step may begin once it is copied.

Each rank writes its own rows of every tensor and waits for that copy only; weights are not gathered. Ranks on the machine of
rank 0 map the arena. Adapters are small and always gathered. Weights are gathered if the arena cannot be mapped.

Each rank raises its flag behind the arenas after its write. The publisher's thread polls all flags before it hashes.

A rank on another machine copies its rows into a staging buffer. A thread sends them beside the next step over a TCP
connection of this rank. It keeps a mirror of the rows that rank 0 has. If few bytes changed it sends a delta, which rank 0
applies to the previous rows. Every transfer carries a digest, which rank 0 compares with that of its arena.

    places | [ header | rows in order, or a delta ]*
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.publishing import Part, PublishedWeights, copy_parts, fill_arena, fill_parts
from asyncgrpo.scratch import same_machine
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import IsWritten, Layout, MappedArenas, dtype_of, size_bytes
from asyncgrpo.weights.delta import LEAST_SAVING, Delta, Piece, Skips, State, apply, follow
from asyncgrpo.weights.digest import add_digests, spread

log = logging.getLogger(__name__)

# -- rows of a learner rank on another machine, on their way into the arenas of rank 0 ---------------------------------

POLL_EVERY_S = 0.001
MAX_PENDING = 2
"""Pending transfers of one rank: one per arena."""


class RowSender:
    """Sends the rows of a rank on another machine."""

    def __init__(self, layout: Layout, pair: dist.ProcessGroup, *, pins: bool, deltas: bool) -> None:
        """
        Args:
            pair: process group of this rank and rank 0.
            pins: True to pin the staging buffers, for a GPU.
            deltas: True to send deltas against the previous rows.
        """
        self._whole, self._pair = layout, pair
        self._pins, self._deltas = pins, deltas
        self._infos = {info.name: (info, start) for info, start in zip(layout.tensors, layout.offsets, strict=True)}
        self._rows: Layout | None = None
        """Layout of a staging buffer; None until the first snapshot."""
        self._places: list[int] = []
        """Offset of each row in a publication, bytes."""
        self._memory: dict[int, Tensor] = {}  # staging buffer per arena: one is sent while the next is written
        self._mirror: Tensor | None = None
        self._sent = State(PolicyVersion(0, 0), f"{0:016x}")
        """State of the mirror."""
        self._skips = Skips()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def send(self, parts: Iterator[Part], arena: int) -> None:
        """Copy the parts and begin to send them."""
        given = [part for part in parts if part[2].numel()]
        if self._rows is None:
            self._rows = self._lay_out(given)
            self._thread.submit(self._try, partial(self._send_places, self._rows))
        if not given:
            return
        if arena not in self._memory:
            self._memory[arena] = torch.zeros(self._rows.num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        memory = self._memory[arena]
        written = copy_parts(zip(_views(self._rows, memory), (tensor for _, _, tensor in given), strict=True))
        self._thread.submit(self._try, partial(self._send_rows, self._rows, memory, written))

    def close(self) -> None:
        """Wait for all transfers."""
        self._thread.shutdown()

    def _lay_out(self, given: list[Part]) -> Layout:
        """Compute the places of the rows in a staging buffer and in a publication."""
        infos = [(*self._infos[name], first, tensor) for name, first, tensor in given]
        self._places = [start + first * dtype_of(info).itemsize for info, start, first, _ in infos]
        return Layout([TensorInfo(info.name, (tensor.numel(),), info.dtype) for info, _, _, tensor in infos])

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # rank 0 times out
            log.exception("the weights of this rank could not be sent to rank 0")

    def _send_places(self, rows: Layout) -> None:
        self._send(torch.tensor([len(self._places)]))
        if self._places:
            self._send(torch.tensor(list(zip(self._places, map(size_bytes, rows.tensors), strict=True))))

    def _send_rows(self, rows: Layout, memory: Tensor, written: IsWritten | None) -> None:
        wait_until(written)
        before, pieces = self._sent, self._follow(rows, memory)
        assert self._mirror is not None
        sent = [view.view(torch.uint8) for view in _views(rows, self._mirror)]
        found = digest_of_rows(zip(self._places, sent, strict=True))
        self._sent = State(PolicyVersion(0, before.version.number + 1), found)
        if pieces is None:
            self._send(_header(self._sent, 0))
            for row in sent:
                self._send(row)
        else:
            delta = Delta(before, self._sent, self._whole.num_bytes, pieces)
            self._send(_header(self._sent, delta.packed_bytes))
            self._send(torch.from_numpy(delta.to_bytes()))

    def _follow(self, rows: Layout, memory: Tensor) -> tuple[Piece, ...] | None:
        """Update the mirror. Return the changes at their places in the publication; None: send all rows."""
        pieces = None
        if self._mirror is None:
            self._mirror = memory.clone()
        elif self._deltas and self._skips.is_due():
            pieces = follow(self._mirror, memory, rows.spans, rows.num_bytes // LEAST_SAVING)
            self._skips.note(pays=pieces is not None)
        if pieces is None:
            self._mirror.copy_(memory)
            return None
        rows_of = (bisect_right(rows.offsets, piece.place) - 1 for piece in pieces)
        moves = (self._places[row] - rows.offsets[row] for row in rows_of)
        return tuple(replace(piece, place=piece.place + by) for piece, by in zip(pieces, moves, strict=True))

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, 0, self._pair)


class RowReceiver:
    """Receives the rows of one rank on another machine into the arenas of rank 0."""

    def __init__(self, rank: int, pair: dist.ProcessGroup) -> None:
        self._rank, self._pair = rank, pair
        self._places: list[tuple[int, int]] | None = None
        """Offset and size of each row in a publication, bytes; None until the first snapshot."""
        self._newest: Tensor | None = None
        """Arena of the last transfer. No other component writes to these rows."""
        self._holds: State | None = None
        """State of the rows in that arena."""
        self._is_delta = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"snapshot-{rank}")
        self._jobs: list[Future[None]] = []
        self.came_bytes = 0
        """Size of the last transfer, bytes."""

    @property
    def is_behind(self) -> bool:
        self._jobs = [job for job in self._jobs if not job.done()]
        return len(self._jobs) >= MAX_PENDING

    def receive(self, flat: Tensor) -> Future[None]:
        """Begin to receive the next rows into an arena, [num_bytes] uint8."""
        job = self._thread.submit(self._receive, flat)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Wait for all pending transfers."""
        self._thread.shutdown()

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _receive(self, flat: Tensor) -> None:
        if self._places is None:
            self._places = self._receive_places()
        if not self._places:
            return
        before, self._holds = self._holds, None
        rows = [(start, flat[start : start + length]) for start, length in self._places]
        state, size = _read_header(self._recv(torch.zeros(3, dtype=torch.int64)))
        if size:
            delta = Delta.from_bytes(self._recv(torch.zeros(size, dtype=torch.uint8)).numpy())
            if before is None or self._newest is None or delta.after != state:
                raise WeightsError("received a delta against rows that rank 0 does not have")
            if self._newest is not flat:
                _copy(self._newest, rows)
            apply(delta, flat, before)
        else:
            for _, row in rows:
                self._recv(row)
        if (found := digest_of_rows(rows)) != state.digest:
            raise WeightsError(f"digest mismatch: rank {self._rank} sent {state.digest}, rank 0 received {found}")
        self._newest, self._holds = flat, state
        self._note(size, sum(length for _, length in self._places))

    def _note(self, size: int, whole: int) -> None:
        """Note the size of a transfer. Log a change between deltas and full rows."""
        if size and not self._is_delta:
            log.info("rank %d sends deltas: %.1f of %.1f MB", self._rank, size / 1e6, whole / 1e6)
        elif self._is_delta and not size:
            log.info("rank %d sends full rows again: too many of them changed", self._rank)
        self._is_delta, self.came_bytes = bool(size), size or whole

    def _receive_places(self) -> list[tuple[int, int]]:
        count = int(self._recv(torch.zeros(1, dtype=torch.int64)))
        return self._recv(torch.zeros(count, 2, dtype=torch.int64)).tolist() if count else []

    def _recv(self, tensor: Tensor) -> Tensor:
        dist.recv(tensor, self._rank, self._pair)
        return tensor


def wait_until(written: IsWritten | None) -> None:
    """Wait until every byte is written."""
    while written is not None and not written():
        time.sleep(POLL_EVERY_S)


def _views(rows: Layout, flat: Tensor) -> Iterator[Tensor]:
    return (view for _, view in rows.views(flat))


def digest_of_rows(rows: Iterable[tuple[int, Tensor]]) -> str:
    """Return the digest of rows, [n] uint8 each, and of their places in a publication; 16 hex digits."""
    return add_digests(spread(lambda row: xxhash.xxh3_64_intdigest(row[1].numpy().data, row[0]), rows))


def _copy(source: Tensor, rows: list[tuple[int, Tensor]]) -> None:
    """Copy rows from another arena."""
    for _ in spread(lambda row: np.copyto(row[1].numpy(), source[row[0] :][: len(row[1])].numpy()), rows):
        pass


def _header(state: State, size: int) -> Tensor:
    """Return [3] int64: number and digest of the rows, and size of the delta; 0: full rows follow."""
    return torch.from_numpy(np.array([state.version.number, int(state.digest, 16), size], np.uint64).view(np.int64))


def _read_header(header: Tensor) -> tuple[State, int]:
    number, found, size = header.numpy().view(np.uint64).tolist()
    return State(PolicyVersion(0, number), f"{found:016x}"), size


# -- snapshots ---------------------------------------------------------------------------------------------------------

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
