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
    Seconds,
    VersionSpan,
)
from asyncgrpo.wire import Message

REWARDS_PAUSED = "rewards_paused"
"""The reason of a lease that ended because no completion could be scored. It costs the prompt nothing."""
OF_ONE_BATCH = "now_"
"""How the counters begin that are of one batch or one moment, and are never added up."""
PROMPT_BYTES = 2**22
"""The longest header that holds a prompt: half a million tokens and their text."""
TEXTS_BYTES = 2**26
"""The longest header that holds the completions of an evaluation as text too."""

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
    """None: no weights of a learner yet."""
    rewards: RewardHealth = RewardHealth()
    seconds: GeneratorSeconds = GeneratorSeconds()
    token_s: Seconds | None = None
    """How long a token of a running completion takes at present; None: nothing runs, weights change, or it is not known."""
    running: Count = 0
    """Completions that are sampled at once."""


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scored completion without its arrays."""

    index: Count
    num_tokens: Count
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    score: Score
    seed: int = 0
    observed: tuple[tuple[Count, Count], ...] = ()
    """Of each observation: the sampled tokens before it, and its own tokens."""
    text: str = ""
    """As in `Rollout`."""

    @property
    def num_observed(self) -> int:
        """Tokens of all its observations."""
        return sum(size for _, size in self.observed)


class Deliver(Message):
    """A completed group.

    Its payload holds for each completion the token ids (int32), then the log-probs (float32); and after those of all
    completions the token ids of their observations (int32).
    """

    max_header_bytes: ClassVar[int] = TEXTS_BYTES
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
    def num_observed(self) -> int:
        """Tokens that environments said in all completions."""
        return sum(rollout.num_observed for rollout in self.rollouts)

    @property
    def versions(self) -> list[PolicyVersion]:
        """Every version that sampled in this group, each once, oldest first."""
        return sorted({span.version for rollout in self.rollouts for span in rollout.spans})


SCORED_AT_ONCE_S = 0.1
"""Scores that take longer than this let another group begin."""


class AwaitsScores(Message):
    """Tells that every completion of a lease is sampled and only scores are missing: it takes no place of the generator."""

    generator_id: Name
    lease_id: Name


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


OfGenerator = Register | Serving | Deliver | AwaitsScores | LeaseFailed | RewardFailed


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
    """Asks for the groups of one optimizer step that starts at `version`. Generators may serve it, or an older one."""

    step: Count
    version: PolicyVersion
    shares_within: dict[int, float] = msgspec.field(default_factory=dict)
    """Of the step that made `version` (`StepReport`), for `buffer.max_lag: auto`. Empty: there was no step."""


class Trained(Message):
    """Tells that the learner has made `version`: the groups of the step before it are trained."""

    version: PolicyVersion


class RequestEval(Message):
    """Asks for an evaluation: the held-out prompts are sampled with the weights of this step, or later ones."""

    step: Count


class TakeSnapshot(Message):
    """Asks for what a checkpoint must hold of the buffer."""

    trained: PolicyVersion | None = None
    """The learner's version; in the snapshot, the groups of the steps before it are trained."""


class Saved(Message):
    """Tells that the checkpoint of this step is on the disk."""

    step: Count


class LastEvals(Message):
    """Asks for no more training leases, and for NoMore once no evaluation is in flight."""


class Finished(Message):
    """Tells that the learner is done; the buffer may end."""


OfLearner = Take | Trained | RequestEval | TakeSnapshot | Saved | LastEvals | Finished


# -- buffer -> learner -------------------------------------------------------------------------------------------------


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a finished evaluation says of one of its suites: of one held-out file."""

    prompts: int
    completions: int
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    failures: dict[str, int]
    completion_length_mean: float | None
    numbers: dict[str, tuple[float, float | None, float | None]]
    """`reward`, `pass@k` and `maj@k`, each with its 95 % interval (`algorithms.estimates.Estimate`)."""
    parts: dict[str, float]
    """Mean of each named part of the rewards, over the completions that have it."""

    def fields(self) -> dict[str, Any]:
        """What an event, or a command, says of it: `version` is the newest that sampled."""
        fields = msgspec.structs.asdict(self)
        versions = [str(version) for version in (fields.pop("oldest"), fields.pop("newest")) if version is not None]
        return {"version": versions[-1] if versions else None, "versions_sampled": sorted(set(versions)), **fields}


class EvalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished evaluation, of all suites together and of each."""

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
    suites: dict[str, SuiteResult] = msgspec.field(default_factory=dict)


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
    """Tells that there is no batch, or no snapshot, yet; `what` names what is awaited."""

    max_header_bytes: ClassVar[int] = 2**24

    what: str
    evals: tuple[EvalResult, ...] = ()
    hopeless: str = ""
    """Why what is awaited will never come; the run ends with this sentence. Empty: it may come."""
    of_snapshot: bool = False
    is_paused: bool = False
    """A person has paused the run, so the wait has no limit."""


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
