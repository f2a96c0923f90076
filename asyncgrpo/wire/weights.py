"""Messages of a publication, between the publisher (learner, rank 0) and the receivers (generators).

`group_number` counts how often a weight group was formed. A message of an earlier group counts for nothing.
"""

from typing import ClassVar, Literal

from asyncgrpo.types import Name, PolicyVersion, TensorInfo
from asyncgrpo.wire import Message

# -- who gets weights --------------------------------------------------------------------------------------------------


class Join(Message):
    """A generator asks for weights, once, at its start."""

    generator_id: Name
    incarnation: Name
    machine: str = ""
    """`scratch.same_machine()`, by which the publisher sees whether it can map the learner's memory."""


class Alive(Message):
    """A generator's receiver is there. It says so about twice a second, also while its engine loads weights."""

    generator_id: Name
    incarnation: Name


class WeightsLayout(Message):
    """The publisher's reply to `Join`: what every publication of this learner consists of."""

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
    """A generator is in the group of this number, or `problem` says why it is not."""

    generator_id: Name
    group_number: int
    problem: str = ""


# -- one version -------------------------------------------------------------------------------------------------------


class Offer(Message):
    """Offers the weights of `version`, whose digest is known.

    They lie in the learner's memory, in arena `slot` of `file`, which has been written `writes` times. Or, with a `group_number`,
    they are broadcast in pieces of `piece_bytes`. Or, with a `transfer`, deltas that lead to them follow in parts (`DeltaPart`).
    """

    version: PolicyVersion
    digest: str
    file: str = ""
    slot: int = 0
    writes: int = 0
    group_number: int = 0
    piece_bytes: int = 0
    transfer: int = 0
    """Number of the transfer, which no other has; 0: no deltas."""
    delta_bytes: tuple[int, ...] = ()
    """Of the payload of each delta, in the order in which they are applied."""


class DeltaPart(Message):
    """The payload has the bytes of a transfer from `start` on: all its deltas are one run of bytes."""

    max_payload_bytes: ClassVar[int] = 2**26

    transfer: int
    start: int


class PartTaken(Message):
    """A generator has the first `taken` bytes of a transfer. More are sent when some are taken."""

    generator_id: Name
    transfer: int
    taken: int


class Staged(Message):
    """A generator has received `version` into memory of its own; `digest` is of the bytes as received. If it is not what was
    offered, they are not loaded."""

    generator_id: Name
    version: PolicyVersion
    digest: str


class Swapped(Message):
    """A generator samples with `version` now; `checksum` is of the weights as its engine holds them."""

    generator_id: Name
    version: PolicyVersion
    checksum: str
    seconds: float


class Checked(Message):
    """The log-probs of the check sequences as a generator's engine finds them under `version`; empty: it cannot say."""

    generator_id: Name
    version: PolicyVersion
    scores: tuple[float, ...]


class SyncFailed(Message):
    """A generator could not stage or load a version. `poisoned`: its engine must be replaced."""

    generator_id: Name
    reason: str
    poisoned: bool
    transfer: int = 0
    """Of the deltas that failed; 0: it was something else."""


ToPublisher = Join | Alive | GroupFormed | Staged | Swapped | Checked | SyncFailed | PartTaken
ToReceiver = WeightsLayout | FormGroup | Offer | DeltaPart
