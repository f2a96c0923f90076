"""Leases out, groups in, batches on: what generators, buffer and learner say to each other."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from asyncgrpo.types import (
    Count,
    Discarded,
    FinishReason,
    Lease,
    Name,
    PolicyVersion,
    Prompt,
    RewardHealth,
    Score,
    VersionSpan,
)
from asyncgrpo.wire import Message

REWARDS_PAUSED = "rewards_paused"
"""Reason of a lease that ended because no completion could be scored, which costs its prompt nothing."""
PROMPT_BYTES = 2**22
"""Longest header that holds a prompt: half a million tokens and their text."""

# -- generator -> buffer -----------------------------------------------------------------------------------------------


class Register(Message):
    """The first word of a generator, and again after it lost touch. Ends every lease of its earlier incarnations."""

    protocol: int
    generator_id: Name
    incarnation: Name
    window: int
    """Training groups it will work on at once."""


class Serving(Message):
    """These weights sample the generator's next token. Sent after every change, and as the heartbeat."""

    generator_id: Name
    version: PolicyVersion | None
    """None: no published weights yet."""
    rewards: RewardHealth = RewardHealth()


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scored completion without its arrays."""

    index: Count
    num_tokens: Count
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    score: Score
    seed: int = 0


class Deliver(Message):
    """A completed group. Its payload: for each completion the token ids (int32), then the log-probs (float32)."""

    max_header_bytes: ClassVar[int] = PROMPT_BYTES
    max_payload_bytes: ClassVar[int] = 2**28

    group_id: Name
    lease_id: Name
    attempt: Count
    prompt_index: Count
    purpose: Literal["train", "eval"]
    prompt: Prompt
    rollouts: tuple[RolloutHeader, ...]
    generator_id: Name
    timings: dict[str, float]
    discarded: Discarded = Discarded()


class LeaseFailed(Message):
    """The generator could not finish this lease; another may. Or it was told to cancel it, and has."""

    generator_id: Name
    lease_id: Name
    reason: Name
    detail: str = ""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Sampled for it, if its group was to be trained."""


class RewardFailed(Message):
    """Reward calls of this kind fail at the generator. Sent for the first one, the tenth, the hundredth, and so on."""

    generator_id: Name
    failure: Name
    """Name of the failure; of an exception with its type and place."""
    detail: str
    """What the last of them said."""
    count: Count
    """Of this kind since the process began."""


# -- buffer -> generator -----------------------------------------------------------------------------------------------


class Welcome(Message):
    """Reply to Register."""

    protocol: int


class Reregister(Message):
    """The buffer does not know this generator (any more); it is to introduce itself again."""


class Grant(Message):
    """Permission to generate one group."""

    max_header_bytes: ClassVar[int] = PROMPT_BYTES

    lease: Lease


class Ack(Message):
    """The group is in the buffer's keeping; the generator may forget it."""

    group_id: str
    lease_id: str


class Nack(Message):
    """The group is not wanted; the generator may forget it."""

    group_id: str
    lease_id: str
    reason: str


class Cancel(Message):
    """These leases are over: stop their completions."""

    lease_ids: tuple[str, ...]
    reason: str


class Shutdown(Message):
    """The run is over: close the engine and end."""


# -- learner -> buffer -------------------------------------------------------------------------------------------------


class Take(Message):
    """Ask for the groups of one optimizer step that starts at `version`, which every generator serves."""

    step: Count
    version: PolicyVersion


class Published(Message):
    """Every generator serves `version`; the groups of the step before it are trained."""

    version: PolicyVersion


class RequestEval(Message):
    """Sample the held-out prompts with whatever weights are served."""

    step: Count


class TakeSnapshot(Message):
    """Ask for what a checkpoint must hold of the buffer."""

    published: PolicyVersion | None = None
    """The newest version that every generator serves: the snapshot calls the groups of the steps before it trained."""


class Saved(Message):
    """The checkpoint of this step is on the disk."""

    step: Count


class LastEvals(Message):
    """No more batches are wanted: grant no training leases, and completion NoMore once no evaluation is under way."""


class Finished(Message):
    """The learner is done; the buffer may end."""


# -- buffer -> learner -------------------------------------------------------------------------------------------------


class EvalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished evaluation, tagged with the versions that answered: none, if every prompt failed."""

    step: int
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    completions: int
    reward_mean: float | None
    """Over scored completions; None when none was scored."""
    failures: dict[str, int]
    completion_length_mean: float | None
    seconds: float


class Batch(Message):
    """The groups of one step. The payload holds each group's payload, one after the other."""

    max_header_bytes: ClassVar[int] = 2**30
    max_payload_bytes: ClassVar[int] = 2**30

    step: int
    groups: tuple[Deliver, ...]
    payload_sizes: tuple[Count, ...]
    counters: dict[str, float]
    evals: tuple[EvalResult, ...]
    epoch: int


class Waiting(Message):
    """Nothing to take yet; `what` names what is awaited."""

    max_header_bytes: ClassVar[int] = 2**24

    what: str
    evals: tuple[EvalResult, ...] = ()
    hopeless: str = ""
    """Why what is awaited will not come: the run is to end with this sentence. Empty: it may."""


class NoMore(Message):
    """Every prompt is trained (`exhausted`), or the run is to end: asked to (`draining`), or given up (`failing`)."""

    max_header_bytes: ClassVar[int] = 2**24

    why: Literal["exhausted", "draining", "failing"]
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    evals: tuple[EvalResult, ...] = ()


class Snapshot(Message):
    """What a checkpoint must hold of the buffer."""

    max_header_bytes: ClassVar[int] = 2**24

    state: dict[str, Any]
    draining: bool = False
    """The run is to end."""
    failing: bool = False
    """Because it is given up."""
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    """As in a batch, of the same moment as the state."""
