"""Messages between generators, buffer and learner: leases, groups and batches."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from asyncgrpo.types import (
    Count,
    Discarded,
    FinishReason,
    GeneratorSeconds,
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
"""The reason of a lease that ended because no completion could be scored. It costs the prompt nothing."""
OF_ONE_BATCH = "now_"
"""How the counters begin that are of one batch or one moment, and are never added up."""
PROMPT_BYTES = 2**22
"""The longest header that holds a prompt: half a million tokens and their text."""

# -- generator -> buffer -----------------------------------------------------------------------------------------------


class Register(Message):
    """A generator's first message, sent again after it lost touch. It ends every lease of earlier incarnations."""

    protocol: int
    generator_id: Name
    incarnation: Name
    window: int
    """Training groups that it works on at once."""


class Serving(Message):
    """Names the weights that sample the generator's next token. Sent after every change, and every second."""

    generator_id: Name
    version: PolicyVersion | None
    """None: no published weights yet."""
    rewards: RewardHealth = RewardHealth()
    seconds: GeneratorSeconds = GeneratorSeconds()


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scored completion without its arrays."""

    index: Count
    num_tokens: Count
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    score: Score
    seed: int = 0


class Deliver(Message):
    """A completed group. Its payload holds for each completion the token ids (int32), then the log-probs (float32)."""

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

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all completions."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def versions(self) -> list[PolicyVersion]:
        """Every version that sampled in this group, each once, oldest first."""
        return sorted({span.version for rollout in self.rollouts for span in rollout.spans})


class LeaseFailed(Message):
    """A generator could not finish a lease, which another may; or it cancelled the lease as it was told to."""

    generator_id: Name
    lease_id: Name
    reason: Name
    detail: str = ""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens sampled for it, if its group was to be trained."""


class RewardFailed(Message):
    """Reports a kind of failed reward call: when it is seen first, and again at ten times, a hundred times and so on."""

    generator_id: Name
    failure: Name
    """The name of the failure; for an exception, with type and place."""
    detail: str
    """The text of the last failure."""
    count: Count
    """Failures of this kind since the process began."""


OfGenerator = Register | Serving | Deliver | LeaseFailed | RewardFailed


# -- buffer -> generator -----------------------------------------------------------------------------------------------


class Welcome(Message):
    """The buffer's reply to Register."""

    protocol: int


class Reregister(Message):
    """Asks a generator to register again: the buffer does not know it, or not any more."""


class Grant(Message):
    """Grants a lease."""

    max_header_bytes: ClassVar[int] = PROMPT_BYTES

    lease: Lease


class Ack(Message):
    """The buffer has kept a group; the generator may forget it."""

    group_id: str
    lease_id: str


class Nack(Message):
    """The buffer refuses a group; the generator may forget it."""

    group_id: str
    lease_id: str
    reason: str


class Cancel(Message):
    """Asks a generator to stop sampling for these leases: they are over."""

    lease_ids: tuple[str, ...]
    reason: str


class Shutdown(Message):
    """Asks a generator to close its engine and end: the run is over."""


ToGenerator = Welcome | Reregister | Grant | Ack | Nack | Cancel | Shutdown


# -- learner -> buffer -------------------------------------------------------------------------------------------------


class Take(Message):
    """Asks for the groups of one optimizer step that starts at `version`, which every generator serves."""

    step: Count
    version: PolicyVersion
    shares_within: dict[int, float] = msgspec.field(default_factory=dict)
    """Of the step that made `version` (`StepReport`), for `buffer.max_lag: auto`. Empty: there was no step."""


class Published(Message):
    """Tells that every generator serves `version`: the groups of the step before it are trained."""

    version: PolicyVersion


class RequestEval(Message):
    """Asks for an evaluation: the held-out prompts are sampled with whatever weights are served."""

    step: Count


class TakeSnapshot(Message):
    """Asks for what a checkpoint must hold of the buffer."""

    published: PolicyVersion | None = None
    """The newest version that every generator serves; in the snapshot, the groups of the steps before it are trained."""


class Saved(Message):
    """Tells that the checkpoint of this step is on the disk."""

    step: Count


class LastEvals(Message):
    """Asks for no more training leases, and for NoMore once no evaluation is in flight."""


class Finished(Message):
    """Tells that the learner is done; the buffer may end."""


OfLearner = Take | Published | RequestEval | TakeSnapshot | Saved | LastEvals | Finished


# -- buffer -> learner -------------------------------------------------------------------------------------------------


class EvalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished evaluation."""

    step: int
    oldest: PolicyVersion | None
    """The oldest version that sampled; None: every prompt failed."""
    newest: PolicyVersion | None
    """The newest version that sampled; None: every prompt failed."""
    completions: int
    reward_mean: float | None
    """Over scored completions; None when none was scored."""
    failures: dict[str, int]
    completion_length_mean: float | None
    seconds: float


class Batch(Message):
    """The groups of one step. The payload holds the payloads of the groups, one after the other."""

    max_header_bytes: ClassVar[int] = 2**30
    max_payload_bytes: ClassVar[int] = 2**30

    step: int
    groups: tuple[Deliver, ...]
    payload_sizes: tuple[Count, ...]
    counters: dict[str, float]
    evals: tuple[EvalResult, ...]
    epoch: int


class Waiting(Message):
    """Tells that there is no batch yet; `what` names what is awaited."""

    max_header_bytes: ClassVar[int] = 2**24

    what: str
    evals: tuple[EvalResult, ...] = ()
    hopeless: str = ""
    """Why what is awaited will never come; the run ends with this sentence. Empty: it may come."""


class NoMore(Message):
    """Tells that no batch will come: every prompt is trained (`exhausted`), or the run ends as asked (`draining`) or
    because it is given up (`failing`)."""

    max_header_bytes: ClassVar[int] = 2**24

    why: Literal["exhausted", "draining", "failing"]
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    evals: tuple[EvalResult, ...] = ()


class Snapshot(Message):
    """What a checkpoint must hold of the buffer."""

    max_header_bytes: ClassVar[int] = 2**24

    state: dict[str, Any]
    draining: bool = False
    """Whether the run is to end."""
    failing: bool = False
    """Whether it ends because it is given up."""
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    """The totals that a batch has too, taken at the same moment as the state."""


ToLearner = Batch | Waiting | NoMore | Snapshot
