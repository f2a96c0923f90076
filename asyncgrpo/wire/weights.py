"""A publication: what the publisher (learner, rank 0) and the receivers (generators) say to each other."""

from typing import ClassVar, Literal

from asyncgrpo.types import Name, PolicyVersion, TensorInfo
from asyncgrpo.wire import Message

# -- who is in the weight group ----------------------------------------------------------------------------------------


class Join(Message):
    """A generator asks into the weight group: at its start, and whenever its group broke."""

    generator_id: Name
    incarnation: Name
    cause: str = "start"


class Ping(Message):
    """Who is there? Asked before a group is built, so that nobody waits in it for the dead."""

    epoch: int


class Pong(Message):
    """Reply to Ping."""

    generator_id: Name
    epoch: int


class FormGroup(Message):
    """Build the process group of this epoch: learner is rank 0."""

    epoch: int
    rank: int
    world: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


# -- one version -------------------------------------------------------------------------------------------------------


class Offer(Message):
    """Weights of `version` follow as broadcasts of buckets, planned by `weights.layout.plan_buckets`."""

    max_header_bytes: ClassVar[int] = 2**24
    """Tens of thousands of tensors."""

    epoch: int
    version: PolicyVersion
    tensors: tuple[TensorInfo, ...]
    bucket_bytes: int
    base: str = ""
    """Fingerprint of the weights into which these adapters are to be merged; empty: the tensors are whole weights."""


class Staged(Message):
    """All of `version` is here; `digest` is of the bytes as received."""

    generator_id: Name
    epoch: int
    version: PolicyVersion
    digest: str
    merged: str = ""
    """Digest of what adapters and base were merged into; empty where whole weights were received."""


class Swap(Message):
    """The digests agree: sample with `version` from now on."""

    epoch: int
    version: PolicyVersion


class Swapped(Message):
    """`version` samples now; `checksum` is of the weights as the engine holds them."""

    generator_id: Name
    epoch: int
    version: PolicyVersion
    checksum: str
    seconds: float


class SyncFailed(Message):
    """The generator could not stage or apply `version`. `poisoned`: its engine must be replaced."""

    generator_id: Name
    epoch: int
    reason: str
    poisoned: bool
