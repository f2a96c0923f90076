"""The data types that all packages share: policy versions, prompts, leases, completions, scores and groups.

All of them are frozen. Those made of plain values are also the schema on the wire; a `Group`, which holds arrays, is
packed by `wire/groups.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A whole number that JSON and every other format in use holds exactly. It is checked when it is decoded."""

Seconds = Annotated[float, msgspec.Meta(ge=0)]

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""An id, or a reason in a word. It is short, because other messages repeat it."""

FinishReason = Literal["stop", "length", "abort"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that are sent: immutable, made by keyword, and strict about unknown fields."""


class PolicyVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One set of published weights. No policy version is used twice: every start of a learner has another `lineage`."""

    lineage: Count
    number: Count
    """Optimizer steps that made these weights."""

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """The inverse of `str`; engines carry versions as text. Raises ValueError."""
        lineage, _, number = text.partition(".")
        return cls(int(lineage), int(number))


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens `start` (included) to `end` (excluded) of one completion, which `version` sampled."""

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
    """Each of these tokens ends a completion, and is kept as its last token."""


class Prompt(Frozen):
    """A tokenised prompt and what its reward needs."""

    prompt_id: str
    """An id that is stable over restarts and unique in a run, for example `train/17` (row 17 of the training file)."""
    token_ids: tuple[int, ...]
    """Empty for one that is longer than `data.max_prompt_tokens`, which is dropped when it is due."""
    text: str = ""
    """The prompt before tokenisation, where the row has a text."""
    turns: tuple[dict[str, Any], ...] = ()
    """The prompt before tokenisation, where the row has chat turns, each with `role` and `content`."""
    answer: Any = None
    """The ground truth as the data file has it: anything that JSON can hold."""
    source: str = ""
    """`data_source` of the row; it chooses the rule when rewards are rule-based."""
    info: dict[str, Any] = {}
    """`extra_info` of the row, or its other columns."""


class Lease(Frozen):
    """Permission to generate one group."""

    lease_id: str
    group_id: str
    attempt: int
    """0 for the first lease of a group; each later lease of the same group adds 1."""
    prompt_index: int
    """The prompt's position in the run's order; the oldest group has the smallest."""
    purpose: Literal["train", "eval"]
    prompt: Prompt
    num_completions: int
    sampling: Sampling
    seed: int
    """The sampling seed of this group; completion i uses `seed + i`."""
    with_greedy: bool = False
    """Whether one completion more, with index `num_completions`, is sampled greedily: a baseline that is not trained."""
    min_completions: int = 0
    """A group with fewer completions is refused, the greedy one not counted; 0: it needs all `num_completions`."""
    cut_after_s: float | None = None
    """Seconds after which a group is cut: it does without completions that are missing, if it can. None: never."""


class Score(Frozen):
    """The result of a reward call for one completion: a number, or the name of a failure."""

    value: float | None = None
    """None exactly when `failure` is given."""
    failure: Name | None = None
    """One of the label values of `metrics.reward_failures_total`, such as `timeout`, `exception` or `unknown_source`."""
    parts: dict[str, float] = {}
    """The named parts of a dict reward. Their means are in every step event and go to the loggers."""
    detail: str = ""
    """A text for people, such as that of an exception; at most 500 characters."""
    seconds: float = 0.0
    """The time that it took to score."""
    waited: float = 0.0
    """Before that, the seconds of waiting for a worker, for a place at a service, or for rewards to work again."""


class RewardHealth(Frozen):
    """The reward calls of one generator since its process began."""

    worked: Count = 0
    """Calls that gave a score."""
    failed: Count = 0
    """Calls that failed."""
    failing_s: float = 0.0
    """Seconds since the first failure after the last call that worked; 0: the last call worked."""
    probe_in_s: float | None = None
    """Seconds until the next probe, while rewards are paused; None: they are not."""
    last: str = ""
    """The text of the last failure."""


class GeneratorSeconds(Frozen):
    """What one generator has done since its engine was up, in seconds."""

    generate: Seconds = 0.0
    """At least one completion was being sampled."""
    reward: Seconds = 0.0
    """Completions were being scored, or waited for a reply of their environment, and none was sampled."""
    weights: Seconds = 0.0
    """The engine changed its weights."""
    idle: Seconds = 0.0
    sampling: Seconds = 0.0
    """The time of every completion that was sampled, added up. Divided by wall time it is how many were at once."""
    scoring: Seconds = 0.0
    """The time of every completion from its last token to its score, waiting for a reward worker included."""
    cores: Seconds = 0.0
    """Core-seconds that its machine had (`cores.CoreSeconds`)."""
    spare: Seconds = 0.0
    """Core-seconds in which they were idle."""
    cpu: Seconds = 0.0
    """Core-seconds that its processes used, engine and reward workers included."""


@dataclass(frozen=True)
class Observation:
    """What an environment said between two turns of a completion. The model reads it, and is not trained on it."""

    at: int
    """Sampled tokens of the completion before it."""
    token_ids: np.ndarray
    """[K] int32, K >= 1; as they were given to the engine, turn markers of the chat template included."""


@dataclass(frozen=True)
class Completion:
    """One completion as an engine sampled it: all turns of one answer, where an environment takes part."""

    index: int
    """Its number among the `num_completions` of the request, from 0."""
    token_ids: np.ndarray
    """[L] int32, sampled tokens only, an end token included."""
    logprobs: np.ndarray
    """[L] float32, the log-prob of each sampled token in nats: of logits / temperature, over the whole vocabulary (before
    top-p and top-k)."""
    spans: tuple[VersionSpan, ...]
    """The version spans: they partition [0, L), and versions never decrease."""
    finish_reason: FinishReason
    observations: tuple[Observation, ...] = ()
    """In order; `at` rises."""

    @property
    def all_token_ids(self) -> np.ndarray:
        """[L + all K] int32, what follows the prompt: sampled tokens, and observations where the model read them."""
        if not self.observations:
            return self.token_ids
        return np.insert(
            self.token_ids,
            np.concatenate([np.full(len(one.token_ids), one.at) for one in self.observations]),
            np.concatenate([one.token_ids for one in self.observations]),
        )

    @property
    def sampled_at(self) -> np.ndarray:
        """[L] int64, the place of each sampled token in `all_token_ids`."""
        places = np.arange(len(self.token_ids))
        for one in self.observations:
            places[one.at :] += len(one.token_ids)
        return places

    @property
    def turns(self) -> list[np.ndarray]:
        """The sampled tokens of each turn, without what the environment said between them."""
        split = (
            np.split(self.token_ids, [one.at for one in self.observations]) if self.observations else [self.token_ids]
        )
        return [turn for turn in split if len(turn)]


@dataclass(frozen=True)
class Rollout:
    """One scored completion."""

    completion: Completion
    score: Score
    seed: int = 0
    """The sampling seed, in engines that use one."""
    text: str = ""
    """In an evaluation the completion without special tokens; else empty, since whoever trains can decode."""


class Discarded(Frozen, forbid_unknown_fields=False):  # journals of older releases have further counts
    """Completions that were sampled for a group and are not in it."""

    tokens: int = 0
    """Tokens sampled in all of them."""
    censored: int = 0
    """Completions not finished when the group was cut. Most are long ones, so the group's lengths are biased."""


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
    """Seconds by phase, `generate` and `reward`."""
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
