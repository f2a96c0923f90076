"""Messages of a publication, between the publisher (learner, rank 0) and the receivers (generators).

`group_number` counts the weight groups formed so far. A message with an earlier number is ignored.
"""

from typing import ClassVar, Literal

from asyncgrpo.types import Name, PolicyVersion, TensorInfo
from asyncgrpo.wire import Message

# -- membership --------------------------------------------------------------------------------------------------------


class Join(Message):
    """A generator's request for weights, sent once at its start."""

    generator_id: Name
    incarnation: Name
    machine: str = ""
    """`scratch.same_machine()`; if it equals the publisher's, the generator can map the learner's memory."""


class Alive(Message):
    """Heartbeat of a generator's weight receiver, sent twice a second, also while its engine loads weights."""

    generator_id: Name
    incarnation: Name


class WeightsLayout(Message):
    """Reply to `Join`: the tensors of every publication of this learner."""

    max_header_bytes: ClassVar[int] = 2**24
    """Room for tens of thousands of tensors."""

    tensors: tuple[TensorInfo, ...]
    check: tuple[tuple[int, ...], ...] = ()
    """Token ids of the sequences that are scored after each swap, from `check_start` on."""
    check_start: int = 1


class FormGroup(Message):
    """Asks a generator to join the process group of this number, in which the learner is rank 0."""

    group_number: int
    rank: int
    world: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class GroupFormed(Message):
    """Reports that a generator joined the group of this number, or the `problem` that kept it out."""

    generator_id: Name
    group_number: int
    problem: str = ""


# -- one version -------------------------------------------------------------------------------------------------------


class Offer(Message):
    """Offers the weights of `version` and their digest.

    They lie in the learner's memory, in arena `slot` of `file`, which was written `writes` times. With a `group_number` they are
    broadcast in pieces of `piece_bytes` instead. With a `transfer`, deltas that lead to them follow in parts (`DeltaPart`).
    """

    version: PolicyVersion
    digest: str
    file: str = ""
    slot: int = 0
    writes: int = 0
    group_number: int = 0
    piece_bytes: int = 0
    transfer: int = 0
    """Unique number of the transfer; 0: no deltas."""
    delta_bytes: tuple[int, ...] = ()
    """Payload bytes of each delta, in the order of application."""


class DeltaPart(Message):
    """A part of a transfer. The payload has its bytes from `start` on; its deltas are concatenated."""

    max_payload_bytes: ClassVar[int] = 2**26

    transfer: int
    start: int


class PartTaken(Message):
    """Reports the first `taken` bytes of a transfer as received; the publisher then sends more."""

    generator_id: Name
    transfer: int
    taken: int


class Staged(Message):
    """Reports that a generator holds `version` in staging memory; `digest` is of the received bytes. On a mismatch they are not
    loaded."""

    generator_id: Name
    version: PolicyVersion
    digest: str


class Swapped(Message):
    """Reports that a generator samples with `version`; `checksum` is of the weights in its engine."""

    generator_id: Name
    version: PolicyVersion
    checksum: str
    seconds: float


class Checked(Message):
    """Log-probs of the check sequences under `version`, scored by a generator's engine; empty: scoring failed."""

    generator_id: Name
    version: PolicyVersion
    scores: tuple[float, ...]


class SyncFailed(Message):
    """Reports a failure to stage or load a version. `poisoned`: the engine must be replaced."""

    generator_id: Name
    reason: str
    poisoned: bool
    transfer: int = 0
    """The failed transfer; 0: the failure was not in deltas."""


ToPublisher = Join | Alive | GroupFormed | Staged | Swapped | Checked | SyncFailed | PartTaken
ToReceiver = WeightsLayout | FormGroup | Offer | DeltaPart
