"""Memory layout of a publication: every tensor at a fixed offset of one flat buffer in shared memory.

The learner has two such arenas in one shared-memory file, followed by a page of flags. It writes one while generators read
the other. Engines on the same machine map the file and load out of it. On another machine generators receive the bytes into
files of one arena each, which the engines of that machine map in the same way.

An arena that a live engine reads is not written. A dropped engine may wake in the middle of a read, so the writes of each
arena are counted in the flags, and a reader compares the count after its read.
"""

import contextlib
import itertools
import logging
import os
import secrets
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo import scratch
from asyncgrpo.errors import WeightsError
from asyncgrpo.scratch import SHARED_MEMORY
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.delta import Span
from asyncgrpo.weights.digest import SHARE_BYTES, run_digest, spread

log = logging.getLogger(__name__)

IsWritten = Callable[[], bool]
"""True once every byte of an arena is written. Raises WeightsError: it cannot be completed."""
Digests = NDArray[np.uint64]
"""Digests of tensors. Their sum is that of the publication."""
Bucket = list[tuple[int, int]]
"""Start and end of each run of a broadcast, bytes."""
BLOCK = 2**20
"""Streams are cut at its multiples only, bytes, so that no element is cut."""
ALIGNMENT = 64
"""Alignment of every tensor, bytes: a view of any dtype is aligned."""
SLOTS = 2
PAGE = 4096
_numbers = itertools.count(1)


class Layout:
    """Offsets of the tensors of a publication, derived from their list alone."""

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        """Raises WeightsError: a shape or a dtype is invalid."""
        self.tensors = tuple(tensors)
        self.num_bytes = 0
        """A multiple of `ALIGNMENT`."""
        self._places: list[tuple[int, int, torch.dtype]] = []
        """Start and end of each tensor, bytes, and its dtype."""
        for info in self.tensors:
            dtype = getattr(torch, info.dtype, None)
            if not isinstance(dtype, torch.dtype) or min(info.shape, default=0) < 0:
                raise WeightsError(f"{info.name[:100]} is {info.dtype[:20]} {info.shape[:8]}, which is not a tensor")
            end = self.num_bytes + prod(info.shape) * dtype.itemsize
            self._places.append((self.num_bytes, end, dtype))
            self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT
        self._by_name = {info.name: place for info, place in zip(self.tensors, self._places, strict=True)}

    def views(self, flat: Tensor) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Yield every tensor as a view of `flat`, [num_bytes] uint8."""
        for info, (start, end, dtype) in zip(self.tensors, self._places, strict=True):
            yield info, flat[start:end].view(dtype).view(info.shape)

    def _parts(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield each tensor's part of these runs: index of the tensor, start and end, bytes."""
        for start, end in runs:
            index = bisect_right(self._places, start, key=lambda place: place[0]) - 1
            for number, place in enumerate(itertools.islice(self._places, index, None), start=index):
                if place[0] >= end:
                    break
                if max(start, place[0]) < min(end, place[1]):
                    yield number, max(start, place[0]), min(end, place[1])

    def run(self, name: str, first: int, count: int) -> tuple[int, int]:
        """Return start and end of `count` elements, bytes, from element `first` of a tensor on, and of those that follow it."""
        start, _, dtype = self._by_name[name]
        start += first * dtype.itemsize
        assert start + count * dtype.itemsize <= self.num_bytes, (
            f"there are no {count} elements from {first} of {name} on"
        )
        return start, start + count * dtype.itemsize

    def part(self, flat: Tensor, name: str, first: int, shape: Sequence[int]) -> Tensor:
        """Return the elements of `run`, in this shape, as a view of `flat`, [num_bytes] uint8."""
        start, end = self.run(name, first, prod(shape))
        return flat[start:end].view(self._by_name[name][2]).view(shape)

    def digests(self, flat: Tensor, runs: Iterable[tuple[int, int]]) -> Digests:
        """Return the digest of the elements of each tensor in some runs, computed by several threads.

        Args:
            flat: [num_bytes] uint8.
            runs: start and end of each, bytes. They are consumed lazily: a run must be complete only when it is yielded.
        Returns:
            [tensors] uint64. Those of all runs of a publication add up to the digests of the whole tensors.
        """

        def work(part: tuple[int, int, int]) -> tuple[int, int]:
            index, start, end = part
            info, (first, _, dtype) = self.tensors[index], self._places[index]
            at = (start - first) // dtype.itemsize
            return index, run_digest(flat[start:end].view(dtype), info.name, info.shape, at)

        total = [0] * len(self.tensors)
        for index, digest in spread(work, self._parts(runs)):
            total[index] += digest
        return np.array([digest % 2**64 for digest in total], np.uint64)

    @property
    def spans(self) -> list[Span]:
        """Spans of all tensors, for a delta."""
        return [Span(start, end - start, dtype.itemsize) for start, end, dtype in self._places]


class Stream:
    """The bytes of a publication that one process sends: runs in the order of their offsets."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """
        Args:
            runs: start and end of each, bytes. Adjacent ones are merged.
        """
        self.runs: list[tuple[int, int]] = []
        for start, end in sorted(runs):
            assert not self.runs or self.runs[-1][1] <= start, "a byte would be sent twice"
            if self.runs and self.runs[-1][1] == start:
                start = self.runs.pop()[0]
            if start < end:
                self.runs.append((start, end))

    def rest(self, num_bytes: int) -> "Stream":
        """Return everything else of a publication of so many bytes."""
        starts = [0, *(end for _, end in self.runs)]
        return Stream(zip(starts, [*(start for start, _ in self.runs), num_bytes], strict=True))

    def split(self, count: int) -> list["Stream"]:
        """Return at most `count` parts of about equal size, cut between blocks."""
        size = sum(end - start for start, end in self.runs)
        return [Stream(part) for part in self.buckets(BLOCK + size // count)]

    def buckets(self, size: int) -> Iterator[Bucket]:
        """Yield runs of at most `size` bytes together, at least a block. A run is cut between blocks only."""
        bucket: Bucket = []
        room = size
        for start, end in self.runs:
            while start < end:
                stop = min(end, start + room)
                if stop < end:
                    stop -= stop % BLOCK
                if stop <= start:
                    yield bucket
                    bucket, room = [], size
                    continue
                bucket.append((start, stop))
                start, room = stop, room - (stop - start)
        if bucket:
            yield bucket

    def digests(self, layout: Layout, flat: Tensor) -> Digests:
        """Return the digest of the elements of each tensor in this stream, as `Layout.digests`."""
        return layout.digests(flat, (run for bucket in self.buckets(SHARE_BYTES) for run in bucket))


class Arenas:
    """Arenas in one file of shared memory, which this process or another one has created."""

    def __init__(self, file: str) -> None:
        """Map a file. Raises WeightsError: it does not exist on this machine."""
        path = SHARED_MEMORY / Path(file).name
        try:
            self.memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
            """[bytes] uint8, the whole file."""
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"the weights are not in {SHARED_MEMORY} of this machine: {error}") from error
        self.file = path.name
        self.flags = self.memory[-PAGE:].view(torch.int64)
        """[512] int64 after the arenas: snapshots written by each learner rank, and from the end, writes of each arena."""
        self.version: PolicyVersion | None = None
        """Of the weights that this process received into them last, or of its part of them."""
        self._finalizers: list[Callable[[], object]] = []
        self._is_pinned = False

    @classmethod
    def create(cls, layout: Layout, count: int = SLOTS, name: str = "") -> "Arenas":
        """Create a file of `count` arenas, which is removed with the result.

        Args:
            name: of a file that several processes share, whichever of them creates it; empty: a new one.
        Raises:
            WeightsError: shared memory is too small.
        """
        path = SHARED_MEMORY / (Path(name).name or f"{scratch.mark()}-weights-{next(_numbers)}")
        allocate(path, count * stride(layout) + PAGE)
        made = cls(path.name)
        made._at_end(partial(path.unlink, missing_ok=True))
        return made

    def arena(self, layout: Layout, slot: int = 0) -> Tensor:
        """Return an arena, [num_bytes] uint8. Raises WeightsError: the file is shorter."""
        start = slot * stride(layout)
        if not 0 <= start <= start + layout.num_bytes <= len(self.memory) - PAGE:
            raise WeightsError(f"the weights end at byte {len(self.memory) - PAGE} of {self.file}")
        return self.memory[start : start + layout.num_bytes]

    def begin(self, slot: int, writes: int) -> None:
        """Note that an arena is about to be written, for the `writes`-th time."""
        self.version = None
        self.flags[_counter(slot)] = writes

    def tensors(self, layout: Layout, slot: int, writes: int) -> "SharedTensors":
        """Return the tensors of a publication as views. Raises WeightsError: they were overwritten."""
        views = ((info.name, view) for info, view in layout.views(self.arena(layout, slot)))
        return SharedTensors(views, self, slot, writes)

    def pin(self) -> None:
        """Pin the pages for the GPU of this process."""
        if not self._is_pinned:
            self._is_pinned = True
            self._at_end(pin(self.memory))

    def close(self) -> None:
        """Unpin the pages, and remove the file if this object created it. Freeing the object does so, too."""
        for finalize in self._finalizers:
            finalize()

    def _at_end(self, work: Callable[[], object]) -> None:
        finalize = weakref.finalize(self, work)
        finalize.atexit = False  # `scratch` removes the file after the process has ended
        self._finalizers.append(finalize)


@dataclass(eq=False)
class Slot:
    """One arena and its content, as the publisher knows it."""

    number: int = 0
    """Its place in the file."""
    file: str = ""
    writes: int = 0
    """Number of the last write."""
    version: PolicyVersion | None = None
    is_ready: bool = False
    """True if it may be read."""
    is_written: IsWritten | None = None
    """None: every byte is written."""
    readers: set[str] = field(default_factory=set)
    is_ours: bool = False
    """True while it is being filled."""


@dataclass(eq=False)
class Place:
    """Arenas that generators load from: the learner's own, or those of a machine on which generators receive."""

    slots: list[Slot] = field(default_factory=list)
    newest: Slot | None = None
    """The one with the newest weights that may be read."""
    receivers: tuple[str, ...] = ()
    """The generators that receive, each from other senders; empty: none does, or the learner writes the arenas."""
    receiving: Slot | None = None
    base: str = ""
    """File to whose weights the deltas apply that are being received."""
    awaited: set[str] = field(default_factory=set)
    """Receivers that have not received their part yet."""
    received: int = 0
    """Sum of the digests of the other parts."""
    receiving_s: float = 0.0
    """Time of the offer, `time.monotonic`."""
    failures: int = 0
    """Consecutive versions that were not received."""
    _files: str = ""
    """Start of their names."""

    @property
    def version(self) -> PolicyVersion | None:
        """Of the newest weights."""
        return None if self.newest is None else self.newest.version

    def choose(self, names: Sequence[str], mark: str) -> None:
        """Let these generators receive into new files; the first of them, with this mark of its process, owns the files."""
        self.receivers, self._files = tuple(names), f"{mark}-received-{secrets.token_hex(4)}"

    def clear(self) -> None:
        """Forget receivers and files, after `abandon`: one of these receivers may still write into them."""
        self.slots, self.newest, self.receivers = [], None, ()

    def writable(self) -> Slot | None:
        """Return an arena to receive into: the newest if nobody reads it, which saves memory, and a copy to apply deltas."""
        for slot in sorted(self.slots, key=lambda slot: slot is not self.newest):
            if not slot.readers:
                return slot
        if len(self.slots) == SLOTS:
            return None
        self.slots.append(Slot())
        return self.slots[-1]

    def receive(self, slot: Slot, version: PolicyVersion, names: Sequence[str]) -> None:
        """Note that these receivers were offered these weights."""
        slot.version = version
        slot.writes, slot.file = next(_numbers), f"{self._files}-{self.slots.index(slot)}"
        self.base = "" if self.newest is None else self.newest.file
        self.receiving, self.receiving_s, self.awaited, self.received = slot, time.monotonic(), set(names), 0
        self.newest = None if slot is self.newest else self.newest

    def awaits(self, name: str, writes: int) -> bool:
        """Return True if this receiver has not received its part of this write yet."""
        return self.receiving is not None and self.receiving.writes == writes and name in self.awaited

    def abandon(self) -> None:
        """Forget what is being received.

        A late receiver may still write its part. It does so before its part of the next weights, but deltas, which another one
        applies to all parts, could be overwritten. So all weights come next.
        """
        if self.receiving is not None:
            self.receiving.version = None
        if self.awaited - set(self.receivers[:1]):
            self.newest = None
        self.receiving = None
        self.awaited.clear()

    def release(self, reader: str) -> None:
        for slot in self.slots:
            slot.readers.discard(reader)


class SharedTensors(list[tuple[str, Tensor]]):
    """Tensors by name in one arena."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], arenas: Arenas, slot: int, writes: int) -> None:
        """
        Args:
            arenas: the file, which is kept.
            slot, writes: the arena, and its number of writes so far.
        Raises:
            WeightsError: it was overwritten.
        """
        super().__init__(tensors)
        self.arenas, self.slot, self.writes = arenas, slot, writes
        self.require_intact()

    def require_intact(self) -> None:
        """Raises WeightsError: the arena was overwritten, perhaps during the read."""
        if (now := int(self.arenas.flags[_counter(self.slot)])) != self.writes:
            raise WeightsError(f"these weights were overwritten before they were read ({now - self.writes} times)")


class Mappings(dict[str, Arenas]):
    """Mapped files by name. The first access maps a file, and drops those that were removed meanwhile."""

    def __missing__(self, file: str) -> Arenas:
        made = Arenas(file)
        for name in [name for name in self if not (SHARED_MEMORY / name).exists()]:
            del self[name]
        self[file] = made
        return made


def stride(layout: Layout) -> int:
    """Return the distance between two arenas, bytes."""
    return -(-layout.num_bytes // PAGE) * PAGE


def _counter(slot: int) -> int:
    """Return the index of the flag that counts the writes of a slot. The first flags belong to the learner's ranks."""
    return -1 - slot


def allocate(file: Path, size: int) -> None:
    """Make a file in shared memory with all pages allocated: a write to a full /dev/shm kills the process (SIGBUS).

    Raises:
        WeightsError: the file does not fit.
    """
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise WeightsError(
            f"{size / 2**20:.0f} MiB of weights do not fit into {SHARED_MEMORY} of this machine ({error.strerror}); give it "
            f"more, for example docker run --shm-size={size // 2**30 + 4}g"
        ) from error
    finally:
        os.close(descriptor)


def pin(memory: Tensor) -> Callable[[], object]:
    """Pin pages, so that the GPU copies them at full speed and asynchronously.

    Args:
        memory: [n] uint8 on the CPU.
    Returns:
        A function that unpins them. Call it before the memory is freed.
    """
    if not torch.cuda.is_available() or not memory.numel():
        return lambda: None
    runtime, place = torch.cuda.cudart(), memory.data_ptr()
    if (error := int(runtime.cudaHostRegister(place, memory.numel(), 0))) == 0:
        return lambda: runtime.cudaHostUnregister(place)
    log.warning(
        "%.0f MiB could not be pinned (CUDA error %d): copies to the GPU are slower", memory.numel() / 2**20, error
    )
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA repeats a sticky error at the next call
    return lambda: None
