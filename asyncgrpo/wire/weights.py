"""Messages of a publication, between the publisher (learner, rank 0) and the receivers (generators).

`group_number` counts the weight groups formed so far. A message with an earlier number is ignored.
"""

from typing import ClassVar, Literal

from asyncgrpo.types import Name, PolicyVersion, TensorInfo
from asyncgrpo.wire import Message

# -- membership --------------------------------------------------------------------------------------------------------


class Join(Message):
    """A generator's request for weights, sent at its start, and again until `WeightsLayout` arrives."""

    generator_id: Name
    incarnation: Name
    machine: str
    """`scratch.same_machine()`: processes for which it is equal can map each other's shared memory."""
    mark: Name
    """`scratch.mark()`, for the names of files that are removed after this process has ended."""


class Alive(Message):
    """Heartbeat of a generator's weight receiver, sent twice a second, also while its engine loads weights."""

    generator_id: Name
    is_idle: bool = False
    """True if its engine has swapped to all that it was offered."""


class WeightsLayout(Message):
    """Reply to `Join`: the tensors of every publication of this learner.

    The payload has the runs of all streams, [runs, 2] int64: start and end of each, bytes.
    """

    max_header_bytes: ClassVar[int] = 2**24
    """Room for tens of thousands of tensors."""
    max_payload_bytes: ClassVar[int] = 2**26

    tensors: tuple[TensorInfo, ...]
    check: tuple[tuple[int, ...], ...] = ()
    """Token ids of the sequences that are scored after each swap, from `check_start` on."""
    check_start: int = 1
    streams: tuple[int, ...] = ()
    """Number of runs that each sender broadcasts; empty: the publisher broadcasts everything."""


class PartWritten(Message):
    """Reports the digests of what a learner rank sends out of arena `slot`, after `writes` writes of that arena.

    The payload has them by tensor, [tensors] uint64.
    """

    max_payload_bytes: ClassVar[int] = 2**23

    sender: int
    """Counts from 1; the publisher is 0."""
    slot: int
    writes: int


class FormGroup(Message):
    """Asks a generator to join the process groups of these senders, each of which is rank 0 in its own.

    Asks a sender to form its group.
    """

    group_number: int
    rank: int
    world: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    senders: tuple[int, ...] = (0,)


class GroupFormed(Message):
    """Reports that a generator joined the groups of this number, or the `problem` of a generator or sender with one."""

    generator_id: Name
    group_number: int
    problem: str = ""


# -- one version -------------------------------------------------------------------------------------------------------


class Offer(Message):
    """Offers the weights of `version`.

    The engine loads them out of arena `slot` of `file`, which was written `writes` times. With a `group_number` they are
    broadcast in buckets of `piece_bytes`: this generator receives what its senders send into `file`, as write number
    `writes`, for all generators of its machine. The senders get this offer, too, and send their arena `slot` once it is
    written `writes` times. With `delta_bytes`, so many bytes are broadcast: a delta that leads to them from the weights in the
    file `base`.
    """

    version: PolicyVersion
    file: str = ""
    slot: int = 0
    writes: int = 0
    group_number: int = 0
    piece_bytes: int = 0
    base: str = ""
    delta_bytes: int = 0


class Staged(Message):
    """Reports that a generator received its part of write number `writes`; `digest` is of all tensors in it."""

    generator_id: Name
    digest: int
    writes: int


class Swapped(Message):
    """Reports that a generator samples with `version`; `checksum` is of the weights in its engine.

    The payload has the digests of published tensors in its engine, [n, 2] uint64: index of the tensor, digest.
    """

    max_payload_bytes: ClassVar[int] = 2**24

    generator_id: Name
    version: PolicyVersion
    checksum: str


class Checked(Message):
    """Log-probs of the check sequences under `version`, scored by a generator's engine; empty: scoring failed."""

    generator_id: Name
    version: PolicyVersion
    scores: tuple[float, ...]


class SyncFailed(Message):
    """Reports a failure to load a version, or to receive write number `writes`. `poisoned`: the engine must be replaced."""

    generator_id: Name
    reason: str
    poisoned: bool = False
    writes: int = 0


ToPublisher = Join | Alive | GroupFormed | Staged | Swapped | Checked | SyncFailed | PartWritten
ToReceiver = WeightsLayout | FormGroup | Offer
