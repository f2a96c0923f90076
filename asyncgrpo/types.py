"""The data types that all packages share: policy versions, prompts, leases, completions, scores and groups.

All of them are frozen. Those made of plain values are also the schema on the wire; a `Group`, which holds arrays, is
packed by `wire/codec.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""An integer that JSON and all other formats in use represent exactly. It is checked at decoding."""

Seconds = Annotated[float, msgspec.Meta(ge=0)]

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""An id, or a one-word reason. It is short, because other messages repeat it."""

FinishReason = Literal["stop", "length", "abort"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of message structs: immutable, keyword-only, and strict about unknown fields."""


class PolicyVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One set of published weights. Versions are unique, because every start of a learner has a new `lineage`."""

    lineage: Count
    number: Count
    """Optimizer steps that made these weights."""

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Parse the result of `str`; engines carry versions as text. Raises ValueError."""
        lineage, _, number = text.partition(".")
        return cls(int(lineage), int(number))


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens `start` (included) to `end` (excluded) of one completion, which `version` sampled."""

    version: PolicyVersion
    start: Count
    end: Count


class Sampling(Frozen):
    """Sampling parameters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_tokens: int = 256
    """Longest completion, tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Each of these tokens ends a completion, and is kept as its last token."""


class Prompt(Frozen):
    """A tokenised prompt and the inputs of its reward."""

    prompt_id: str
    """An id that is stable over restarts and unique in a run, for example `train/17` (row 17 of the training file)."""
    token_ids: tuple[int, ...]
    """Empty for a prompt longer than `data.max_prompt_tokens`, which is dropped when it is due."""
    text: str = ""
    """The prompt before tokenisation, if the row has a text."""
    turns: tuple[dict[str, Any], ...] = ()
    """The prompt before tokenisation, if the row has chat turns, each with `role` and `content`."""
    answer: Any = None
    """The ground truth of the data file: any JSON value."""
    source: str = ""
    """`data_source` of the row; it chooses the rule when rewards are rule-based."""
    info: dict[str, Any] = {}
    """`extra_info` of the row, or its other columns."""
    images: tuple[str, ...] = ()
    """Digests of its images, whose files are in `RUN/images`. `token_ids` has an image token for each token of an image."""


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
    """True if one further completion, with index `num_completions`, is sampled greedily as a baseline that is not trained."""
    min_completions: int = 0
    """Fewest completions of an accepted group, without the greedy one; 0: all `num_completions`."""
    cut_after_s: float | None = None
    """Seconds after which the group is delivered without its missing completions, if enough are there. None: never."""


class Score(Frozen):
    """The result of a reward call for one completion: a number, or the name of a failure."""

    value: float | None = None
    """None exactly if `failure` is given."""
    failure: Name | None = None
    """One of the label values of `metrics.reward_failures_total`, such as `timeout`, `exception` or `unknown_source`."""
    parts: dict[str, float] = {}
    """The named parts of a dict reward. Their means are in every step event and go to the loggers."""
    detail: str = ""
    """Details for messages, such as the text of an exception; at most 500 characters."""
    seconds: float = 0.0
    """Time to score, seconds."""
    waited: float = 0.0
    """Time in the queue before it, seconds: for a worker, for a place at a service, or for paused rewards."""


class RewardHealth(Frozen):
    """Reward calls of one generator since its process began."""

    worked: Count = 0
    """Calls that returned a score."""
    failed: Count = 0
    """Calls that failed."""
    failing_s: float = 0.0
    """Seconds since the first failure after the last call that worked; 0: the last call worked."""
    probe_in_s: float | None = None
    """Seconds until the next probe, while rewards are paused; None: rewards are not paused."""
    last: str = ""
    """Text of the last failure."""


class GeneratorSeconds(Frozen):
    """Time of one generator by activity since its engine started, seconds."""

    generate: Seconds = 0.0
    """Time with at least one completion being sampled."""
    reward: Seconds = 0.0
    """Time with completions only in scoring, or waiting for a reply of their environment."""
    weights: Seconds = 0.0
    """Time of weight changes."""
    idle: Seconds = 0.0
    sampling: Seconds = 0.0
    """Sampling time, summed over completions. Divided by wall time it is their mean number at once."""
    scoring: Seconds = 0.0
    """Time from the last token to the score, summed over completions, the queue for reward workers included."""
    cores: Seconds = 0.0
    """Available core-seconds of its machine (`host.CoreSeconds`)."""
    spare: Seconds = 0.0
    """Idle core-seconds of these."""
    cpu: Seconds = 0.0
    """Core-seconds used by its processes, engine and reward workers included."""


@dataclass(frozen=True)
class Observation:
    """Reply of an environment between two turns of a completion. The model reads it, and is not trained on it."""

    at: int
    """Number of sampled tokens of the completion before it."""
    token_ids: np.ndarray
    """[K] int32, K >= 1, as given to the engine, turn markers of the chat template included."""


class KeptTokens(NamedTuple):
    """Tokens that top-p and top-k left to sample each token of a completion from."""

    ids: np.ndarray
    """[M] int32, those of the first sampled token, then those of the second, and so on."""
    counts: np.ndarray
    """[L] int32, number of them for each sampled token; they add up to M."""


class TeacherLogprobs(NamedTuple):
    """Log-probs of a served teacher at each sampled token, over its whole vocabulary at temperature 1, nats."""

    sampled: np.ndarray
    """[L] float32, of the sampled token."""
    ids: np.ndarray
    """[L, k] int32, the most likely tokens; k is `teacher.top_k`."""
    values: np.ndarray
    """[L, k] float32, theirs."""


@dataclass(frozen=True)
class Completion:
    """One completion as sampled by an engine; with an environment, all turns of one answer."""

    index: int
    """Its index among the `num_completions` of the request, from 0."""
    token_ids: np.ndarray
    """[L] int32, sampled tokens only, an end token included."""
    logprobs: np.ndarray
    """[L] float32, the log-prob of each sampled token in nats: of logits / temperature, over the `kept` tokens; without them
    over the whole vocabulary (before top-p and top-k)."""
    spans: tuple[VersionSpan, ...]
    """Version spans, which partition [0, L). Versions never decrease."""
    finish_reason: FinishReason
    observations: tuple[Observation, ...] = ()
    """In order; `at` rises."""
    kept: KeptTokens | None = None
    """Tokens that top-p and top-k left; None: not recorded."""
    routes: np.ndarray | None = None
    """[positions, layers, K] uint8 or int16, the experts of each token of prompt and completion, in reading order, from the
    first on; -1 where a choice is unknown. None: not recorded."""
    teacher: TeacherLogprobs | None = None
    """Log-probs of a served teacher; None: there is none."""

    @property
    def all_token_ids(self) -> np.ndarray:
        """[L + all K] int32, the tokens after the prompt: sampled tokens and observations in reading order."""
        if not self.observations:
            return self.token_ids
        return np.insert(
            self.token_ids,
            np.concatenate([np.full(len(one.token_ids), one.at) for one in self.observations]),
            np.concatenate([one.token_ids for one in self.observations]),
        )

    @property
    def sampled_at(self) -> np.ndarray:
        """[L] int64, index of each sampled token in `all_token_ids`."""
        places = np.arange(len(self.token_ids))
        for one in self.observations:
            places[one.at :] += len(one.token_ids)
        return places

    @property
    def turns(self) -> list[np.ndarray]:
        """The sampled tokens of each turn, without observations."""
        return [turn for turn in np.split(self.token_ids, [one.at for one in self.observations]) if len(turn)]


@dataclass(frozen=True)
class Rollout:
    """One scored completion."""

    completion: Completion
    score: Score
    seed: int = 0
    """The sampling seed, in engines that use one."""
    text: str = ""
    """In an evaluation the completion without special tokens; else empty, because the learner decodes tokens itself."""
    sampled_text: str = ""
    """In an evaluation with observations the text of the turns alone, as the reward reads it; else empty."""


class Discarded(Frozen):
    """Completions that were sampled for a group and left out of it."""

    tokens: Count = 0
    """Tokens sampled in all of them."""
    censored: Count = 0
    """Unfinished completions at the group's deadline. Most are long, so the group's lengths are biased."""


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
