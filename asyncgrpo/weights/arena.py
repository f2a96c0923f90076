"""Where a publication lies: every tensor at a fixed place of one flat run of bytes, in memory that processes share.

The learner has two such arenas in one file in memory, and a page of flags behind them. It writes its weights into one while
generators still read the other. Engines on the same machine map the file and load out of it, each when it likes. To others its
bytes are broadcast; each of those keeps what it received in a `Staging`, a file of the same kind, which its engine maps.

An arena is not written while an engine that answers reads it. One that was given up may wake in the middle of a read: so the
learner counts behind the arenas how often it has begun to write each, and who has read compares.
"""

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from asyncgrpo import scratch
from asyncgrpo.errors import WeightsError
from asyncgrpo.scratch import SHARED_MEMORY
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.delta import Span, State
from asyncgrpo.weights.digest import add_digests, digest

log = logging.getLogger(__name__)

IsWritten = Callable[[], bool]
"""Whether every byte of an arena is there. Raises WeightsError: it will not be."""
ALIGNMENT = 64
"""Every tensor starts at a multiple of so many bytes, so that a view of any dtype is aligned."""
SLOTS = 2
PAGE = 4096
_numbers = itertools.count()


def dtype_of(info: TensorInfo) -> torch.dtype:
    return getattr(torch, info.dtype)


def size_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * dtype_of(info).itemsize


class Layout:
    """Where each tensor of a publication lies. Learner and generators make the same of the same list of tensors."""

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        """Raises WeightsError: a shape or a dtype is none."""
        self.tensors = tuple(tensors)
        self.offsets: tuple[int, ...] = ()
        self.num_bytes = 0
        """A multiple of `ALIGNMENT`."""
        for info in self.tensors:
            if not isinstance(getattr(torch, info.dtype, None), torch.dtype) or min(info.shape, default=0) < 0:
                raise WeightsError(f"{info.name[:100]} is {info.dtype[:20]} {info.shape[:8]}, which is no tensor")
            self.offsets += (self.num_bytes,)
            self.num_bytes += -(-size_bytes(info) // ALIGNMENT) * ALIGNMENT

    def views(self, flat: Tensor) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor as a view of `flat`, [num_bytes] uint8."""
        for info, start in zip(self.tensors, self.offsets, strict=True):
            raw = flat[start : start + size_bytes(info)]
            yield info, raw.view(dtype_of(info)).view(info.shape)

    @property
    def spans(self) -> list[Span]:
        """Every tensor, for a delta."""
        places = zip(self.tensors, self.offsets, strict=True)
        return [Span(start, size_bytes(info), dtype_of(info).itemsize, start) for info, start in places]

    def slices(self, size: int) -> Iterator[tuple[int, int]]:
        """First and last byte of each piece of at most `size` bytes, a multiple of `ALIGNMENT`."""
        for start in range(0, self.num_bytes, size):
            yield start, min(start + size, self.num_bytes)


def digest_of(layout: Layout, tensors: Iterator[tuple[TensorInfo, Tensor]]) -> str:
    """The digest of a publication of `tensors`, without publishing it; on the CPU."""
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for (info, view), (given, tensor) in zip(layout.views(flat), tensors, strict=True):
        assert info == given, f"{info.name} expected, {given.name} given"
        view.copy_(tensor)
    return add_digests([digest(flat)])


class Arenas:
    """Memory of a publication, `count` times [num_bytes] uint8. Where it fits into shared memory, other processes map it."""

    def __init__(self, layout: Layout, count: int = SLOTS) -> None:
        """Make them in shared memory; where they do not fit, in memory of this process alone."""
        self.layout = layout
        self.file = ""
        """Name of their file in memory; empty: no other process can map them."""
        self.trouble = ""
        """Why there is no file."""
        size = count * stride(layout) + PAGE
        name = f"{scratch.mark()}-weights-{next(_numbers)}"
        try:
            allocate(SHARED_MEMORY / name, size)
        except RuntimeError as error:
            self.trouble = str(error)
            self.memory = torch.zeros(size, dtype=torch.uint8)
        else:
            self.file = name
            self.memory = _map(SHARED_MEMORY / name, size)
        self.slots = [self.memory[i * stride(layout) :][: layout.num_bytes] for i in range(count)]
        self._unpin: Callable[[], object] | None = None

    def begin(self, slot: int) -> int:
        """Note that a slot is written anew. Returns how often it has been."""
        flags = _flags(self.memory)
        flags[_counter(slot)] += 1
        return int(flags[_counter(slot)])

    def pin(self) -> None:
        """Lock the pages for this process's GPU."""
        if self._unpin is None:
            self._unpin = pin(self.memory)

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self.slots = []
        if self.file:
            (SHARED_MEMORY / self.file).unlink(missing_ok=True)


@dataclass
class Slot:
    """One arena and what is in it."""

    flat: Tensor
    number: int
    writes: int = 0
    """How often it has been written."""
    version: PolicyVersion | None = None
    is_ready: bool = False
    """Whether it may be read."""
    digest: str = ""
    """Empty: it is not known yet."""
    is_written: IsWritten | None = None
    """None: every byte is there."""
    readers: set[str] = field(default_factory=set)
    is_ours: bool = False
    """Whether it is being filled, or its bytes are awaited."""


class SharedTensors(list[tuple[str, Tensor]]):
    """Tensors by name, all of them in one memory, [bytes] uint8."""

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], memory: Tensor, file: str, slot: int = 0, writes: int = 0
    ) -> None:
        """
        Args:
            file: of the memory, which other processes can map; empty: they cannot.
            slot, writes: the arena in which they lie, and how often it was written until then.
        """
        super().__init__(tensors)
        self.memory, self.file = memory, file
        self.slot, self.writes = slot, writes
        self.owner: object = None
        """Removes the file when it ends."""

    def require_intact(self) -> None:
        """Raises WeightsError: the arena has been written again, perhaps while it was read."""
        if (now := int(_flags(self.memory)[_counter(self.slot)])) != self.writes:
            raise WeightsError(
                f"the learner has written over these weights before they were read ({now - self.writes} times)"
            )


class MappedArenas:
    """Another process's view of arenas."""

    def __init__(self, file: str) -> None:
        """Raises WeightsError: there is no such file here."""
        path = SHARED_MEMORY / Path(file).name
        try:
            self.memory = _map(path, path.stat().st_size)
            """[bytes] uint8, the whole file."""
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"the learner's weights are not in {SHARED_MEMORY} of this machine: {error}") from error
        self.file = file
        self.flags = _flags(self.memory)
        """[512] behind the arenas: how many snapshots each learner rank has written, and how often each arena was begun."""

    def pin(self) -> None:
        """Lock the pages, in a process whose GPU reads them or writes into them."""
        weakref.finalize(self, pin(self.memory)).atexit = False

    def read(self, start: int, size: int) -> Tensor:
        """[size] uint8 from byte `start` of the file on. Raises WeightsError: the file is shorter."""
        if not 0 <= start <= start + size <= len(self.memory) - PAGE:
            raise WeightsError(f"the learner's weights end at byte {len(self.memory) - PAGE} of {self.file}")
        return self.memory[start : start + size]

    def tensors(self, layout: Layout, slot: int, writes: int) -> SharedTensors:
        """The tensors of a publication where they lie. Raises WeightsError: they are not there, or not any more."""
        views = layout.views(self.read(slot * stride(layout), layout.num_bytes))
        tensors = SharedTensors(((info.name, view) for info, view in views), self.memory, self.file, slot, writes)
        tensors.require_intact()
        return tensors


class Staging:
    """What a generator received, [num_bytes] uint8. Where it fits into shared memory, the engine's processes map it."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._arenas = layout, Arenas(layout, 1)
        (self.flat,) = self._arenas.slots
        self.holds: State | None = None
        """The weights whose digest was found in it; None: whatever came so far."""
        weakref.finalize(self, self._arenas.close).atexit = False  # a process that ends leaves it to `scratch`

    def pin(self) -> None:
        """Lock the pages, where a GPU of this process writes them."""
        self._arenas.pin()

    def tensors(self) -> SharedTensors:
        """Every tensor by its name, as views of the memory."""
        views = ((info.name, view) for info, view in self._layout.views(self.flat))
        tensors = SharedTensors(views, self._arenas.memory, self._arenas.file)
        tensors.owner = self
        return tensors


def stride(layout: Layout) -> int:
    """Bytes from one arena to the next."""
    return -(-layout.num_bytes // PAGE) * PAGE


def _flags(memory: Tensor) -> Tensor:
    """[512] int64, the page behind the arenas of a file."""
    return memory[-PAGE:].view(torch.int64)


def _counter(slot: int) -> int:
    """Which flag counts how often a slot was begun. The first ones belong to the ranks of the learner."""
    return -1 - slot


def allocate(file: Path, size: int) -> None:
    """Create a file in memory whose pages are all there: writing into memory that is full would kill this process.

    Raises:
        RuntimeError: it does not fit.
    """
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        file.unlink()
        raise RuntimeError(_too_small(size, str(error))) from error
    finally:
        os.close(descriptor)


def pin(memory: Tensor) -> Callable[[], object]:
    """Lock the pages for the GPU, which then copies them at full speed, beside whatever else it does.

    Args:
        memory: [n] uint8 on the CPU.
    Returns:
        What unlocks them again. It must be called while the memory is there.
    """
    if not torch.cuda.is_available() or not memory.numel():
        return lambda: None
    runtime, place = torch.cuda.cudart(), memory.data_ptr()
    if (error := int(runtime.cudaHostRegister(place, memory.numel(), 0))) == 0:
        return lambda: runtime.cudaHostUnregister(place)
    log.warning("%.0f MiB are not pinned (CUDA error %d): copies to the GPU are slower", memory.numel() / 2**20, error)
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA tells of an error again at the next call, whose caller did nothing wrong
    return lambda: None


def _map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def _too_small(size: int, why: str) -> str:
    return (
        f"{size / 2**20:.0f} MiB of weights do not fit into {SHARED_MEMORY} ({why}); give the container more, for "
        "example docker run --shm-size=4g"
    )
