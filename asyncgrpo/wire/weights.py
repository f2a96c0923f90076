"""Messages of a publication, between the publisher (learner, rank 0) and the receivers (generators).

`group_number` in them counts how often the weight group was formed. A message of an earlier group counts for nothing.
"""

from typing import ClassVar, Literal

from asyncgrpo.types import Name, PolicyVersion, TensorInfo
from asyncgrpo.wire import Message

# -- who is in the weight group ----------------------------------------------------------------------------------------


class Join(Message):
    """A generator asks to be in the weight group: at its start, and whenever its group broke."""

    generator_id: Name
    incarnation: Name
    cause: str = "start"


class Ping(Message):
    """Asks whether a generator is there, before a group is formed: no member then waits in it for a dead one."""

    group_number: int


class Pong(Message):
    """A generator's reply to Ping."""

    generator_id: Name
    group_number: int


class FormGroup(Message):
    """Asks a generator to join the process group of this number, in which the learner is rank 0."""

    group_number: int
    rank: int
    world: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl", "shared_memory"]
    timeout_s: float


# -- one version -------------------------------------------------------------------------------------------------------


class Offer(Message):
    """Announces broadcasts of the weights of `version`, in the buckets of `weights.broadcast.plan_buckets`."""

    max_header_bytes: ClassVar[int] = 2**24
    """Room for tens of thousands of tensors."""

    group_number: int
    version: PolicyVersion
    tensors: tuple[TensorInfo, ...]
    bucket_bytes: int
    base: str = ""
    """Fingerprint of the weights into which these adapters are to be merged; empty: the tensors are whole weights."""


class Staged(Message):
    """A generator has received all of `version`; `digest` is of the bytes as received."""

    generator_id: Name
    group_number: int
    version: PolicyVersion
    digest: str
    merged: str = ""
    """Digest of what adapters and base were merged into; empty where whole weights were received."""


class Swap(Message):
    """Asks a generator to sample with `version` from now on: the digests agree."""

    group_number: int
    version: PolicyVersion


class Swapped(Message):
    """A generator samples with `version` now; `checksum` is of the weights as its engine holds them."""

    generator_id: Name
    group_number: int
    version: PolicyVersion
    checksum: str
    seconds: float


class SyncFailed(Message):
    """A generator could not stage or load a version. `poisoned`: its engine must be replaced."""

    generator_id: Name
    group_number: int
    reason: str
    poisoned: bool


ToPublisher = Join | Pong | Staged | Swapped | SyncFailed
ToReceiver = Ping | FormGroup | Offer | Swap
