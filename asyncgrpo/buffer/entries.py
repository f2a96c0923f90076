"""A group on its way through the buffer, from its lease to its training."""

import enum
from dataclasses import dataclass, field

from asyncgrpo.types import Lease, Prompt, WeightVersion
from asyncgrpo.wire.messages import Deliver


class State(enum.Enum):
    """Where a group is. A group that is trained, filtered, dropped or requeued is forgotten."""

    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass
class Entry:
    """One group on its way."""

    order: int
    prompt: Prompt
    attempt: int
    lease: Lease
    holder: str
    leased_at_s: float
    oldest: WeightVersion
    """While leased: the version at the lease. Then: the oldest version that sampled in it."""
    newest: WeightVersion = field(init=False)
    """The same with the newest version that sampled in it."""
    state: State = State.LEASED
    message: Deliver | None = None
    payload: bytes | memoryview = b""
    limit_s: float = 0.0
    """The lease is over so many seconds after `leased_at_s`."""
    masked: int = 0
    """Sampled tokens that have no weight in the step that took it."""

    def __post_init__(self) -> None:
        self.newest = self.oldest

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, once the group is here."""
        return sum(r.num_tokens for r in self.message.rollouts) if self.message is not None else 0
