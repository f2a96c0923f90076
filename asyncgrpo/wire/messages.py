"""Everything that processes say to each other, as one tagged union of frozen structs.

Three conversations: generator and buffer (leases out, groups in), learner and buffer (batches out, versions in), and
learner and generator (weights). Add a field only at the end and with a default, so that two releases can talk.

Each kind says how long it may be, so that nobody reads a longer one: `codec.decode` refuses it by its size.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from asyncgrpo.types import (
    Count,
    Discarded,
    FinishReason,
    Lease,
    Name,
    Prompt,
    RewardHealth,
    Score,
    TensorInfo,
    VersionSpan,
    WeightVersion,
)

PROTOCOL = 1
REWARDS_PAUSED = "rewards_paused"
"""Reason of a lease that ended because no completion could be scored, which costs its prompt nothing."""
PROMPT_BYTES = 2**22
"""Longest header that holds a prompt: half a million tokens and their text."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of all messages; the struct's name is its tag."""

    max_header_bytes: ClassVar[int] = 2**16
    max_payload_bytes: ClassVar[int] = 0


# -- generator -> buffer ---------------------------------------------------------------------------------------------


class Hello(Message):
    """The first word of a generator, and again after it lost touch. Ends every lease of its earlier incarnations."""

    protocol: int
    generator_id: Name
    incarnation: Name
    window: int
    """Training groups it will work on at once."""


class Serving(Message):
    """These weights sample the generator's next token. Sent after every change, and as the heartbeat."""

    generator_id: Name
    version: WeightVersion | None
    """None: no published weights yet."""
    rewards: RewardHealth = RewardHealth()


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scored answer without its arrays."""

    index: Count
    num_tokens: Count
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    score: Score
    seed: int = 0


class Deliver(Message):
    """A completed group. The payload holds, answer after answer, the token ids (int32) and then the log-probs (float32)."""

    max_header_bytes: ClassVar[int] = PROMPT_BYTES
    max_payload_bytes: ClassVar[int] = 2**28

    group_id: Name
    lease_id: Name
    attempt: Count
    order: Count
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


# -- buffer -> generator ---------------------------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello."""

    protocol: int


class SayHello(Message):
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
    """These leases are over: stop their answers."""

    lease_ids: tuple[str, ...]
    reason: str


class Farewell(Message):
    """The run is over: close the engine and end."""


# -- learner -> buffer -----------------------------------------------------------------------------------------------


class Take(Message):
    """Ask for the groups of one optimizer step that starts at `version`, which every generator serves."""

    step: Count
    version: WeightVersion


class Published(Message):
    """Every generator serves `version`; the groups of the step before it are trained."""

    version: WeightVersion


class RequestEval(Message):
    """Answer the held-out prompts with whatever weights are served."""

    step: Count


class TakeSnapshot(Message):
    """Ask for what a checkpoint must hold of the buffer."""

    published: WeightVersion | None = None
    """The newest version that every generator serves: the snapshot calls the groups of the steps before it trained."""


class Saved(Message):
    """The checkpoint of this step is on the disk."""

    step: Count


class LastEvals(Message):
    """No more batches are wanted: grant no training leases, and answer NoMore once no evaluation is under way."""


class Finished(Message):
    """The learner is done; the buffer may end."""


# -- buffer -> learner -----------------------------------------------------------------------------------------------


class EvalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished evaluation, tagged with the versions that answered: none, if every prompt failed."""

    step: int
    oldest: WeightVersion | None
    newest: WeightVersion | None
    answers: int
    reward_mean: float | None
    """Over scored answers; None when none was scored."""
    failures: dict[str, int]
    answer_length_mean: float | None
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
    counters: dict[str, float] = {}
    evals: tuple[EvalResult, ...] = ()


class Snapshot(Message):
    """What a checkpoint must hold of the buffer."""

    max_header_bytes: ClassVar[int] = 2**24

    state: dict[str, Any]
    draining: bool = False
    """The run is to end."""
    failing: bool = False
    """Because it is given up."""
    counters: dict[str, float] = {}
    """As in a batch, of the same moment as the state."""


# -- driver -> buffer ------------------------------------------------------------------------------------------------


class Drain(Message):
    """Grant no more leases and tell the learner to stop after its current step. The learner says it before its last
    checkpoint, where it cannot go on."""

    reason: str
    is_failure: bool = False
    """The run is given up."""


class GeneratorLost(Message):
    """This generator is of no use any more; its leases are free again.

    The driver says it of one whose process is gone, to the buffer and to the learner's first rank; that rank says it to the
    buffer of one that a publication left out, which may live and comes back with another Hello.
    """

    generator_id: Name
    incarnation: Name = ""
    """Of the one that is meant; empty: whoever has the name."""
    reason: str = "its process ended"


# -- any process -> driver -------------------------------------------------------------------------------------------


class Pulse(Message):
    """This process lives. Sent every second by a thread of its own."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    incarnation: str
    pid: int
    waits: dict[str, float]
    """What it waits for, by the names of `metrics.WAITS`: for how long, seconds."""
    loop_age_s: float | None
    """Since its main loop last went round; None: it has not begun to."""
    home: str = ""
    """A generator: the buffer that it works for."""
    step: int | None = None
    """The learner: optimizer steps done."""
    missing: tuple[Name, ...] = ()
    """Generators that it has lost touch with, as `<name>-<incarnation>`: the buffer, and the learner's first rank."""


# -- driver -> any process -------------------------------------------------------------------------------------------


class DumpStacks(Message):
    """Write the stack of every thread to your log."""

    reason: str


class Moved(Message):
    """To a generator: buffer and learner were started again and are found here now."""

    buffer_endpoint: str
    weights_endpoint: str


# -- weights: learner <-> generator ----------------------------------------------------------------------------------


class Join(Message):
    """A generator asks into the weight group: at its start, and whenever its group broke."""

    generator_id: Name
    incarnation: Name
    cause: str = "start"


class Assemble(Message):
    """Build the process group of this epoch: learner is rank 0."""

    epoch: int
    rank: int
    world: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class Muster(Message):
    """Who is there? Asked before a group is built, so that nobody waits in it for the dead."""

    epoch: int


class Present(Message):
    """Answer to Muster."""

    generator_id: Name
    epoch: int


class Offer(Message):
    """Weights of `version` follow as broadcasts of buckets, planned by `weights.layout.plan_buckets`."""

    max_header_bytes: ClassVar[int] = 2**24
    """Tens of thousands of tensors."""

    epoch: int
    version: WeightVersion
    tensors: tuple[TensorInfo, ...]
    bucket_bytes: int
    base: str = ""
    """Fingerprint of the weights into which these adapters are to be merged; empty: the tensors are whole weights."""


class Staged(Message):
    """All of `version` is here; `digest` is of the bytes as received."""

    generator_id: Name
    epoch: int
    version: WeightVersion
    digest: str
    merged: str = ""
    """Digest of what adapters and base were merged into; empty where whole weights were received."""


class Swap(Message):
    """The digests agree: sample with `version` from now on."""

    epoch: int
    version: WeightVersion


class Swapped(Message):
    """`version` samples now; `checksum` is of the weights as the engine holds them."""

    generator_id: Name
    epoch: int
    version: WeightVersion
    checksum: str
    seconds: float


class SyncFailed(Message):
    """The generator could not stage or apply `version`. `poisoned`: its engine must be replaced."""

    generator_id: Name
    epoch: int
    reason: str
    poisoned: bool


OfGenerator = Hello | Serving | Deliver | LeaseFailed | RewardFailed
OfLearnerOrDriver = (
    Take | Published | RequestEval | TakeSnapshot | Saved | LastEvals | Finished | Drain | GeneratorLost
)  # fmt: skip
ToBuffer = OfGenerator | OfLearnerOrDriver
ToPublisher = Join | Present | Staged | Swapped | SyncFailed
AnyMessage = (
    ToBuffer | ToPublisher
    | Welcome | SayHello | Grant | Ack | Nack | Cancel | Farewell
    | Batch | Waiting | NoMore | Snapshot
    | Muster | Assemble | Offer | Swap
    | Pulse | DumpStacks | Moved
)  # fmt: skip
