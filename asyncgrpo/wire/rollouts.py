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
"""Reason of a lease that ended because rewards were paused. It costs the prompt nothing."""
OF_ONE_BATCH = "now_"
"""Prefix of counters that describe one batch or one moment and are never summed."""
PROMPT_BYTES = 2**22
"""Maximum header with a prompt: half a million tokens and their text."""
TEXTS_BYTES = 2**26
"""Maximum header with the completions of an evaluation as text."""

# -- generator -> buffer -----------------------------------------------------------------------------------------------


class Register(Message):
    """Registers a generator, at its start and after it lost touch. It ends every lease of earlier incarnations."""

    generator_id: Name
    incarnation: Name
    window: int
    """Training groups in progress at once."""


class Serving(Message):
    """Heartbeat of a generator, with the version that samples its next token. Sent every second and after every swap."""

    max_header_bytes: ClassVar[int] = 2**20
    """Room for tens of thousands of leases."""

    generator_id: Name
    version: PolicyVersion | None
    """None: no weights of a learner yet."""
    rewards: RewardHealth = RewardHealth()
    seconds: GeneratorSeconds = GeneratorSeconds()
    token_s: Seconds | None = None
    """Present time of a token of a running completion; None: nothing runs, weights are swapped, or it is unknown."""
    running: Count = 0
    """Completions that are sampled at once."""
    leases: tuple[str, ...] | None = None
    """Those it works on or whose groups are not acknowledged yet; None: unknown."""


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scored completion, without its arrays."""

    index: Count
    num_tokens: Count
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    score: Score
    seed: int = 0
    observed: tuple[tuple[Count, Count], ...] = ()
    """Per observation: number of sampled tokens before it, and number of its tokens."""
    text: str = ""
    """As in `Rollout`."""
    sampled_text: str = ""
    """As in `Rollout`."""
    kept: Count = 0
    """Ids of all `KeptTokens`; 0: they are not recorded."""
    routes: tuple[Count, Count, Count] = (0, 0, 0)
    """Shape of `Completion.routes`; zeros: they are not recorded."""
    routes_bytes: Annotated[int, msgspec.Meta(ge=0, multiple_of=4)] = 0
    """Their size in the payload, filled up to a multiple of 4."""
    expert_bytes: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    """Size of an expert in them: 1 if all are below 256."""
    teacher: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0
    """Log-probs of a served teacher per sampled token: its own and those of the most likely tokens; 0: there is none."""

    @property
    def num_observed(self) -> int:
        return sum(size for _, size in self.observed)

    @property
    def num_bytes(self) -> int:
        """Size of its arrays in the payload, bytes."""
        kept = self.num_tokens + self.kept if self.kept else 0
        taught = self.num_tokens * (2 * self.teacher - 1) if self.teacher else 0  # ids included
        return 8 * self.num_tokens + 4 * (self.num_observed + kept + taught) + self.routes_bytes


class Deliver(Message):
    """A complete group.

    The payload holds for each completion the token ids (int32), then the log-probs (float32). The token ids of all
    observations (int32) follow, then for each completion the counts and ids of its kept tokens (int32), the teacher's
    log-probs (float32, with ids as int32 between both kinds), and its routes (uint8 or int16).
    """

    max_header_bytes: ClassVar[int] = TEXTS_BYTES
    max_payload_bytes: ClassVar[int] = 2**29

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
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def num_observed(self) -> int:
        return sum(rollout.num_observed for rollout in self.rollouts)

    @property
    def versions(self) -> list[PolicyVersion]:
        """All versions that sampled in this group, sorted, oldest first."""
        return sorted({span.version for rollout in self.rollouts for span in rollout.spans})


SCORED_AT_ONCE_S = 0.1
"""Scoring time after which a sampled group frees its place in the generator's window."""


class AwaitsScores(Message):
    """Reports that only scores are missing for a lease: it frees its place in the generator's window."""

    generator_id: Name
    lease_id: Name


class LeaseFailed(Message):
    """Reports a lease that failed at a generator and may be granted again, or that was cancelled on request."""

    generator_id: Name
    lease_id: Name
    reason: Name
    detail: str = ""
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens sampled for it; 0 for an evaluation."""


class RewardFailed(Message):
    """Reports the 1st, 10th, 100th, ... failed reward call of a kind."""

    generator_id: Name
    failure: Name
    """Name of the failure; for an exception, with type and place."""
    detail: str
    """Text of the last failure."""
    count: Count
    """Failures of this kind since the process started."""


OfGenerator = Register | Serving | Deliver | AwaitsScores | LeaseFailed | RewardFailed


# -- buffer -> generator -----------------------------------------------------------------------------------------------


class Reregister(Message):
    """Asks an unknown generator to register again."""


class Grant(Message):
    """Grants a lease."""

    max_header_bytes: ClassVar[int] = PROMPT_BYTES

    lease: Lease


class Ack(Message):
    """Acknowledges a stored group. The generator may forget it."""

    lease_id: str


class Nack(Message):
    """Refuses a group. The generator may forget it."""

    lease_id: str
    reason: str


class Cancel(Message):
    """Asks a generator to stop sampling for these leases, which have ended."""

    lease_ids: tuple[str, ...]
    reason: str


class Shutdown(Message):
    """Asks a generator to close its engine and exit: the run is over."""


ToGenerator = Reregister | Grant | Ack | Nack | Cancel | Shutdown


# -- learner -> buffer -------------------------------------------------------------------------------------------------


class Take(Message):
    """Requests the groups of the optimizer step that starts at `version`. Generators may serve it or an older one.

    Sent again until the reply arrives, as `LastEvals` is. The buffer then repeats the reply.
    """

    version: PolicyVersion
    shares_within: dict[int, float] = msgspec.field(default_factory=dict)
    """Of the step that made `version` (`StepReport`), for `buffer.max_lag: auto`; empty before the first step."""
    evaluate: Count | None = None
    """Step of the last `RequestEval`, which may be lost; None: there was none."""


class Trained(Message):
    """Reports that the learner has made `version`: the groups of the step before it are trained."""

    version: PolicyVersion


class RequestEval(Message):
    """Requests an evaluation, once: held-out prompts are sampled with the weights of this step or later ones."""

    step: Count


class TakeSnapshot(Message):
    """Requests the buffer's part of a checkpoint. Sent again until the reply arrives."""

    trained: PolicyVersion | None = None
    """The learner's version. In the snapshot, the groups of the steps before it are trained."""


class Saved(Message):
    """Reports that the checkpoint of this step is on disk."""

    step: Count


class LastEvals(Message):
    """Stops training leases, and requests NoMore once all evaluations are finished."""

    evaluate: Count | None = None
    """As in `Take`."""


class Finished(Message):
    """Reports that the learner is done, so the buffer may exit."""


OfLearner = Take | Trained | RequestEval | TakeSnapshot | Saved | LastEvals | Finished


# -- buffer -> learner -------------------------------------------------------------------------------------------------


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of a finished evaluation on one suite, that is, one held-out file."""

    prompts: int
    completions: int
    oldest: PolicyVersion | None
    """Oldest version that sampled; None: every prompt failed."""
    newest: PolicyVersion | None
    """Newest version that sampled; None: every prompt failed."""
    failures: dict[str, int]
    completion_length_mean: float | None
    numbers: dict[str, tuple[float, float | None, float | None]]
    """`reward`, `pass@k` and `maj@n`, each with its 95 % interval (`buffer.evaluation.Estimate`)."""
    parts: dict[str, float]
    """Mean of each named reward part, over the completions that have it."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of an event or a command's output. `version` is the newest that sampled."""
        fields = msgspec.structs.asdict(self)
        versions = [str(version) for version in (fields.pop("oldest"), fields.pop("newest")) if version is not None]
        return {"version": versions[-1] if versions else None, "versions_sampled": sorted(set(versions)), **fields}


class EvalResult(SuiteResult, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished evaluation: all suites together, and each."""

    step: int
    seconds: float
    suites: dict[str, SuiteResult] = {}

    @property
    def reward_mean(self) -> float | None:
        """Mean over scored completions; None: none was scored."""
        return self.numbers["reward"][0] if "reward" in self.numbers else None


class Batch(Message):
    """The groups of one step. The payload concatenates the payloads of the groups."""

    max_header_bytes: ClassVar[int] = 2**30
    max_payload_bytes: ClassVar[int] = 2**36
    """8 billion tokens, or 150 million with the experts of 48 layers."""

    version: PolicyVersion
    """Of the request."""
    groups: tuple[Deliver, ...]
    payload_sizes: tuple[Count, ...]
    counters: dict[str, float]
    evals: tuple[EvalResult, ...]


class Waiting(Message):
    """Reports that a batch or snapshot is not ready; `what` names the missing part."""

    max_header_bytes: ClassVar[int] = 2**24

    what: str
    evals: tuple[EvalResult, ...] = ()
    """Those finished since the last `Batch`, each time, because a `Waiting` may be lost."""
    hopeless: str = ""
    """Reason why the wait will never end; the run fails with it. Empty: it may end."""
    of_snapshot: bool = False
    is_paused: bool = False
    """True if the operator paused the run, so that the wait has no limit."""


class NoMore(Message):
    """Reports that there are no more batches: every prompt is trained (`exhausted`), or the run stops on request
    (`draining`) or after a failure (`failing`)."""

    max_header_bytes: ClassVar[int] = 2**24

    why: Literal["exhausted", "draining", "failing"]
    version: PolicyVersion | None = None
    """Of the request; None: it was `LastEvals`."""
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    evals: tuple[EvalResult, ...] = ()


class Snapshot(Message):
    """The buffer's part of a checkpoint."""

    max_header_bytes: ClassVar[int] = 2**24

    state: dict[str, Any]
    draining: bool = False
    """True if the run is to end."""
    failing: bool = False
    """True if it ends because of a failure."""
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    """Totals as in a batch, of the same moment as the state."""
    trained: PolicyVersion | None = None
    """Of the request."""


ToLearner = Batch | Waiting | NoMore | Snapshot
