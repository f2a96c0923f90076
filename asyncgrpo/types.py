"""The nouns of asyncgrpo: what a prompt, a lease, a group and a weight version are.

Everything here is frozen. The structs made of plain values are also the schema on the wire; the two that hold arrays
(`Rollout`, `Group`) are packed by `wire/codec.py`. Nothing here does anything.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A whole number that every format and language we write for holds exactly. Checked where it is decoded."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""An id, or a reason in a word. Short, so that whatever repeats it stays short."""

FinishReason = Literal["stop", "length", "abort"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that travel: immutable, by keyword, and strict about unknown fields."""


class PolicyVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One set of published weights. A policy version is never reused: `lineage` changes whenever a learner starts again."""

    lineage: Count
    number: Count
    """Optimizer steps behind these weights."""

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """The inverse of `str`; engines carry versions as text. Raises ValueError."""
        lineage, _, number = text.partition(".")
        return cls(int(lineage), int(number))


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens `start` (included) to `end` (excluded) of one completion were sampled by `version`."""

    version: PolicyVersion
    start: Count
    end: Count


class Sampling(Frozen):
    """How completions are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_tokens: int = 256
    """Longest completion, tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the token is kept as its last token."""


class Prompt(Frozen):
    """A tokenised question and what its reward needs."""

    prompt_id: str
    """Stable over restarts and unique in a run, for example `train/17` (row 17 of the training file)."""
    token_ids: tuple[int, ...]
    text: str = ""
    """The question before tokenisation, for reward functions that ask for `prompt` and for people."""
    answer: Any = None
    """Ground truth as the data file gave it: anything JSON can hold."""
    source: str = ""
    """`data_source` of the row; chooses the rule when rewards are rule-based."""
    info: dict[str, Any] = {}
    """`extra_info` of the row."""


class Lease(Frozen):
    """Permission to generate one group."""

    lease_id: str
    group_id: str
    attempt: int
    """0 for the first lease of a group; each later lease of the same group adds 1."""
    prompt_index: int
    """Position in the run's prompt order; the oldest group has the smallest."""
    purpose: Literal["train", "eval"]
    prompt: Prompt
    num_completions: int
    sampling: Sampling
    seed: int
    """Seeds the sampling of this group; completion i uses `seed + i`."""
    with_greedy: bool = False
    """One completion more, with index `num_completions`, is sampled greedily: a baseline that is not trained."""
    min_completions: int = 0
    """A group that lost completions is wanted if it has so many, the greedy one not counted; 0: all of `num_completions`."""
    cut_after_s: float | None = None
    """Seconds from the lease at which a group that can do without the completions still missing does; None: it waits."""


class Score(Frozen):
    """What a reward said of one completion: a number, or the name of what went wrong."""

    value: float | None = None
    """None exactly when `failure` is given."""
    failure: Name | None = None
    """`timeout`, `crash`, `exception`, `not_finite`, `too_large`, `bad_type`, `unknown_source` or `aborted`."""
    parts: dict[str, float] = {}
    """Named parts of a dict reward; their means are in every step event and go to the loggers."""
    detail: str = ""
    """For a person: the exception's text, for example. At most 500 characters."""
    seconds: float = 0.0


class RewardHealth(Frozen):
    """How the reward calls of one generator went since its process began."""

    worked: Count = 0
    """Calls that gave a score."""
    failed: Count = 0
    failing_s: float = 0.0
    """Since the first failure after the last call that worked; 0: the last one did."""
    probe_in_s: float | None = None
    """Until the next probe while no other call is made; None: all are."""
    last: str = ""
    """What the last failure said."""


@dataclass(frozen=True)
class Completion:
    """One completion as the engine gave it."""

    index: int
    """Which of the `num_completions` of the request this is, from 0."""
    token_ids: np.ndarray
    """[L] int32, sampled tokens only, an end token included."""
    logprobs: np.ndarray
    """[L] float32, log of the probability with which each token was sampled: of logits / temperature, in nats, over
    the whole vocabulary (before top-p and top-k)."""
    spans: tuple[VersionSpan, ...]
    """Partition [0, L); versions never decrease."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout:
    """One scored completion."""

    completion: Completion
    score: Score
    seed: int = 0
    """It was sampled with, by engines that can."""


class Discarded(Frozen):
    """What was sampled for a group and is not in it. Counts are of completions."""

    tokens: int = 0
    """Sampled in all of them."""
    retried: int = 0
    """Sampled again, because their request or their reward had failed."""
    failed: int = 0
    """Failed at every try, and a completion of the reserve took their place."""
    spare: int = 0
    """Launched in reserve, and not needed."""
    censored: int = 0
    """Not finished when the group was cut: the long ones, as a rule, so the group's lengths are biased."""


@dataclass(frozen=True)
class Group:
    """The scored completions of one prompt: the unit of admission, of the wire, of eviction and of the baseline."""

    group_id: str
    lease_id: str
    attempt: int
    prompt_index: int
    purpose: Literal["train", "eval"]
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    generator_id: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `generate`, `reward`."""
    discarded: Discarded = field(default_factory=Discarded)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all completions."""
        return sum(len(r.completion.token_ids) for r in self.rollouts)

    @property
    def versions(self) -> list[PolicyVersion]:
        """Every version that sampled in this group, each once, oldest first."""
        return sorted({span.version for r in self.rollouts for span in r.completion.spans})


class TensorInfo(Frozen):
    """One tensor of the published weights, in Hugging Face's naming."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype, for example `bfloat16`."""
